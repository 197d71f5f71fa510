"""Blocks in the cache: damaged, evicted, let go, and mapped again."""

import os
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

from blocks_of import loading, rows_of
from penstock_server import checksummed as sealed
from penstock_server.blocks import mmap as maps_module
from penstock_server.blocks.block import Block
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.store import BlockStore, Splits
from penstock_server.catalog.catalog import open_catalog
from penstock_server.recipes.encode import REASON, SPLIT, TURNS
from planned import open_snapshot


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
    for at in range(0, len(content), 41):
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
    read = Mock(side_effect=sealed._is_sealed)
    monkeypatch.setattr(sealed, "_is_sealed", read)
    for _ in range(3):
        again = blocks.mapped(range(4))
        assert again
        assert [rows_of(block) for block in again] == expected
    assert read.call_count == 0
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
def test_a_split_takes_about_the_memory_that_it_is_told_to(features: list[str], *, has_turns: bool) -> None:
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
