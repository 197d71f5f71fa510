"""What the kernel is told of mapped blocks, so that a few rows of each cost a few pages."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from corpora import write_numbered
from penstock import wire
from penstock.spec import Packing, Spec
from penstock_server.batches import writer as batch
from penstock_server.batches.assemble import chunks, load
from penstock_server.blocks import mmap as pages
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.mmap import Waits
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog

PAGE = mmap.PAGESIZE


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux shows what it was told of a map")
def test_mapped_block_reads_no_more_pages_than_needed(tmp_path: Path) -> None:
    write_numbered(tmp_path / "data" / "numbers", 200)
    store = BlockStore(CacheFolder(tmp_path / "cache"))
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


def test_a_copy_is_told_of_after_one_that_had_to_wait_and_until_none_has_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_what_is_told_of_is_what_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: Packing) -> None:
    write_numbered(tmp_path / "data" / "numbers", 200)
    store = BlockStore(CacheFolder(tmp_path / "cache"))
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
