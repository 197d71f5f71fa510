import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corpora import write_numbered, write_shards, write_text, write_tokenizer
from penstock_server import sealed
from penstock_server.counts.index import Index
from penstock_server.counts.lengths import count_lengths
from penstock_server.datasets.catalog import open_catalog
from penstock_server.datasets.held import Served
from penstock_server.datasets.lookup import show_quarantine, show_row
from penstock_server.problems import OutOfMemory, ShardUnavailable, ShardUnreadable, SnapshotGone
from penstock_server.recipes import encode
from penstock_server.recipes.filters import Filter
from penstock_server.snapshots import snapshot as snapshot_module
from penstock_server.snapshots.shard import date_of, numbers, open_shard
from penstock_server.snapshots.snapshot import Snapshot
from penstock_server.storage import blocks as blocks_module
from penstock_server.storage import decode as decode_module
from penstock_server.storage import maps as maps_module
from penstock_server.storage import parsed_footers as parsed_footers_module
from penstock_server.storage import quarantine as quarantine_module
from penstock_server.storage.block import Block
from penstock_server.storage.blocks import Blocks
from penstock_server.storage.cache import CacheFolder
from penstock_server.storage.names import BlockNames
from penstock_server.storage.parsed_footers import ParsedFooters
from penstock_server.storage.splits import Splits
from penstock_server.storage.store import BlockStore
from planned import open_snapshot


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_numbered(tmp_path / "data", 100)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def open_blocks(data: Path, cache_dir: Path) -> Callable[[], Blocks]:
    """The blocks as a server sees them that has just been started."""
    return lambda: Blocks(open_snapshot(data), BlockStore(CacheFolder(cache_dir)))


def rows_of(block: Block) -> list[list[int]]:
    tokens = block.features["tokens"].tokens
    spans = zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True)
    return [tokens.values[start : start + length].tolist() for start, length in spans]


@pytest.fixture
def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reads: list[str] = []
    read = encode.encode

    def counted(*args: object) -> pa.RecordBatch:
        reads.append(threading.current_thread().name)
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(encode, "encode", counted)
    return reads


def loading(blocks: Blocks, indices: Sequence[int]) -> list[Future[Block]]:
    """What is asked for, none of which is mapped."""
    asked = blocks.request(indices)
    futures = [future for future in asked if isinstance(future, Future)]
    assert futures == asked
    return futures


def encoding_waits(monkeypatch: pytest.MonkeyPatch, began: threading.Event, go_on: threading.Event) -> None:
    """From now on whoever encodes rows says so, and waits until it may go on."""
    read = encode.encode

    def waiting(*args: object) -> pa.RecordBatch:
        began.set()
        assert go_on.wait(30)
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(encode, "encode", waiting)


def test_blocks_hold_the_rows_of_their_row_group(open_blocks: Callable[[], Blocks]) -> None:
    first, last = open_blocks().get([0, 4])
    assert [row[0] for row in rows_of(first)] == list(range(32))
    assert [row[0] for row in rows_of(last)] == list(range(68, 100))


def test_a_shard_that_comes_has_only_its_own_blocks_made_also_if_it_has_the_largest_id(
    open_blocks: Callable[[], Blocks], data: Path, count_reads: list[str]
) -> None:
    before = open_blocks()
    before.get(list(range(5)))
    reads = len(count_reads)
    pq.write_table(pa.table({"input_ids": pa.array([[60_000]], pa.list_(pa.int32()))}), data / "part-100.parquet")
    assert open_snapshot(data).vocab_size == 60_001
    after = open_blocks()
    after.get(list(range(6)))
    assert len(count_reads) == reads + 1
    assert after.names.of_shard(0) == before.names.of_shard(0)  # of which what is counted has its name


def test_ids_beyond_what_a_shards_own_footer_tells_make_bad_rows(data: Path, cache_dir: Path) -> None:
    snapshot = open_snapshot(data)
    shards = [replace(shard, token_range=(0, 5)) for shard in snapshot.shards]
    blocks = Blocks(Snapshot(data, shards, snapshot.recipe, name=data.name), BlockStore(CacheFolder(cache_dir)))
    assert "6" in blocks.get([0])[0].bad[6]


@pytest.mark.parametrize("column", ["tokens", "text"])
def test_a_very_large_row_group_is_several_blocks_decoded_in_one_go(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, count_reads: list[str], column: str
) -> None:
    monkeypatch.setattr(snapshot_module, "_BLOCK_BYTES", 1500)
    if column == "tokens":
        folder = write_shards(tmp_path / "big", "tokens", [[[n] * 9 for n in range(1000)]], type_=pa.list_(pa.int32()),
                              row_group_size=900)  # fmt: skip
    else:
        folder = write_text(tmp_path / "big", [f"fox {n} dog" * 9 for n in range(1000)], row_group_size=900)
    snapshot = open_snapshot(folder, write_tokenizer(tmp_path / "tokenizer.json"))
    assert snapshot.blocks_per_group.tolist()[0] > 3
    assert snapshot.rows_per_block.sum() == 1000
    blocks = Blocks(snapshot, BlockStore(CacheFolder(cache_dir)))
    found = blocks.get(range(snapshot.num_blocks)[::-1])[::-1]
    assert [block.num_rows for block in found] == snapshot.rows_per_block.tolist()
    assert len(count_reads) == snapshot.num_blocks
    if column == "tokens":
        assert [row for block in found for row in rows_of(block)] == [[n] * 9 for n in range(1000)]
    for row in (0, 899, 900, 999):
        index, row_in_block = snapshot.locate(row)
        at = snapshot.block(index)
        assert (at.row_group, at.first_row + row_in_block) == divmod(row, 900)
    # Without room in the cache what is asked for is made, in one go, and no neighbour is tokenized in vain.
    tight = Blocks(snapshot, BlockStore(CacheFolder(tmp_path / "tight", 0)))
    count_reads.clear()
    assert [block.num_rows for block in tight.get([1, 3])] == [found[1].num_rows, found[3].num_rows]
    assert len(count_reads) <= 4
    count_reads.clear()
    assert [block.num_rows for block in tight.get(range(snapshot.num_blocks))] == snapshot.rows_per_block.tolist()
    assert len(count_reads) <= snapshot.num_blocks + 3


def open_large_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[list[int]]], Snapshot]:
    """Two shards of one row group each, of many blocks, on two cores: their rows, and the snapshot."""
    monkeypatch.setattr(snapshot_module, "_BLOCK_BYTES", 150)
    monkeypatch.setattr(blocks_module, "num_cores", lambda: 2)
    shards = [[[shard, n] for n in range(500)] for shard in range(2)]
    folder = write_shards(tmp_path / "data", "tokens", shards, type_=pa.list_(pa.int32()), row_group_size=500)
    snapshot = open_snapshot(folder)
    return shards, snapshot


def test_large_row_groups_are_gone_through_side_by_side_also_where_a_shard_has_but_one(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, snapshot = open_large_groups(tmp_path, monkeypatch)
    assert min(snapshot.blocks_per_group) > 8
    both, begun, encode_rows = threading.Barrier(2), set[str](), encode.encode

    def meeting(rows: pa.RecordBatch, *args: Any) -> pa.RecordBatch:
        if args[-1].shard not in begun:
            begun.add(args[-1].shard)
            both.wait(30)
        return encode_rows(rows, *args)

    monkeypatch.setattr(encode, "encode", meeting)
    blocks = Blocks(snapshot, BlockStore(CacheFolder(cache_dir), 2))
    lengths = count_lengths(snapshot, blocks, lambda _: None)
    assert lengths.per_block("all").sums() == [1000, 2000, 0]
    assert [row for block in blocks.each(range(snapshot.num_blocks)) for row in rows_of(block)] == shards[0] + shards[1]


def test_large_row_groups_that_the_cache_cannot_keep_are_gone_through_one_after_the_other(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, snapshot = open_large_groups(tmp_path, monkeypatch)
    encoded, encode_rows = list[str](), encode.encode

    def recorded(*args: Any) -> pa.RecordBatch:
        encoded.append(args[-1].shard)
        return encode_rows(*args)

    monkeypatch.setattr(encode, "encode", recorded)
    cache = CacheFolder(cache_dir, 4 * snapshot.largest_group_bytes - 1)  # as much again as two groups take is not there
    blocks = Blocks(snapshot, BlockStore(cache, 2))
    assert [row for block in blocks.each(range(snapshot.num_blocks)) for row in rows_of(block)] == shards[0] + shards[1]
    num_before = encoded.index("part-001.parquet")
    assert num_before >= snapshot.blocks_per_group[0] - blocks_module._LOADED_TOGETHER


def test_what_a_filter_keeps_is_counted_in_several_shards_at_a_time(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_numbered(tmp_path / "data", 9, num_shards=3)
    (folder / "penstock.toml").write_text("validation = 0.5")
    both, begun, split_hashes = threading.Barrier(2), list[str](), encode.split_hashes

    def meeting(*args: Any) -> Any:
        begun.append(args[2].shard)
        if len(begun) <= 2:
            both.wait(30)
        return split_hashes(*args)

    monkeypatch.setattr(decode_module, "split_hashes", meeting)
    blocks = Blocks(open_snapshot(folder), BlockStore(CacheFolder(cache_dir), 2))
    assert [rows.sum() for rows in blocks.rows_of_shards()] == [3, 3, 3]


def test_a_folder_that_leads_elsewhere_while_a_shard_is_opened_lends_it_no_row_and_no_statistics(
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
    blocks = Blocks(open_snapshot(link), BlockStore(CacheFolder(cache_dir)))

    def elsewhere(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            lead_to("new")
            found = call(*args, **options)
            lead_to("old")
            return found

        return called

    monkeypatch.setattr(Filter, "groups_that_may_match", elsewhere(Filter.groups_that_may_match))
    monkeypatch.setattr(pq, "ParquetFile", elsewhere(pq.ParquetFile))
    assert [rows.sum() for rows in blocks.rows_of_shards()] == [9]
    assert rows_of(blocks.get([0])[0]) == [[1]] * 9


def test_a_shard_that_is_rewritten_while_it_is_read_leaves_nothing_of_the_new_one(
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

    blocks = Blocks(open_snapshot(folder), BlockStore(CacheFolder(cache_dir)))
    monkeypatch.setattr(encode, "encode", rewriting)
    with pytest.raises((ShardUnavailable, ShardUnreadable, SnapshotGone)):
        blocks.get([9])
    assert len(list(cache_dir.glob("*.block"))) <= 1  # the first one, read before


def test_a_neighbour_that_cannot_be_read_fails_only_who_asks_for_it(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "_BLOCK_ROWS", 100)
    folder = write_shards(
        tmp_path / "b", "tokens", [[[n] for n in range(1000)]], type_=pa.list_(pa.int32()), row_group_size=1000
    )
    encode_rows = encode.encode

    def failing(rows: pa.Table, *args: Any) -> pa.RecordBatch:
        if rows.column(0)[0].as_py() == [700]:
            raise ValueError("a bad page")
        return encode_rows(rows, *args)

    monkeypatch.setattr(encode, "encode", failing)
    blocks = Blocks(open_snapshot(folder), BlockStore(CacheFolder(cache_dir)))
    assert [rows_of(block)[0] for block in blocks.get([0, 3])] == [[0], [300]]
    with pytest.raises(ShardUnreadable, match="a bad page"):
        blocks.get([7])
    assert rows_of(blocks.get([6])[0])[0] == [600]


def test_what_is_cached_waits_for_nothing_that_is_not(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_numbered(tmp_path / "data", 400, num_shards=1, row_group_size=20)
    snapshot = open_snapshot(tmp_path / "data")
    Blocks(snapshot, BlockStore(CacheFolder(cache_dir))).get([0])
    gate, encode_rows = threading.Event(), encode.encode

    def slow(*args: Any) -> pa.RecordBatch:
        assert gate.wait(30)
        return encode_rows(*args)

    monkeypatch.setattr(encode, "encode", slow)
    blocks = Blocks(snapshot, BlockStore(CacheFolder(cache_dir)))
    cold = loading(blocks, range(1, 20))
    assert rows_of(blocks.get([0])[0])[0] == [0]
    assert not any(future.done() for future in cold)
    gate.set()
    assert [rows_of(future.result(30))[0][0] for future in cold] == list(range(20, 400, 20))


def test_a_block_is_decoded_once_for_all_servers_on_a_folder(open_blocks: Callable[[], Blocks], count_reads: list[str]) -> None:
    first = rows_of(open_blocks().get([1])[0])
    assert rows_of(open_blocks().get([1])[0]) == first
    assert len(count_reads) == 1


def test_a_block_is_decoded_once_however_many_ask(open_blocks: Callable[[], Blocks], count_reads: list[str]) -> None:
    blocks = open_blocks()
    gate = threading.Barrier(8)

    def ask() -> None:
        gate.wait()
        blocks.get([0, 1, 2])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(count_reads) == 3


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "foreign"])
def test_a_damaged_cache_file_is_dropped_and_made_again(
    open_blocks: Callable[[], Blocks], cache_dir: Path, count_reads: list[str], damage: str
) -> None:
    expected = rows_of(open_blocks().get([0])[0])
    [path] = cache_dir.glob("*.block")
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut": content[:-100],
            "flip": content[:300] + bytes([content[300] ^ 4]) + content[301:],
            "empty": b"",
            "foreign": b"not a block " * 30,
        }[damage]
    )
    assert rows_of(open_blocks().get([0])[0]) == expected
    assert len(count_reads) == 2
    assert path.read_bytes() == content


def test_a_damaged_cache_file_that_cannot_be_removed_is_in_nobodys_way(
    open_blocks: Callable[[], Blocks], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = rows_of(open_blocks().get([0])[0])
    [path] = cache_dir.glob("*.block")
    path.write_bytes(b"not a block")
    monkeypatch.setattr(CacheFolder, "drop", lambda *_: None)
    [future] = loading(open_blocks(), [0])
    assert rows_of(future.result(30)) == expected


def test_no_flipped_byte_in_a_cache_file_reaches_a_batch(open_blocks: Callable[[], Blocks], cache_dir: Path) -> None:
    expected = rows_of(open_blocks().get([0])[0])
    [path] = cache_dir.glob("*.block")
    content = path.read_bytes()
    for at in range(0, len(content), 5):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert rows_of(open_blocks().get([0])[0]) == expected


def test_a_cache_without_room_and_one_that_cannot_be_written_stop_nothing(
    open_blocks: Callable[[], Blocks], data: Path, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = rows_of(open_blocks().get([0])[0])
    tight = Blocks(open_snapshot(data), BlockStore(CacheFolder(cache_dir, 0)))
    assert rows_of(tight.get([0])[0]) == expected
    assert list(cache_dir.glob("*.block")) == []
    shutil.rmtree(cache_dir)
    assert rows_of(tight.get([1])[0])[0] == [32] + [1] * (32 % 7)
    blocks = open_blocks()
    shutil.rmtree(cache_dir)
    cache_dir.touch()
    for index in range(3):
        blocks.get([index])
    assert rows_of(blocks.get([0])[0]) == expected
    assert caplog.text.count("the block cache cannot be written to") == 1


def test_a_shard_that_changed_is_noticed_and_one_that_was_only_touched_is_not(
    open_blocks: Callable[[], Blocks], data: Path
) -> None:
    blocks = open_blocks()
    (data / "part-000.parquet").touch()
    blocks.get([0])
    write_shards(data, "input_ids", [[[9, 9, 9]]], type_=pa.list_(pa.int32()), row_group_size=9)
    with pytest.raises(SnapshotGone, match=r"part-000.parquet changed since the server read it"):
        blocks.get([1])


def test_a_shard_that_was_written_to_and_given_its_old_date_is_noticed(open_blocks: Callable[[], Blocks], data: Path) -> None:
    path, blocks = data / "part-000.parquet", open_blocks()
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(b"!")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(SnapshotGone, match=r"part-000.parquet changed since the server read it"):
        blocks.get([0])


def test_a_shard_that_was_removed_is_gone_unless_all_are(open_blocks: Callable[[], Blocks], data: Path) -> None:
    write_shards(data, "input_ids", [[[9, 9, 9]], [[8, 8]]], type_=pa.list_(pa.int32()), row_group_size=9)
    blocks = open_blocks()
    shards = sorted(data.glob("*.parquet"))
    shards[0].unlink()
    with pytest.raises(SnapshotGone, match=r"part-000.parquet was removed since the server read it"):
        blocks.get([0])
    for shard in shards[1:]:
        shard.unlink()
    with pytest.raises(ShardUnavailable, match=r"part-000.parquet cannot be read now: No such file"):
        blocks.get([0])


def test_a_rewritten_shard_with_the_same_footer_is_noticed_and_is_another_snapshot(data: Path, cache_dir: Path) -> None:
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
    blocks = Blocks(before, BlockStore(CacheFolder(cache_dir)))
    assert write([1, 2, 5]) == footer
    with pytest.raises(SnapshotGone):
        blocks.get([0])
    assert open_snapshot(path.parent).fingerprint != before.fingerprint


@pytest.mark.parametrize("call", ["stat", "open"])
def test_storage_that_fails_is_no_change_of_the_data(
    open_blocks: Callable[[], Blocks], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    blocks = open_blocks()
    with monkeypatch.context() as patch:
        patch.setattr(*((Path, "stat", fail) if call == "stat" else (pq, "ParquetFile", fail)))
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


def test_an_evicted_block_is_let_go_and_one_in_use_is_kept(
    data: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, count_reads: list[str]
) -> None:
    monkeypatch.setattr(maps_module, "_TOUCH_SECONDS", 0.0)
    snapshot = open_snapshot(data)
    measured = BlockStore(CacheFolder(cache_dir))
    Blocks(snapshot, measured).get([0])
    store = BlockStore(CacheFolder(cache_dir, int(2.5 * measured.cache.used_bytes)))
    blocks = Blocks(snapshot, store)
    for index in (2, 0, 4, 0, 2, 0, 4, 0):
        blocks.get([index])
    assert not store.cache.evicted  # all were let go of
    assert not store.cache.has(blocks.names.of(2))
    assert len(store.maps) == len(list(cache_dir.glob("*.block"))) <= 2
    before = len(count_reads)
    blocks.get([0])
    assert len(count_reads) == before  # used all the time, so never the one used longest ago


def test_a_mapped_block_is_marked_as_used_and_let_go_once_another_process_has_removed_it(
    open_blocks: Callable[[], Blocks], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = open_blocks()
    monkeypatch.setattr(maps_module, "_TOUCH_SECONDS", 0.0)
    blocks.get([0])
    path = cache_dir / f"{blocks.names.of(0)}.block"
    os.utime(path, (0, 0))
    other = next(index for index in range(1, 9) if not blocks.mapped([index]))
    assert blocks.mapped([0, other]) is None
    assert path.stat().st_mtime > 0
    path.unlink()
    assert blocks.mapped([0])
    assert blocks.mapped([0]) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_block_that_another_process_has_removed_takes_no_disk_space_once_another_is_stored(
    open_blocks: Callable[[], Blocks], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maps_module, "_TOUCH_SECONDS", 0.0)
    blocks = open_blocks()
    blocks.get([0])
    [path] = cache_dir.glob("*.block")
    assert str(path) in Path("/proc/self/maps").read_text()
    path.unlink()
    blocks.get([4])
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_server_that_serves_nothing_lets_go_of_blocks_that_another_has_removed(
    data: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maps_module, "_TOUCH_SECONDS", 0.0)
    store = BlockStore(CacheFolder(cache_dir))
    catalog = open_catalog(data.parent, None, store)
    catalog[data.name].latest.blocks.get([0])
    for path in cache_dir.glob("*.block"):
        path.unlink()
    assert len(store.maps) > 0
    catalog.poll()
    assert len(store.maps) == 0


def test_a_block_that_was_let_go_for_others_is_mapped_again_without_being_read(
    open_blocks: Callable[[], Blocks], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maps_module, "_OPEN_BLOCKS", 2)
    blocks = open_blocks()
    expected = [rows_of(block) for block in blocks.get(range(4))]
    read = Mock(side_effect=sealed.seal_of)
    monkeypatch.setattr(sealed, "seal_of", read)
    for _ in range(3):
        again = blocks.mapped(range(4))
        assert again
        assert [rows_of(block) for block in again] == expected
    assert read.call_count == 0
    assert len(blocks._store.maps) == 2
    for path in cache_dir.glob("*.block"):
        path.unlink()
    assert blocks.mapped(range(4)) is None


@pytest.mark.parametrize("again", [Blocks.get, Blocks.mapped])
def test_a_block_that_is_damaged_after_it_was_let_go_is_made_again(
    open_blocks: Callable[[], Blocks], cache_dir: Path, monkeypatch: pytest.MonkeyPatch, again: Callable[..., Any]
) -> None:
    monkeypatch.setattr(maps_module, "_OPEN_BLOCKS", 1)
    blocks = open_blocks()
    expected = [rows_of(block) for block in blocks.get([0, 1])]
    path = cache_dir / f"{blocks.names.of(0)}.block"
    with path.open("r+b") as file:
        file.write(bytes(64))
    again(blocks, [0])
    assert [rows_of(block) for block in blocks.get([0, 1])] == expected


def test_a_split_of_a_block_is_that_of_its_share_and_splits_are_held_within_a_budget(
    open_blocks: Callable[[], Blocks],
) -> None:
    blocks = [replace(block) for block in open_blocks().get(range(4))]  # that nobody else has
    splits = Splits(budget_bytes=3 * 8_000)
    for share in (0.1, 0.5, 0.1, 0.9):
        for block in blocks:
            for split in ("train", "validation"):
                assert rows_of(splits.of(block, split, share)) == rows_of(block.of_split(split, share))
        assert splits.of(block, "validation", share) is splits.of(block, "validation", share)
        assert splits.of(block, "all", share) is block
        assert 0 < splits.held_bytes <= 3 * 8_000
    del block
    blocks.clear()
    assert splits.held_bytes == 0  # or what was evicted would stay mapped, and what no cache keeps in memory


def test_a_damaged_row_group_is_named_once_in_the_log_too_and_the_others_are_served(
    open_blocks: Callable[[], Blocks], data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = data / "part-000.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 60 + whole[64:])
    blocks = open_blocks()
    for _ in range(2):
        with pytest.raises(ShardUnreadable, match=r"row group 0 of part-000.parquet cannot be read"):
            blocks.get([0])
        while not blocks.quarantine.num_unread_groups:  # whoever waits may wake before it is noted
            time.sleep(0.01)
    assert blocks.get([2])[0].num_rows == 32
    assert caplog.text.count("row group 0 of part-000.parquet cannot be read") == 1


def test_a_row_group_that_could_be_read_later_is_no_longer_told_of(
    open_blocks: Callable[[], Blocks], caplog: pytest.LogCaptureFixture
) -> None:
    blocks, failed, read = open_blocks(), Future[Block](), Future[Block]()
    failed.set_exception(ShardUnreadable("the disk was away"))
    for _ in range(2):
        blocks.quarantine.look_at(0, failed)
        assert blocks.quarantine.num_unread_groups == 1
        assert caplog.text.count("the disk was away") == 1
    read.set_result(blocks.get([0])[0])
    blocks.quarantine.look_at(0, read)
    assert (blocks.quarantine.num_unread_groups, blocks.quarantine.num_bad_rows) == (0, 0)


@pytest.mark.parametrize(("most", "listed_rows", "num_reads"), [(100_000, [1, 2], 2), (1, [1], 1)])
def test_a_list_of_bad_rows_reads_each_block_once_and_none_once_it_is_full(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, count_reads: list[str],
    most: int, listed_rows: list[int], num_reads: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(quarantine_module, "_LISTED_ROWS", most)
    data = write_shards(tmp_path / "bad", "input_ids", [[[1], None, None, [2]]], type_=pa.list_(pa.int32()), row_group_size=2)
    snapshot = open_snapshot(data)

    def started() -> Served:
        blocks = Blocks(snapshot, BlockStore(CacheFolder(cache_dir, 0)))
        return Served("bad", snapshot, blocks, Index("bad", snapshot, blocks))

    started().index.lengths.make(lambda _: None)
    count_reads.clear()
    served = started()
    listed = [show_quarantine(served, 0, 10) for _ in range(2)]
    assert listed[0] == listed[1]
    assert [row.row for row in listed[0]["rows"]] == listed_rows
    assert (listed[0]["num_bad_rows"], len(count_reads)) == (2, num_reads)


def test_a_row_of_a_row_group_of_several_blocks_is_shown_at_its_place_in_that(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "_BLOCK_ROWS", 2)
    ids = [[n] for n in range(10)]
    folder = write_shards(tmp_path / "ids", "tokens", [ids], type_=pa.list_(pa.int32()), row_group_size=5)
    snapshot = open_snapshot(folder)
    blocks = Blocks(snapshot, BlockStore(CacheFolder(cache_dir, 0)))
    served = Served("ids", snapshot, blocks, Index("ids", snapshot, blocks))
    assert snapshot.num_blocks > 2
    shown = [show_row(served, row) for row in range(10)]
    places = [(row["row_group"], row["row_in_group"], row["tokens"]) for row in shown]
    assert places == [(n // 5, n % 5, [n]) for n in range(10)]


def test_who_leaves_at_the_moment_of_the_answer_breaks_nobody_elses(
    open_blocks: Callable[[], Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    take = BlockStore._take

    def taken_and_forgotten(store: BlockStore, *args: Any) -> Any:
        future = take(store, *args)
        if future:
            store.forget(future)
        return future

    monkeypatch.setattr(BlockStore, "_take", taken_and_forgotten)
    assert [block.num_rows for block in open_blocks().get(range(4))] == [32, 2, 32, 2]


def test_what_nobody_wants_any_more_is_not_made(
    open_blocks: Callable[[], Blocks], monkeypatch: pytest.MonkeyPatch, count_reads: list[str]
) -> None:
    blocks, began, go_on = open_blocks(), threading.Event(), threading.Event()
    encoding_waits(monkeypatch, began, go_on)
    # As many as there are threads, and more that queue up behind them.
    futures = loading(blocks, range(5)) + loading(blocks, range(5))
    assert began.wait(30)
    queued = [number for number in range(5) if not futures[number].running()]
    blocks.forget(futures[1:5])
    assert not any(future.cancelled() for future in futures)  # the second who asked still waits
    blocks.forget(futures[6:])
    assert queued
    assert all(future.cancelled() for future in futures[1:5])
    go_on.set()
    assert futures[0].result(30).num_rows == 32
    assert blocks.get([4])[0].num_rows == 32  # asked for anew, it is made
    assert len(count_reads) < 5


def test_who_goes_through_blocks_and_leaves_wants_none_of_those_ahead(
    open_blocks: Callable[[], Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_blocks().get([0])
    blocks, began, go_on = open_blocks(), threading.Event(), threading.Event()
    encoding_waits(monkeypatch, began, go_on)
    through = blocks.each(range(5))
    assert next(through).num_rows == 32
    assert began.wait(30)
    through.close()
    assert not blocks._store._loads
    go_on.set()


def test_a_crowd_that_comes_after_a_restart_has_each_stored_block_read_once(
    open_blocks: Callable[[], Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_blocks().get(range(5))
    names, go_on = list[str](), threading.Event()
    read = CacheFolder.read

    def waiting(cache: CacheFolder, name: str) -> pa.Buffer | None:
        names.append(name)
        assert go_on.wait(30)
        return read(cache, name)

    monkeypatch.setattr(CacheFolder, "read", waiting)
    blocks = open_blocks()
    futures = [loading(blocks, range(5)) for _ in range(20)]  # none of them waits
    go_on.set()
    for few in futures:
        assert [future.result(30).num_rows for future in few] == [32, 2, 32, 2, 32]
    assert len(names) == len(set(names)) == 5
    assert not blocks._store._wanted


def test_a_block_that_no_thread_could_be_started_for_may_be_asked_for_again(
    open_blocks: Callable[[], Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = open_blocks()
    for pool in (blocks._store._mappers, blocks._store._threads):
        with monkeypatch.context() as patch:
            patch.setattr(pool, "submit", Mock(side_effect=RuntimeError("can't start new thread")))
            with pytest.raises(RuntimeError, match="can't start new thread"):
                blocks.get([0])
    assert blocks.get([0])[0].num_rows == 32
    assert not blocks._store._loads


@pytest.mark.parametrize(("error", "told"), [(ZeroDivisionError, ZeroDivisionError), (MemoryError, OutOfMemory)])
def test_what_goes_wrong_with_a_block_once_it_is_made_reaches_who_waits_for_it(
    open_blocks: Callable[[], Blocks], monkeypatch: pytest.MonkeyPatch, error: type[Exception], told: type[Exception]
) -> None:
    blocks = open_blocks()
    monkeypatch.setattr(blocks._store.cache, "read", Mock(side_effect=[None, None, error]))
    [future] = loading(blocks, [0])
    with pytest.raises(told):
        future.result(timeout=20)


def test_what_is_stored_does_not_wait_for_what_is_being_made_of_the_same_row_group(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "_BLOCK_BYTES", 1500)
    folder = write_shards(
        tmp_path / "big", "tokens", [[[n] * 9 for n in range(1000)]], type_=pa.list_(pa.int32()), row_group_size=1000
    )
    assert len(Blocks(open_snapshot(folder), BlockStore(CacheFolder(cache_dir))).get([0, 1])) == 2
    blocks = Blocks(open_snapshot(folder), BlockStore(CacheFolder(cache_dir)))
    (cache_dir / f"{blocks.names.of(0)}.block").unlink()
    began, go_on = threading.Event(), threading.Event()
    encoding_waits(monkeypatch, began, go_on)
    [first] = loading(blocks, [0])
    assert began.wait(30)
    [second] = loading(blocks, [1])
    assert rows_of(second.result(30))
    assert not first.done()
    go_on.set()
    assert rows_of(first.result(30))[0][0] == 0


def test_what_a_dataset_takes_in_the_cache_is_guessed_from_all_over_it(tmp_path: Path) -> None:
    rows = [[7] * 500 for _ in range(200)]  # which Parquet writes as one number
    varied = [[(n * k) % 50_000 for k in range(500)] for n in range(200)]
    folder = write_shards(tmp_path / "mixed", "tokens", [rows, varied, varied], type_=pa.list_(pa.int32()), row_group_size=100)
    blocks = Blocks(open_snapshot(folder), BlockStore(CacheFolder(tmp_path / "cache")))
    blocks.get(range(6))
    blocks.look()
    assert blocks.cache.used_bytes / 2 < blocks.expected_bytes.sum() < 2 * blocks.cache.used_bytes


def test_the_bytes_of_a_row_group_are_told_block_by_block(tmp_path: Path) -> None:
    rows = [[n] for n in range(100)]
    folder = write_shards(tmp_path / "parts", "tokens", [rows, rows[:7]], type_=pa.list_(pa.int32()), row_group_size=50)
    found = open_snapshot(folder)
    large = replace(found.shards[0], rows_per_group=numbers([200_000, 0]), bytes_per_group=numbers([40 << 20, 0]))
    snapshot = snapshot_module.Snapshot(found.folder, [large, found.shards[1]], found.recipe, name=found.name)
    assert snapshot.rows_per_block.tolist() == [40_000] * 5 + [0, 7]
    assert snapshot.bytes_per_block.tolist() == [8 << 20] * 5 + [0, found.shards[1].bytes_per_group[0]]


def test_the_footer_of_a_shard_is_parsed_once_and_again_once_it_is_another_file(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed, read = [], pq.read_metadata

    def counted(file: pa.OSFile) -> pq.FileMetaData:
        parsed.append(str(Path(f"/proc/self/fd/{file.fileno()}").readlink()))
        return read(file)

    monkeypatch.setattr(pq, "read_metadata", counted)
    path = tmp_path / "one" / "part-000.parquet"
    for day in range(2):
        tokens = [[500 * day + n] for n in range(60)]
        write_shards(path.parent, "tokens", [tokens], type_=pa.list_(pa.int32()), row_group_size=10)
        os.utime(path, (day, day))  # what was written just now is not remembered
        blocks = Blocks(open_snapshot(path.parent), BlockStore(CacheFolder(cache_dir)))
        assert [row for index in range(6) for row in rows_of(blocks.get([index])[0])] == tokens
    assert parsed == [str(path)] * 2


def test_the_footers_of_the_shards_that_were_read_last_are_kept_within_a_budget_and_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock(side_effect=pq.read_metadata)
    monkeypatch.setattr(pq, "read_metadata", read)
    folder = write_shards(tmp_path / "d", "tokens", [[[1]]] * 4, type_=pa.list_(pa.int32()), row_group_size=1)
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    shards = open_snapshot(folder).shards
    four, three, one = [0, 1, 2, 3], [0, 1, 2, 3, 1, 0], [0, 1, 0, 2, 3, 1, 0, 1]  # what is read, by how many are kept
    for budget, most, numbers_read in ((4, 4, four), (3, 4, three), (0, 4, one), (4, 3, three), (4, 1, one)):
        monkeypatch.setattr(parsed_footers_module, "_FOOTER_BYTES", budget * pq.read_metadata(shards[0].path).serialized_size)
        monkeypatch.setattr(parsed_footers_module, "_MOST_FOOTERS", most)
        footers, found = ParsedFooters(), list[int]()
        for number in (0, 1, 0, 0, 2, 3, 1, 0, 0, 1):
            read.reset_mock()
            with open_shard(shards[number]) as file:
                assert footers.of(shards[number].path, file, date_of(file)).num_rows == 1
            found += [number] * read.call_count
        assert found == numbers_read


@pytest.mark.parametrize("is_written_to_meanwhile", [False, True])
def test_a_footer_is_not_kept_of_a_shard_that_was_written_to_just_now_or_while_it_was_read(
    data: Path, monkeypatch: pytest.MonkeyPatch, is_written_to_meanwhile: bool
) -> None:
    [shard, *_] = open_snapshot(data).shards
    if is_written_to_meanwhile:
        os.utime(shard.path, (0, 0))
    footers, read = ParsedFooters(), pq.read_metadata

    def writing(file: pa.OSFile) -> pq.FileMetaData:
        if is_written_to_meanwhile:
            os.utime(shard.path, (1, 1))
        return read(file)

    counted = Mock(side_effect=writing)
    monkeypatch.setattr(pq, "read_metadata", counted)
    with open_shard(shard) as file:
        date = date_of(file)
        for _ in range(2):
            footers.of(shard.path, file, date)
    assert counted.call_count == 2


def test_the_name_of_all_tokens_is_made_once(open_blocks: Callable[[], Blocks], monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, again = open_blocks(), open_blocks()
    assert blocks.names.of_all == again.names.of_all
    monkeypatch.delattr(BlockNames, "of_shard")  # of each of ten thousand shards, whenever datasets are listed
    assert blocks.names.of_all == again.names.of_all
