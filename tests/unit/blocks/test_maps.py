"""Blocks in the cache: damaged, evicted, let go, and mapped again."""

import ctypes
import mmap
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from penstock import wire
from penstock.spec import Packing, Spec
from penstock_server import files as sealed
from penstock_server.batches import writer as batch
from penstock_server.batches.assemble import chunks, load
from penstock_server.blocks import cache as maps_module
from penstock_server.blocks import cache as pages
from penstock_server.blocks.cache import Waits
from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from support.corpora import write_numbered
from support.engine import open_snapshot, rows_of


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "foreign"])
def test_damaged_block_is_made_again(
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


def test_flipped_byte_reaches_no_batch(open_blocks: Callable[[], Blocks], cache_dir: Path) -> None:
    expected = rows_of(open_blocks().get([0])[0])
    [path] = cache_dir.glob("*.block")
    content = path.read_bytes()
    for at in range(0, len(content), 41):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert rows_of(open_blocks().get([0])[0]) == expected


def test_blocks_are_served_when_the_cache_has_no_room_or_cannot_be_written(
    open_blocks: Callable[[], Blocks], data: Path, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = rows_of(open_blocks().get([0])[0])
    tight = Blocks(open_snapshot(data), BlockStore(cache_dir, 0))
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


def test_evicted_block_is_unmapped_and_one_in_use_is_kept(
    data: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, count_reads: list[str]
) -> None:
    monkeypatch.setattr(maps_module, "_TOUCH_SECONDS", 0.0)
    snapshot = open_snapshot(data)
    measured = BlockStore(cache_dir)
    Blocks(snapshot, measured).get([0])
    store = BlockStore(cache_dir, int(2.5 * measured.cache.used_bytes))
    blocks = Blocks(snapshot, store)
    for index in (2, 0, 4, 0, 2, 0, 4, 0):
        blocks.get([index])
    assert not store.cache.evicted  # all were let go of
    assert not store.cache.has(blocks.names.of(2))
    assert len(store.maps) == len(list(cache_dir.glob("*.block"))) <= 2
    before = len(count_reads)
    blocks.get([0])
    assert len(count_reads) == before  # used all the time, so never the one used longest ago


def test_mapped_block_is_touched_and_unmapped_when_its_file_is_gone(
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


def test_poll_unmaps_blocks_whose_file_is_gone(data: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps_module, "_TOUCH_SECONDS", 0.0)
    store = BlockStore(cache_dir)
    catalog = open_catalog(data.parent, None, store)
    catalog[data.name].latest.blocks.get([0])
    for path in cache_dir.glob("*.block"):
        path.unlink()
    assert len(store.maps) > 0
    catalog.poll()
    assert len(store.maps) == 0


def test_block_is_mapped_again_without_reading_its_file(
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
def test_block_damaged_while_unmapped_is_made_again(
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


PAGE = mmap.PAGESIZE


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux shows what it was told of a map")
def test_mapped_block_reads_no_more_pages_than_needed(tmp_path: Path) -> None:
    write_numbered(tmp_path / "data" / "numbers", 200)
    store = BlockStore(tmp_path / "cache")
    open_catalog(tmp_path / "data", None, store)["numbers"].latest.blocks.get([0])
    [path] = store.cache.folder.glob("*.block")
    told = Path("/proc/self/smaps").read_text().split(str(path), 1)[1]
    [flags] = [line for line in told.splitlines() if line.startswith("VmFlags:")][:1]
    assert "rr" in flags.split()
    store.close()


class Told:
    """A kernel that notes what it is told, and has copies wait as often as it is asked to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_waits = 0
        self.spans: list[tuple[int, int]] = []
        monkeypatch.setattr(pages, "_num_waits", lambda: self.num_waits)
        monkeypatch.setattr(pages, "_advise", self._advise)

    def _advise(self, address: int, nbytes: int, advice: int) -> None:
        assert advice == mmap.MADV_WILLNEED
        assert address % pages.PAGE_BYTES == 0
        self.spans.append((address, nbytes))

    def copy(
        self, waits: Waits, num_waits: int = 0, spans: tuple[tuple[int, int], ...] = ((PAGE + 5, 9), (4 * PAGE, PAGE))
    ) -> bool:
        """Whether the kernel was told of a copy."""
        self.spans.clear()
        with waits.copying(spans):
            self.num_waits += num_waits
        return bool(self.spans)


def test_copies_are_announced_after_one_that_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    told, waits = Told(monkeypatch), Waits()
    assert not any(told.copy(waits, num_waits) for num_waits in (0, 1, 15, 0))
    assert not told.copy(waits, num_waits=16)
    assert told.copy(waits)
    assert told.spans == [(PAGE, 14), (4 * PAGE, PAGE)]
    assert told.copy(waits, num_waits=99)  # again, and for as long as before
    assert sum(told.copy(waits) for _ in range(500)) == 64
    assert not told.copy(waits, num_waits=16)
    assert told.copy(waits)


@pytest.mark.parametrize("packing", ["rows", "concat"])
def test_announced_spans_are_the_copied_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: Packing) -> None:
    write_numbered(tmp_path / "data" / "numbers", 200)
    store = BlockStore(tmp_path / "cache")
    catalog = open_catalog(tmp_path / "data", None, store)
    catalog["numbers"].latest.index.lengths.make(lambda _: None)
    plan = catalog.plan("numbers", Spec(batch_size=16, seq_len=3, packing=packing, pad="longest", shuffle="global"))
    [chunk] = chunks(plan, 0, 0, range(2))
    blocks = load(chunk)
    told, waits = Told(monkeypatch), Waits()
    told.copy(waits, num_waits=16)
    told.spans.clear()
    monkeypatch.setattr(batch, "_waits", waits)
    monkeypatch.setattr(pages, "PAGE_BYTES", 1)  # so that addresses are told as they are
    body = batch.frames(chunk, blocks)
    copied = b"".join(ctypes.string_at(address, nbytes) for address, nbytes in told.spans)
    [first, second] = wire.decode(body)
    sent = np.concatenate([first.tensors["input_ids"].reshape(-1), second.tensors["input_ids"].reshape(-1)])
    assert copied == sent[sent != plan.pad_id].tobytes() if packing == "rows" else sent.tobytes()
    store.close()
