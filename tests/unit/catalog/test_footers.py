"""Remembered footers: always what reading them would give, and never an unchanged shard opened."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpora import write_numbered
from penstock_server.blocks.cache import CacheFolder
from penstock_server.catalog import footers as footers_module
from penstock_server.catalog import shard as shard_module
from penstock_server.catalog.footers import Footers
from penstock_server.catalog.notes import drop_old_notes, open_notes, read_note, write_note
from penstock_server.catalog.reading import read_folder
from penstock_server.catalog.scan import FileStat, list_folder
from penstock_server.catalog.snapshot import Snapshot
from penstock_server.problems import DatasetInvalid

HOUR_AGO_NS = time.time_ns() - 3600 * 10**9


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = write_numbered(tmp_path / "data", 90)
    age(folder)
    return folder


@pytest.fixture
def note(tmp_path: Path) -> Path:
    return tmp_path / "notes" / "footers"


def age(folder: Path, mtime_ns: int = HOUR_AGO_NS) -> None:
    for path in folder.iterdir():
        os.utime(path, ns=(mtime_ns, mtime_ns))


def read(folder: Path, footers: Footers, *, settled: bool = False) -> Snapshot:
    return read_folder(folder, list_folder(folder).shards, None, footers, name=folder.name, settled=settled).snapshot()


def write_shard(path: Path, ids: list[int]) -> None:
    pq.write_table(pa.table({"input_ids": pa.array([[i] for i in ids], pa.list_(pa.int32()))}), path)


@contextmanager
def opened() -> Iterator[list[str]]:
    """The names of the shards that are opened for their footers."""
    names: list[str] = []
    original = shard_module.open_file

    def counted(path: Path) -> BinaryIO:
        names.append(path.name)
        return original(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_module, "open_file", counted)
        yield names


def test_a_shard_that_is_unchanged_is_never_opened_again_also_after_a_restart(data: Path, note: Path) -> None:
    footers = Footers(data, note)
    with opened() as names:
        first = read(data, footers)
    assert set(names) == {"part-000.parquet", "part-001.parquet", "part-002.parquet"}
    with opened() as names:
        assert read(data, footers).shards == first.shards
        restarted = read(data, Footers(data, note))
    assert names == []
    assert restarted.shards == first.shards  # every field of them
    assert restarted.fingerprint == first.fingerprint


def test_a_shard_whose_date_no_note_can_hold_is_read_anew(note: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        data = write_numbered(Path(name) / "data", 90)
        age(data)
        os.utime(data / "part-000.parquet", ns=(0, -11_644_473_600 * 10**9))  # 1601, which is zero to Windows
        if (data / "part-000.parquet").stat().st_mtime_ns > -(2**63):
            pytest.skip("this file system has no dates before 1678")
        with opened() as names:
            first = read(data, Footers(data, note))
            assert read(data, Footers(data, note)).shards == first.shards
        assert names.count("part-000.parquet") > names.count("part-001.parquet") == names.count("part-002.parquet")


def test_only_what_changed_is_opened_and_a_new_date_on_the_same_content_keeps_the_digest(data: Path, note: Path) -> None:
    before = read(data, Footers(data, note))
    os.utime(data / "part-000.parquet", ns=(HOUR_AGO_NS, HOUR_AGO_NS + 1))
    write_shard(data / "part-001.parquet", [1, 2])
    (data / "part-002.parquet").unlink()
    write_shard(data / "part-003.parquet", [3])
    with opened() as names:
        after = read(data, Footers(data, note))
    assert set(names) == {"part-000.parquet", "part-001.parquet", "part-003.parquet"}
    assert after.shards[0].digest == before.shards[0].digest
    assert after.shards[0].date.mtime_ns == before.shards[0].date.mtime_ns + 1
    assert after.shards[1].digest != before.shards[1].digest
    assert after.num_rows == 30 + 2 + 1


def test_shards_that_change_places_are_noticed_though_size_and_date_are_equal(data: Path, note: Path) -> None:
    for number in (0, 1):
        write_shard(data / f"part-00{number}.parquet", [number])
    age(data)
    before = read(data, Footers(data, note)).shards
    (data / "part-000.parquet").rename(data / ".part")
    (data / "part-001.parquet").rename(data / "part-000.parquet")
    (data / ".part").rename(data / "part-001.parquet")
    after = read(data, Footers(data, note)).shards
    assert [s.date[:2] for s in after] == [s.date[:2] for s in before]
    assert [s.digest for s in after[:2]] == [s.digest for s in before[1::-1]] != [s.digest for s in before[:2]]


def test_shards_that_are_gone_are_forgotten(data: Path, note: Path) -> None:
    read(data, Footers(data, note))
    (data / "part-002.parquet").unlink()
    read(data, Footers(data, note))
    kept = read_note(note)
    assert kept is not None
    assert list(kept["shards"]) == ["part-000.parquet", "part-001.parquet"]


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written has the size, the date and the inode of what was there: the clock stands still between the two."""
    monkeypatch.setattr(FileStat, "of", lambda stat: FileStat(stat.st_size, stat.st_mtime_ns, stat.st_ino, 0))


@pytest.mark.parametrize("settled", [False, True])
def test_a_file_that_may_yet_be_written_to_without_a_new_date_is_not_remembered(
    data: Path, note: Path, settled: bool, still: None
) -> None:
    path = data / "part-000.parquet"
    soon_ns = time.time_ns() + 10**9
    for ids in ([1, 2], [1, 3]):
        content = path.with_suffix(".new")
        write_shard(content, ids)
        path.write_bytes(content.read_bytes())
        content.unlink()
        os.utime(path, ns=(soon_ns, soon_ns))
        snapshot = read(data, Footers(data, note), settled=settled)
        assert snapshot.vocab_size == 90
        largest = snapshot.shards[0].token_range
        # Settled says that the date has been seen for a while, and then a clock would have gone on.
        assert largest == (1, 2 if settled else ids[-1])


def test_a_shard_that_is_written_to_and_given_its_old_date_is_noticed(data: Path, note: Path) -> None:
    path = data / "part-000.parquet"
    for ids in ([1, 2], [1, 3]):
        write_shard(data / ".part", ids)
        path.write_bytes((data / ".part").read_bytes())
        os.utime(path, ns=(HOUR_AGO_NS, HOUR_AGO_NS))
        shard = read(data, Footers(data, note), settled=True).shards[0]
        assert (shard.date.mtime_ns, shard.token_range) == (HOUR_AGO_NS, (1, ids[-1]))


def test_columns_of_a_file_that_may_yet_be_written_to_are_not_remembered(data: Path, still: None) -> None:
    path, footers = data / "part-000.parquet", Footers(data)
    soon_ns = time.time_ns() + 10**9
    for name in ("tokens", "labels"):
        content = path.with_suffix(".new")
        pq.write_table(pa.table({name: pa.array([[1]], pa.list_(pa.int32()))}), content)
        path.write_bytes(content.read_bytes())
        content.unlink()
        os.utime(path, ns=(soon_ns, soon_ns))
        assert footers.schema(list_folder(data).shards).names == [name]


def test_every_byte_of_a_footer_is_in_the_digest_however_long_it_is(data: Path) -> None:
    path = data / "part-000.parquet"
    digests = set()
    for letter in "ab":
        note = "x" * 100_000 + letter + "x" * 900_000  # where no sample of the file is taken
        table = pq.read_table(data / "part-001.parquet").replace_schema_metadata({"note": note})
        pq.write_table(table, path)
        digests.add(read(data, Footers(data)).shards[0].digest)
    assert len(digests) == 2


def test_a_damaged_note_is_dropped_and_made_again(data: Path, note: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = read(data, Footers(data, note)).shards
    whole = note.read_bytes()
    for damaged in (b"", whole[:-9], whole[:40], whole[:60] + bytes([whole[60] ^ 1]) + whole[61:], b"\xff" * 100):
        caplog.clear()
        note.write_bytes(damaged)
        assert read(data, Footers(data, note)).shards == expected
        assert "footers is damaged and will be made again" in caplog.text
        assert note.read_bytes() == whole


def test_a_note_of_another_version_or_recipe_says_nothing(data: Path, note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(data, Footers(data, note))
    with opened() as names:
        monkeypatch.setattr(footers_module, "_VERSION", (0, *footers_module._VERSION[1:]))
        read(data, Footers(data, note))
        assert len(set(names)) == 3
        names.clear()
        (data / "penstock.toml").write_text("vocab_size = 100")
        read(data, Footers(data, note))
        assert len(set(names)) == 3


def test_what_rows_are_split_by_is_compared_with_a_first_shard_that_comes_later(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text("split_by = 'n'")
    footers = Footers(tmp_path)
    for name, values in (("b", [7]), ("a", [7.0])):
        pq.write_table(pa.table({"tokens": pa.array([[1]], pa.list_(pa.int32())), "n": values}), tmp_path / f"{name}.parquet")
        reading = read_folder(tmp_path, list_folder(tmp_path).shards, None, footers, name="d", settled=True)
        assert list(reading.shards) == [f"{name}.parquet"]
    assert "b.parquet: split_by reads 'n', which is int64 here and double in the first shard" in reading.failures["b.parquet"]


def test_a_folder_that_cannot_be_written_to_costs_only_the_memory(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read(data, Footers(data, Path("/dev/null/footers"))).num_rows == 90
    assert "what it holds is forgotten with this process" in caplog.text


def test_a_file_that_changes_while_it_is_read_is_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = shard_module.open_file

    def overtaken(path: Path) -> BinaryIO:
        file = original(path)
        copy = path.with_suffix(".copy")
        shutil.copy(path, copy)
        copy.rename(path)
        return file

    monkeypatch.setattr(shard_module, "open_file", overtaken)
    with pytest.raises(DatasetInvalid, match="part-000.parquet is being written to"):
        read(data, Footers(data))


def test_a_file_that_is_written_to_while_it_is_read_is_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = shard_module._file_digest

    def written_to(file: BinaryIO, size: int) -> str:
        digest = original(file, size)
        os.utime(file.name, ns=(HOUR_AGO_NS, HOUR_AGO_NS + 1))
        return digest

    monkeypatch.setattr(shard_module, "_file_digest", written_to)
    with pytest.raises(DatasetInvalid, match="part-000.parquet is being written to"):
        read(data, Footers(data))


def test_notes_neither_count_as_blocks_nor_are_evicted_with_them(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, 1000)
    note = open_notes(cache.folder, tmp_path / "data") / "footers"
    write_note(note, {"much": "x" * 5000})
    assert CacheFolder(tmp_path, 1000).used_bytes == 0
    for number in range(50):
        assert cache.write(f"block{number}", memoryview(b"y" * 100))
    assert read_note(note) == {"much": "x" * 5000}


def test_notes_on_folders_that_nobody_opens_any_more_are_dropped(tmp_path: Path) -> None:
    old, new = (open_notes(tmp_path, tmp_path / name) for name in ("old", "new"))
    for folder in (old, new):
        write_note(folder / "footers", {})
        (folder / "left.tmp").write_bytes(b"by a crash")
        (folder / "half.tmp").write_bytes(b"is being written")
        for name in ("left.tmp", "footers"):
            os.utime(folder / name, (1, 1))
    os.utime(old, (1, 1))
    drop_old_notes(tmp_path, time.time())
    assert not old.exists()
    assert {path.name for path in new.iterdir()} == {"footers", "half.tmp"}


ACTIONS = st.tuples(
    st.sampled_from(["write", "touch", "remove", "age", "restart", "replace", "swap"]),
    st.integers(0, 3),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
)


@given(st.lists(ACTIONS, max_size=12))
def test_what_is_remembered_is_what_reading_gives(actions: list[tuple[str, int, list[int]]]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        data, note = Path(temporary) / "data", Path(temporary) / "note"
        data.mkdir()
        write_shard(data / "part-9.parquet", [1])
        footers = Footers(data, note)
        for what, number, ids in actions:
            path, other = data / f"part-{number}.parquet", data / f"part-{(number + 1) % 4}.parquet"
            if what == "write":
                write_shard(path, ids)
            elif what == "replace":  # as a careful writer does
                write_shard(data / ".part", ids)
                (data / ".part").rename(path)
            elif what == "restart":
                footers = Footers(data, note)
            elif what == "age":
                age(data)
            elif path.exists() and what == "touch":
                os.utime(path)
            elif path.exists() and what == "remove":
                path.unlink()
            elif path.exists() and other.exists() and what == "swap":
                path.rename(data / ".part")
                other.rename(path)
                (data / ".part").rename(other)
            assert read(data, footers).shards == read(data, Footers(data)).shards
