"""Blocks as they are made of row groups, and what is told of those that cannot be."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock_server.blocks import decode as decode_module
from penstock_server.blocks import loader as blocks_module
from penstock_server.blocks import quarantine as quarantine_module
from penstock_server.blocks.block import Block
from penstock_server.blocks.decode import RowGroupReader
from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog import snapshot as snapshot_module
from penstock_server.catalog.dataset import OpenSnapshot
from penstock_server.catalog.shard import numbers
from penstock_server.catalog.snapshot import BlockAddress, Snapshot
from penstock_server.index.index import Index
from penstock_server.index.row_lengths import count_lengths
from penstock_server.lookup import show_quarantine
from penstock_server.problems import ShardUnreadable
from penstock_server.recipes import encode
from penstock_server.recipes.split import split_hashes
from support.corpora import write_numbered, write_shards, write_text, write_tokenizer
from support.engine import open_snapshot, rows_of
from support.processes import until


def test_new_shard_makes_only_its_own_blocks(open_blocks: Callable[[], Blocks], data: Path, count_reads: list[str]) -> None:
    before = open_blocks()
    before.get(list(range(5)))
    reads = len(count_reads)
    pq.write_table(pa.table({"input_ids": pa.array([[60_000]], pa.list_(pa.int32()))}), data / "part-100.parquet")
    assert open_snapshot(data).vocab_size == 60_001
    after = open_blocks()
    after.get(list(range(6)))
    assert len(count_reads) == reads + 1
    assert after.names.of_shard(0) == before.names.of_shard(0)  # of which what is counted has its name


def test_ids_outside_the_range_of_the_footer_make_bad_rows(data: Path, cache_dir: Path) -> None:
    snapshot = open_snapshot(data)
    shards = [replace(shard, token_range=(0, 5)) for shard in snapshot.shards]
    blocks = Blocks(Snapshot(data, shards, snapshot.recipe, name=data.name), BlockStore(cache_dir))
    assert "6" in blocks.get([0])[0].bad[6]


@pytest.mark.parametrize("column", ["tokens", "text"])
def test_large_row_group_is_several_blocks_decoded_together(
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
    blocks = Blocks(snapshot, BlockStore(cache_dir))
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
    tight = Blocks(snapshot, BlockStore(tmp_path / "tight", 0))
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


def test_large_row_groups_are_decoded_in_parallel(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, snapshot = open_large_groups(tmp_path, monkeypatch)
    assert min(snapshot.blocks_per_group) > 8
    both, begun, encode_rows = threading.Barrier(2), set[int](), encode.encode

    def meeting(selected: encode.Selected, *args: Any) -> pa.RecordBatch:
        if (shard := selected.rows.column(0)[0].as_py()[0]) not in begun:
            begun.add(shard)
            both.wait(30)
        return encode_rows(selected, *args)

    monkeypatch.setattr(encode, "encode", meeting)
    blocks = Blocks(snapshot, BlockStore(cache_dir, num_threads=2))
    lengths = count_lengths(snapshot, blocks, lambda _: None)
    assert lengths.per_block("all").sums() == [1000, 2000, 0]
    assert [row for block in blocks.each(range(snapshot.num_blocks)) for row in rows_of(block)] == shards[0] + shards[1]


def test_large_row_groups_are_decoded_in_turn_when_the_cache_is_small(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, snapshot = open_large_groups(tmp_path, monkeypatch)
    encoded, encode_rows = list[int](), encode.encode

    def recorded(selected: encode.Selected, *args: Any) -> pa.RecordBatch:
        encoded.append(selected.rows.column(0)[0].as_py()[0])
        return encode_rows(selected, *args)

    monkeypatch.setattr(encode, "encode", recorded)
    budget_bytes = 4 * snapshot.largest_group_bytes - 1  # as much again as two groups take is not there
    blocks = Blocks(snapshot, BlockStore(cache_dir, budget_bytes, 2))
    assert [row for block in blocks.each(range(snapshot.num_blocks)) for row in rows_of(block)] == shards[0] + shards[1]
    num_before = encoded.index(1)
    assert num_before >= snapshot.blocks_per_group[0] - blocks_module._LOADED_TOGETHER


def test_pass_over_blocks_decodes_a_row_group_once_without_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, snapshot = open_large_groups(tmp_path, monkeypatch)
    begun, blocks_of = list[str](), RowGroupReader.blocks

    def recorded(reader: RowGroupReader, address: BlockAddress) -> Any:
        begun.append(address.shard.path.name)
        for block in blocks_of(reader, address):
            time.sleep(0.01)  # as tokenizing takes: meanwhile the next are asked for
            yield block

    monkeypatch.setattr(RowGroupReader, "blocks", recorded)
    blocks = Blocks(snapshot, BlockStore(tmp_path / "cache", 1, 1))
    assert [row for block in blocks.each(range(snapshot.num_blocks)) for row in rows_of(block)] == shards[0] + shards[1]
    assert begun == ["part-000.parquet", "part-001.parquet"]


@pytest.mark.parametrize("recipe", ["", 'filter = "n % 3 > 0"\nvalidation = 0.5', 'transform = "own:same"'])
@pytest.mark.parametrize("values", [1, 64])
def test_portions_do_not_change_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, values: int) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    padded = [[n, 1, 1] + [0] * (n % 11) + ([-1] if n % 10 == 9 else [0]) for n in range(60)]
    masks = [[1, 1, 1] + [0] * (len(ids) - 4) + [int(ids[-1] < 0)] for ids in padded]
    vectors = pa.array(
        [None if n == 20 else [n, 1] for n in range(60)], pa.list_(pa.field("x", pa.float32(), nullable=False), 2)
    )
    columns = {
        "input_ids": pa.array(padded, pa.list_(pa.int32())),
        "attention_mask": masks,
        "n": list(range(60)),
        "vector": vectors,
        "word": pa.array([f"w{n % 7}" for n in range(60)]).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), folder / "part-0.parquet", row_group_size=45)
    (folder / "penstock.toml").write_text(f'columns = ["vector", "word"]\n{recipe}')
    (folder / "own.py").write_text("def same(batch):\n    return batch\n")
    monkeypatch.setattr(snapshot_module, "_BLOCK_ROWS", 25)
    found = []
    for portion, name in ((1 << 40, "whole"), (values, "portions")):
        monkeypatch.setattr(decode_module, "_PORTION_VALUES", portion)
        snapshot = open_snapshot(folder)
        blocks = Blocks(snapshot, BlockStore(tmp_path / name))
        made = blocks.get(range(snapshot.num_blocks))
        columns_of = [{name: column.to_pylist() for name, column in block.columns.items()} for block in made]
        facts = [(rows_of(block), block.bad, block.stored_rows.tolist(), block.splits.tolist()) for block in made]
        found.append(list(zip(facts, columns_of, strict=True)))
    assert found[0] == found[1]
    assert sum(len(bad) for (_, bad, *_), _ in found[0]) == (5 if "filter" in recipe else 7)


def test_rows_are_counted_in_several_shards_in_parallel(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_numbered(tmp_path / "data", 9, num_shards=3)
    (folder / "penstock.toml").write_text("validation = 0.5")
    both, begun = threading.Barrier(2), list[str]()

    def meeting(*args: Any) -> Any:
        begun.append(args[2].shard)
        if len(begun) <= 2:
            both.wait(30)
        return split_hashes(*args)

    monkeypatch.setattr(decode_module, "split_hashes", meeting)
    blocks = Blocks(open_snapshot(folder), BlockStore(cache_dir, num_threads=2))
    assert blocks.rows_by_hash(Mock()).sum(axis=0).tolist() == [3, 3, 3]


def test_unreadable_neighbour_fails_only_its_own_requests(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshot_module, "_BLOCK_ROWS", 100)
    folder = write_shards(
        tmp_path / "b", "tokens", [[[n] for n in range(1000)]], type_=pa.list_(pa.int32()), row_group_size=1000
    )
    encode_rows = encode.encode

    def failing(selected: encode.Selected, *args: Any) -> pa.RecordBatch:
        if selected.rows.column(0)[0].as_py() == [700]:
            raise ValueError("a bad page")
        return encode_rows(selected, *args)

    monkeypatch.setattr(encode, "encode", failing)
    blocks = Blocks(open_snapshot(folder), BlockStore(cache_dir))
    assert [rows_of(block)[0] for block in blocks.get([0, 3])] == [[0], [300]]
    with pytest.raises(ShardUnreadable, match="a bad page"):
        blocks.get([7])
    assert rows_of(blocks.get([6])[0])[0] == [600]
    # Logged by a thread, otherwise perhaps in the next test.
    until(lambda: any(record.name == "penstock.quarantine" for record in caplog.records))


def test_damaged_row_group_is_logged_once_and_others_are_served(
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


def test_quarantine_forgets_a_row_group_that_can_be_read_again(
    open_blocks: Callable[[], Blocks], caplog: pytest.LogCaptureFixture
) -> None:
    blocks, failed, read = open_blocks(), Future[Block](), Future[Block]()
    failed.set_exception(ShardUnreadable("the disk was away"))
    for _ in range(2):
        blocks.quarantine.note_load(0, failed)
        assert blocks.quarantine.num_unread_groups == 1
        assert caplog.text.count("the disk was away") == 1
    read.set_result(blocks.get([0])[0])
    blocks.quarantine.note_load(0, read)
    assert (blocks.quarantine.num_unread_groups, blocks.quarantine.num_bad_rows) == (0, 0)


@pytest.mark.parametrize(("most", "listed_rows", "num_reads"), [(100_000, [1, 2], 2), (1, [1], 1)])
def test_quarantine_reads_each_block_once_until_its_list_is_full(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, count_reads: list[str],
    most: int, listed_rows: list[int], num_reads: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(quarantine_module, "_LISTED_ROWS", most)
    data = write_shards(tmp_path / "bad", "input_ids", [[[1], None, None, [2]]], type_=pa.list_(pa.int32()), row_group_size=2)
    snapshot = open_snapshot(data)

    def started() -> OpenSnapshot:
        blocks = Blocks(snapshot, BlockStore(cache_dir, 0))
        return OpenSnapshot(snapshot, blocks, Index("bad", snapshot, blocks))

    started().index.lengths.make(lambda _: None)
    count_reads.clear()
    served = started()
    listed = [show_quarantine(served, 0, 10) for _ in range(2)]
    assert listed[0] == listed[1]
    assert [row.row for row in listed[0]["rows"]] == listed_rows
    assert (listed[0]["num_bad_rows"], len(count_reads)) == (2, num_reads)


def test_expected_bytes_are_sampled_all_over_the_dataset(tmp_path: Path) -> None:
    rows = [[7] * 500 for _ in range(200)]  # which Parquet writes as one number
    varied = [[(n * k) % 50_000 for k in range(500)] for n in range(200)]
    folder = write_shards(tmp_path / "mixed", "tokens", [rows, varied, varied], type_=pa.list_(pa.int32()), row_group_size=100)
    blocks = Blocks(open_snapshot(folder), BlockStore(tmp_path / "cache"))
    blocks.get(range(6))
    blocks.sample()
    assert blocks.cache.used_bytes / 2 < blocks.expected_bytes.sum() < 2 * blocks.cache.used_bytes


def test_bytes_of_a_row_group_are_spread_over_its_blocks(tmp_path: Path) -> None:
    rows = [[n] for n in range(100)]
    folder = write_shards(tmp_path / "parts", "tokens", [rows, rows[:7]], type_=pa.list_(pa.int32()), row_group_size=50)
    found = open_snapshot(folder)
    large = replace(found.shards[0], rows_per_group=numbers([200_000, 0]), bytes_per_group=numbers([40 << 20, 0]))
    snapshot = snapshot_module.Snapshot(found.folder, [large, found.shards[1]], found.recipe, name=found.name)
    assert snapshot.rows_per_block.tolist() == [40_000] * 5 + [0, 7]
    assert snapshot.bytes_per_block.tolist() == [8 << 20] * 5 + [0, found.shards[1].bytes_per_group[0]]
