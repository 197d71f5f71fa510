"""Who waits for a block, and for none that is not theirs; and what nobody waits for any more."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest

from blocks_of import encoding_waits, loading, rows_of
from corpora import write_shards
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog import snapshot as snapshot_module
from penstock_server.problems import OutOfMemory
from planned import open_snapshot


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
