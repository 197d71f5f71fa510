"""Shards that change, go away or fail while their blocks are read."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock_server.blocks import decode as decode_module
from penstock_server.blocks.decode import ParsedFooters
from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog import snapshot as snapshot_module
from penstock_server.catalog.shard import stat_of
from penstock_server.problems import OutOfMemory, ShardUnavailable, ShardUnreadable, SnapshotGone
from penstock_server.recipes import encode
from support.corpora import write_shards
from support.engine import open_snapshot, rows_of


def test_shard_of_a_moved_symlink_is_read_from_the_opened_file(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, score in (("old", 1), ("new", 0)):
        (tmp_path / name).mkdir()
        table = pa.table({"input_ids": pa.array([[score]] * 9, pa.list_(pa.int32())), "score": [score] * 9})
        pq.write_table(table, tmp_path / name / "part-000.parquet")
        (tmp_path / name / "penstock.toml").write_text('filter = "score > 0"')
    link = tmp_path / "data"

    def lead_to(name: str) -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(name)

    lead_to("old")
    blocks = Blocks(open_snapshot(link), BlockStore(cache_dir))

    def elsewhere(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            lead_to("new")
            found = call(*args, **options)
            lead_to("old")
            return found

        return called

    monkeypatch.setattr(pq, "ParquetFile", elsewhere(pq.ParquetFile))
    assert blocks.rows_by_hash(Mock()).sum(axis=0).tolist() == [9]
    assert rows_of(blocks.get([0])[0]) == [[1]] * 9


def test_shard_rewritten_during_reading_stores_no_new_row(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "_BLOCK_ROWS", 5_000)
    rows = [[n % 9] * 20 for n in range(50_000)]
    folder = write_shards(tmp_path / "big", "tokens", [rows], type_=pa.list_(pa.int32()), row_group_size=50_000)
    path, encode_rows = folder / "part-000.parquet", encode.encode
    other = path.read_bytes()[::-1]

    def rewriting(*args: Any) -> pa.RecordBatch:
        path.write_bytes(other)  # in place, once the first block is read
        return encode_rows(*args)

    blocks = Blocks(open_snapshot(folder), BlockStore(cache_dir))
    monkeypatch.setattr(encode, "encode", rewriting)
    with pytest.raises((ShardUnavailable, ShardUnreadable, SnapshotGone)):
        blocks.get([9])
    assert len(list(cache_dir.glob("*.block"))) <= 1  # the first one, read before


def test_changed_shard_is_gone_and_a_touched_one_is_not(open_blocks: Callable[[], Blocks], data: Path) -> None:
    blocks = open_blocks()
    (data / "part-000.parquet").touch()
    blocks.get([0])
    write_shards(data, "input_ids", [[[9, 9, 9]]], type_=pa.list_(pa.int32()), row_group_size=9)
    with pytest.raises(SnapshotGone, match=r"part-000.parquet changed since the server read it"):
        blocks.get([1])


def test_changed_shard_with_its_old_mtime_is_gone(open_blocks: Callable[[], Blocks], data: Path) -> None:
    path, blocks = data / "part-000.parquet", open_blocks()
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(b"!")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(SnapshotGone, match=r"part-000.parquet changed since the server read it"):
        blocks.get([0])


def test_removed_shard_is_gone_unless_all_are(open_blocks: Callable[[], Blocks], data: Path) -> None:
    write_shards(data, "input_ids", [[[9, 9, 9]], [[8, 8]]], type_=pa.list_(pa.int32()), row_group_size=9)
    blocks = open_blocks()
    shards = sorted(data.glob("*.parquet"))
    shards[0].unlink()
    with pytest.raises(SnapshotGone, match=r"part-000.parquet was removed since the server read it"):
        blocks.get([0])
    for shard in shards[1:]:
        shard.unlink()
    with pytest.raises(ShardUnavailable, match=r"part-000.parquet cannot be read now: .*No such file"):
        blocks.get([0])


def test_shard_that_became_a_pipe_is_not_waited_for(open_blocks: Callable[[], Blocks], data: Path) -> None:
    blocks = open_blocks()
    (data / "part-000.parquet").unlink()
    os.mkfifo(data / "part-000.parquet")
    with pytest.raises(ShardUnavailable, match=r"part-000.parquet cannot be read now: it is not a regular file"):
        blocks.get([0])


def test_changed_shard_with_the_same_footer_is_another_snapshot(data: Path, cache_dir: Path) -> None:
    """Two shards of equal layout and equal statistics can have one footer, byte for byte, and yet other tokens."""

    def write(tokens: list[int]) -> bytes:
        table = pa.table({"input_ids": pa.array([tokens] * 500, pa.list_(pa.int32()))})
        pq.write_table(table, path, use_dictionary=False, compression="none")
        content = path.read_bytes()
        return content[-8 - int.from_bytes(content[-8:-4], "little") :]

    path = data.parent / "plain" / "x.parquet"
    path.parent.mkdir()
    footer = write([1, 5, 2])
    before = open_snapshot(path.parent)
    blocks = Blocks(before, BlockStore(cache_dir))
    assert write([1, 2, 5]) == footer
    with pytest.raises(SnapshotGone):
        blocks.get([0])
    assert open_snapshot(path.parent).fingerprint != before.fingerprint


def test_failing_storage_is_no_change_of_the_data(open_blocks: Callable[[], Blocks], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    blocks = open_blocks()
    with monkeypatch.context() as patch:
        patch.setattr(pq, "ParquetFile", fail)
        with pytest.raises(ShardUnavailable, match=r"part-000.parquet cannot be read now: Input/output error"):
            blocks.get([0])
    assert blocks.get([0])[0].num_rows == 32


@pytest.mark.parametrize("error", [pa.ArrowMemoryError("malloc of size 1 failed"), MemoryError("malloc of size 1 failed")])
def test_out_of_memory_is_no_fault_of_the_shard(
    open_blocks: Callable[[], Blocks], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    blocks = open_blocks()
    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetFile, "iter_batches", Mock(side_effect=error))
        with pytest.raises(OutOfMemory, match=r"for row group 0 of part-000.parquet of \w+: malloc of size 1 failed\. "):
            blocks.get([0])
    assert blocks.get([0])[0].num_rows == 32


def test_footer_is_parsed_once_per_file(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, read = [], pq.read_metadata

    def counted(file: pa.OSFile) -> pq.FileMetaData:
        parsed.append(str(Path(f"/proc/self/fd/{file.fileno()}").readlink()))
        return read(file)

    monkeypatch.setattr(pq, "read_metadata", counted)
    path = tmp_path / "one" / "part-000.parquet"
    for day in range(2):
        tokens = [[500 * day + n] for n in range(60)]
        write_shards(path.parent, "tokens", [tokens], type_=pa.list_(pa.int32()), row_group_size=10)
        os.utime(path, (day, day))
        blocks = Blocks(open_snapshot(path.parent), BlockStore(cache_dir))
        assert [row for index in range(6) for row in rows_of(blocks.get([index])[0])] == tokens
    assert parsed == [str(path)] * 2


def test_footers_are_remembered_within_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(side_effect=pq.read_metadata)
    monkeypatch.setattr(pq, "read_metadata", read)
    folder = write_shards(tmp_path / "d", "tokens", [[[1]]] * 4, type_=pa.list_(pa.int32()), row_group_size=1)
    shards = open_snapshot(folder).shards
    # The shards whose footers are parsed, by the number of footers that the budget has room for.
    for room, parsed in ((4, [0, 1, 2, 3]), (3, [0, 1, 2, 3, 1, 0]), (0, [0, 1, 0, 2, 3, 1, 0, 1])):
        monkeypatch.setattr(decode_module, "_FOOTER_BYTES", room * pq.read_metadata(shards[0].path).serialized_size)
        footers, numbers = ParsedFooters(), list[int]()
        for number in (0, 1, 0, 0, 2, 3, 1, 0, 0, 1):
            read.reset_mock()
            with pa.OSFile(str(shards[number].path)) as file:
                assert footers.of(shards[number].path, file, stat_of(file)).num_rows == 1
            numbers += [number] * read.call_count
        assert numbers == parsed
