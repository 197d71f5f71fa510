"""Callers share the loads of blocks, and wait for no others."""

import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

from penstock_server.blocks.block import Block
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.store import BlockStore, Splits
from penstock_server.catalog import snapshot as snapshot_module
from penstock_server.problems import OutOfMemory
from penstock_server.recipes.encode import REASON, SPLIT, TURNS
from support.corpora import write_shards
from support.engine import encoding_waits, loading, open_snapshot, rows_of


def test_stored_block_is_read_once_for_many_callers(open_blocks: Callable[[], Blocks], monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_block_is_decoded_once_for_all_threads_and_servers(open_blocks: Callable[[], Blocks], count_reads: list[str]) -> None:
    blocks, gate = open_blocks(), threading.Barrier(8)

    def get() -> None:
        gate.wait()
        blocks.get([0, 1, 2])

    threads = [threading.Thread(target=get) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows_of(open_blocks().get([1])[0]) == rows_of(blocks.get([1])[0])
    assert len(count_reads) == 3


def test_block_can_be_requested_again_when_no_thread_could_be_started(
    open_blocks: Callable[[], Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = open_blocks()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            blocks.get([0])
    assert blocks.get([0])[0].num_rows == 32


@pytest.mark.parametrize(("error", "raised"), [(ZeroDivisionError, ZeroDivisionError), (MemoryError, OutOfMemory)])
def test_error_after_a_block_is_made_reaches_its_waiters(
    open_blocks: Callable[[], Blocks], monkeypatch: pytest.MonkeyPatch, error: type[Exception], raised: type[Exception]
) -> None:
    blocks = open_blocks()
    monkeypatch.setattr(blocks.cache, "read", Mock(side_effect=[None, None, error]))
    [future] = loading(blocks, [0])
    with pytest.raises(raised):
        future.result(timeout=20)


def test_stored_block_does_not_wait_for_its_row_group(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "_BLOCK_BYTES", 1500)
    folder = write_shards(
        tmp_path / "big", "tokens", [[[n] * 9 for n in range(1000)]], type_=pa.list_(pa.int32()), row_group_size=1000
    )
    assert len(Blocks(open_snapshot(folder), BlockStore(cache_dir)).get([0, 1])) == 2
    blocks = Blocks(open_snapshot(folder), BlockStore(cache_dir))
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


def test_splits_are_held_within_a_budget(
    open_blocks: Callable[[], Blocks],
) -> None:
    blocks = [replace(block) for block in open_blocks().get(range(4))]  # that nobody else has
    splits = Splits(budget_bytes=3 * 8_000)
    for share in (0.1, 0.5, 0.1, 0.9):
        for block in blocks:
            assert rows_of(splits.of(block, "train", share)) == rows_of(block.selected("train", share))
            assert rows_of(splits.of(block, "validation", share)) == rows_of(block.selected("validation", share))
        assert splits.of(block, "validation", share) is splits.of(block, "validation", share)
        assert splits.of(block, "all", share) is block
        assert 0 < splits.held_bytes <= 3 * 8_000
    del block
    blocks.clear()
    assert splits.held_bytes == 0  # or what was evicted would stay mapped, and what no cache keeps in memory


@pytest.mark.parametrize("features", [["tokens"], ["chosen", "rejected"]])
@pytest.mark.parametrize("has_turns", [False, True])
def test_split_memory_estimate_is_close(features: list[str], *, has_turns: bool) -> None:
    num_rows = 20_000
    ones = pa.LargeListArray.from_arrays(pa.array(np.arange(num_rows + 1)), pa.array(np.ones(num_rows, np.int32)))
    lists = {name + suffix: ones for name in features for suffix in ["", *([TURNS] if has_turns else [])]}
    others = {REASON: pa.nulls(num_rows, pa.string()), SPLIT: pa.array(np.arange(num_rows, dtype=np.uint32))}
    block, splits = Block.of(pa.record_batch(lists | others)), Splits()
    tracemalloc.start()
    split = splits.of(block, "validation", 1.0)
    assert len(split.stream) + len(split.replacements) == 2 * num_rows + 1  # which are kept with it
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken <= splits.held_bytes <= 1.25 * taken
