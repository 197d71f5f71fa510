"""Cached footers: always what reading them would give, and an unchanged shard is never opened."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.blocks.cache import CacheFolder
from penstock_server.catalog.footers import FolderContents, FolderReader
from penstock_server.catalog.history import drop_old_notes, open_notes, read_note, write_note
from penstock_server.catalog.scan import list_folder
from penstock_server.catalog.snapshot import Snapshot
from penstock_server.files import open_regular
from penstock_server.problems import DatasetInvalid
from penstock_server.sources.stats import FileStat
from support.corpora import write_numbered

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


def contents(reader: FolderReader, *, settled: bool = False) -> FolderContents:
    return reader.read(reader.state(list_folder(reader.folder).shards), settled=settled)


def read(reader: FolderReader, *, settled: bool = False) -> Snapshot:
    return contents(reader, settled=settled).snapshot()


def write_shard(path: Path, ids: list[int]) -> None:
    pq.write_table(pa.table({"input_ids": pa.array([[i] for i in ids], pa.list_(pa.int32()))}), path)


@contextmanager
def opened() -> Iterator[list[str]]:
    """The names of the shards that are opened for their footers."""
    names: list[str] = []

    def counted(path: Path) -> Any:
        names.append(path.name)
        return open_regular(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock_server.catalog.shard.open_regular", counted)
        yield names


def test_unchanged_shards_are_not_opened_again_after_restart(data: Path, note: Path) -> None:
    footers = FolderReader(data, note=note)
    with opened() as names:
        first = read(footers)
    assert set(names) == {"part-000.parquet", "part-001.parquet", "part-002.parquet"}
    with opened() as names:
        assert read(footers).shards == first.shards
        restarted = read(FolderReader(data, note=note))
    assert set(names) == {"part-000.parquet"}  # its columns decide the recipe
    assert restarted.shards == first.shards  # every field of them
    assert restarted.fingerprint == first.fingerprint


def test_changed_shards_alone_are_opened(data: Path, note: Path) -> None:
    before = read(FolderReader(data, note=note))
    os.utime(data / "part-000.parquet", ns=(HOUR_AGO_NS, HOUR_AGO_NS + 1))
    write_shard(data / "part-001.parquet", [1, 2])
    (data / "part-002.parquet").unlink()
    write_shard(data / "part-003.parquet", [3])
    with opened() as names:
        after = read(FolderReader(data, note=note))
    assert set(names) == {"part-000.parquet", "part-001.parquet", "part-003.parquet"}
    assert after.shards[0].digest == before.shards[0].digest
    assert after.shards[0].stat.mtime_ns == before.shards[0].stat.mtime_ns + 1
    assert after.shards[1].digest != before.shards[1].digest
    assert after.num_rows == 30 + 2 + 1


def test_swapped_shards_are_read_again_when_size_and_mtime_are_equal(data: Path, note: Path) -> None:
    for number in (0, 1):
        write_shard(data / f"part-00{number}.parquet", [number])
    age(data)
    before = read(FolderReader(data, note=note)).shards
    (data / "part-000.parquet").rename(data / ".part")
    (data / "part-001.parquet").rename(data / "part-000.parquet")
    (data / ".part").rename(data / "part-001.parquet")
    after = read(FolderReader(data, note=note)).shards
    assert [s.stat[:2] for s in after] == [s.stat[:2] for s in before]
    assert [s.digest for s in after[:2]] == [s.digest for s in before[1::-1]] != [s.digest for s in before[:2]]


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written has the size, the date and the inode of what was there: the clock stands still between the two."""
    monkeypatch.setattr(FileStat, "of", lambda stat: FileStat(stat.st_size, stat.st_mtime_ns, stat.st_ino, 0))


@pytest.mark.parametrize("settled", [False, True])
def test_young_file_is_not_cached_unless_settled(data: Path, note: Path, settled: bool, still: None) -> None:
    path = data / "part-000.parquet"
    soon_ns = time.time_ns() + 10**9
    for ids in ([1, 2], [1, 3]):
        content = path.with_suffix(".new")
        write_shard(content, ids)
        path.write_bytes(content.read_bytes())
        content.unlink()
        os.utime(path, ns=(soon_ns, soon_ns))
        snapshot = read(FolderReader(data, note=note), settled=settled)
        assert snapshot.vocab_size == 90
        largest = snapshot.shards[0].token_range
        # Settled says that the date has been seen for a while, and then a clock would have gone on.
        assert largest == (1, 2 if settled else ids[-1])


def test_shard_is_read_again_when_its_mtime_was_restored(data: Path, note: Path) -> None:
    path = data / "part-000.parquet"
    for ids in ([1, 2], [1, 3]):
        write_shard(data / ".part", ids)
        path.write_bytes((data / ".part").read_bytes())
        os.utime(path, ns=(HOUR_AGO_NS, HOUR_AGO_NS))
        shard = read(FolderReader(data, note=note), settled=True).shards[0]
        assert (shard.stat.mtime_ns, shard.token_range) == (HOUR_AGO_NS, (1, ids[-1]))


def test_digest_covers_every_byte_of_a_long_footer(data: Path) -> None:
    path = data / "part-000.parquet"
    digests = set()
    for letter in "ab":
        note = "x" * 100_000 + letter + "x" * 900_000  # where no sample of the file is taken
        table = pq.read_table(data / "part-001.parquet").replace_schema_metadata({"note": note})
        pq.write_table(table, path)
        digests.add(read(FolderReader(data)).shards[0].digest)
    assert len(digests) == 2


def test_damaged_note_is_made_again(data: Path, note: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = read(FolderReader(data, note=note)).shards
    whole = note.read_bytes()
    for damaged in (b"", whole[:-9], whole[:40], whole[:60] + bytes([whole[60] ^ 1]) + whole[61:], b"\xff" * 100):
        caplog.clear()
        note.write_bytes(damaged)
        assert read(FolderReader(data, note=note)).shards == expected
        assert "footers is damaged and will be made again" in caplog.text
        assert note.read_bytes() == whole


def test_split_column_is_compared_with_a_new_first_shard(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text("split_by = 'n'")
    footers = FolderReader(tmp_path)
    for name, values in (("b", [7]), ("a", [7.0])):
        pq.write_table(pa.table({"tokens": pa.array([[1]], pa.list_(pa.int32())), "n": values}), tmp_path / f"{name}.parquet")
        found = contents(footers, settled=True)
        assert list(found.shards) == [f"{name}.parquet"]
    assert "split_by" in found.failures["b.parquet"]


def test_note_that_cannot_be_stored_is_logged(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read(FolderReader(data, note=Path("/dev/null/footers"))).num_rows == 90
    assert "forgets its content" in caplog.text


def test_shard_that_changes_while_it_is_read_is_invalid(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(path: Path) -> Any:
        file = open_regular(path)
        copy = path.with_suffix(".copy")
        shutil.copy(path, copy)
        copy.rename(path)
        return file

    monkeypatch.setattr("penstock_server.catalog.shard.open_regular", overtaken)
    with pytest.raises(DatasetInvalid, match="part-000.parquet is being written to"):
        read(FolderReader(data))


def test_notes_are_outside_the_cache_budget(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, 1000)
    note = open_notes(cache.folder, tmp_path / "data") / "footers"
    write_note(note, {"much": "x" * 5000})
    assert CacheFolder(tmp_path, 1000).used_bytes == 0
    for number in range(50):
        assert cache.write(f"block{number}", memoryview(b"y" * 100))
    assert read_note(note) == {"much": "x" * 5000}


def test_notes_on_folders_not_opened_for_long_are_dropped(tmp_path: Path) -> None:
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
def test_cached_shards_equal_read_shards(actions: list[tuple[str, int, list[int]]]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        data, note = Path(temporary) / "data", Path(temporary) / "note"
        data.mkdir()
        write_shard(data / "part-9.parquet", [1])
        footers = FolderReader(data, note=note)
        for what, number, ids in actions:
            path, other = data / f"part-{number}.parquet", data / f"part-{(number + 1) % 4}.parquet"
            if what == "write":
                write_shard(path, ids)
            elif what == "replace":  # as a careful writer does
                write_shard(data / ".part", ids)
                (data / ".part").rename(path)
            elif what == "restart":
                footers = FolderReader(data, note=note)
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
            assert read(footers).shards == read(FolderReader(data)).shards
