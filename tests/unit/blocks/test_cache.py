"""The cache: its files keep to a budget, and its blocks are mapped, let go, and made again after damage."""

import ctypes
import errno
import mmap
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest

from penstock import wire
from penstock.spec import Packing, Spec
from penstock_server import files as sealed
from penstock_server.batches import writer as batch
from penstock_server.batches.assemble import chunks, load
from penstock_server.blocks import cache as cache_module
from penstock_server.blocks.cache import CacheFolder, Waits
from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.files import write_with_seal
from support.corpora import write_numbered
from support.engine import open_snapshot, rows_of

KIB = 1 << 10
OVERHEAD = 8  # the digest behind each file


class Disk(NamedTuple):
    free: int


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if not path.name.startswith(".")}


def content(number: int, nbytes: int = KIB) -> memoryview:
    return memoryview(number.to_bytes(4, "big") * (nbytes // 4))


def test_cache_reads_back_files_of_other_processes(tmp_path: Path) -> None:
    assert CacheFolder(tmp_path, 9 * KIB).write("a", content(1))
    again = CacheFolder(tmp_path, 9 * KIB)
    stored = again.read("a")
    assert stored is not None
    assert bytes(stored) == bytes(content(1))
    assert again.read("b") is None
    assert again.used_bytes == sum(files(tmp_path).values()) == KIB + OVERHEAD


def test_cache_evicts_the_least_recently_used_file_and_its_map_stays_valid(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, 4 * KIB + 4 * OVERHEAD)
    for number in range(4):
        cache.write(str(number), content(number))
        os.utime(tmp_path / f"{number}.block", (number, number))
    held = cache.read("0")
    assert held is not None
    cache.write("4", content(4))
    assert "1.block" not in files(tmp_path)
    assert {"0.block", "4.block"} <= set(files(tmp_path))
    for number in range(5, 20):
        cache.write(str(number), content(number))
    assert cache.read("0") is None
    assert bytes(held) == bytes(content(0))


def test_cache_does_not_store_a_file_larger_than_its_budget(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, 2 * KIB)
    assert cache.write("small", content(0))
    assert not cache.write("large", content(1, 2 * KIB))
    assert (files(tmp_path), cache.used_bytes) == ({"small.block": KIB + OVERHEAD}, KIB + OVERHEAD)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, None])
def test_failed_write_frees_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
    cache = CacheFolder(tmp_path, 9 * KIB)
    assert cache.write("a", content(1))

    def pieces() -> Iterator[memoryview]:
        yield content(2, KIB // 2)
        raise OSError(number, os.strerror(number)) if number else MemoryError

    def write_half(file: BinaryIO, _: Sequence[memoryview], name: str) -> None:
        write_with_seal(file, pieces(), name)

    monkeypatch.setattr(cache_module, "write_with_seal", write_half)
    with pytest.raises((OSError, MemoryError)) if number in (None, errno.EIO) else nullcontext():
        assert not cache.write("b", content(2))
    left = {} if number in (errno.ENOSPC, errno.EDQUOT) else {"a.block": KIB + OVERHEAD}  # a full disk evicts
    assert (files(tmp_path), cache.used_bytes) == (left, sum(left.values()))
    assert cache.failure == ("Input/output error" if number == errno.EIO else None)
    monkeypatch.undo()
    assert cache.write("b", content(2))
    assert cache.failure is None


def test_lower_budget_evicts_at_the_start(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, 100 * KIB)
    for number in range(50):
        cache.write(str(number), content(number))
    lower = CacheFolder(tmp_path, 10 * KIB)
    assert sum(files(tmp_path).values()) == lower.used_bytes <= 10 * KIB


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "empty"])
def test_damaged_file_is_dropped_and_frees_its_room(tmp_path: Path, damage: str) -> None:
    cache = CacheFolder(tmp_path, 9 * KIB)
    cache.write("a", content(1))
    path = tmp_path / "a.block"
    whole = path.read_bytes()
    path.write_bytes({"flip": b"?" + whole[1:], "cut": whole[:-1], "grow": whole + b"x", "empty": b""}[damage])
    assert cache.read("a") is None
    assert files(tmp_path) == {}
    assert cache.write("a", content(1))
    assert CacheFolder(tmp_path, 9 * KIB).used_bytes == KIB + OVERHEAD


def test_file_in_place_of_an_evicted_one_is_verified(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, 3000)
    cache.write("first", memoryview(bytes(1000)))
    assert cache.read("first")
    assert cache.read_again("first")
    (tmp_path / "aside").hardlink_to(tmp_path / "first.block")
    cache.write("second", memoryview(bytes(2500)))
    assert cache.evicted.pop() == "first"
    (tmp_path / "aside").rename(tmp_path / "first.block")
    (tmp_path / "first.block").write_bytes(bytes(999) + b"torn" * 2 + b"!")  # of the same size and the same inode
    assert cache.read_again("first") is None
    assert cache.read("first") is None


def test_file_stored_twice_counts_once(tmp_path: Path) -> None:
    one, two = (CacheFolder(tmp_path, 9 * KIB) for _ in range(2))
    one.write("a", content(1))
    two.write("a", content(1))
    assert one.used_bytes == KIB + OVERHEAD


def test_old_temporary_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / "old.tmp").write_bytes(bytes(KIB))
    (tmp_path / "young.block.tmp").write_bytes(bytes(KIB))
    os.utime(tmp_path / "old.tmp", (time.time() - 3600,) * 2)
    assert CacheFolder(tmp_path, 9 * KIB).used_bytes == KIB
    assert list(files(tmp_path)) == ["young.block.tmp"]


def test_temporary_files_of_counts_evict_no_block(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, 9 * KIB)
    assert all(cache.write(str(number), content(number)) for number in range(6))
    (tmp_path / "counts.tmp").write_bytes(bytes(8 * KIB))
    assert all(cache.write(str(number), content(number)) for number in range(6, 12))
    assert sum(size for name, size in files(tmp_path).items() if name.endswith(".block")) > 6 * KIB
    assert cache.used_bytes <= 9 * KIB


def _fill(folder: Path, budget_bytes: int, first: int) -> None:
    cache = CacheFolder(folder, budget_bytes)
    for number in range(first, first + 400):
        cache.write(str(number % 300), content(number % 300, 4 * (1 + number % 300)))
        stored = cache.read(str((number * 7) % 300))
        assert stored is None or bytes(stored) == bytes(content((number * 7) % 300, 4 * (1 + (number * 7) % 300)))


def test_several_processes_never_exceed_the_budget(tmp_path: Path) -> None:
    budget_bytes = 20 * KIB
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_fill, args=(tmp_path, budget_bytes, 100 * n)) for n in range(3)]
    for process in processes:
        process.start()
    seen = []
    while any(process.is_alive() for process in processes):
        sizes = []
        for path in tmp_path.iterdir():
            if path.suffix in (".block", ".tmp"):
                try:
                    sizes.append(path.stat().st_size)
                except FileNotFoundError:
                    continue
        seen.append(sum(sizes))
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert max(seen) > budget_bytes // 2
    assert sum(files(tmp_path).values()) <= budget_bytes
    assert CacheFolder(tmp_path, budget_bytes).used_bytes == sum(files(tmp_path).values())


@pytest.mark.parametrize("is_lock_file_alone", [False, True])
def test_cache_continues_in_a_new_folder_when_the_old_one_was_removed(tmp_path: Path, is_lock_file_alone: bool) -> None:
    folder, budget = tmp_path / "cache", 4 * KIB + 4 * OVERHEAD
    old = CacheFolder(folder, budget)
    assert old.write("a", content(0))
    if is_lock_file_alone:
        (folder / ".lock").unlink()
    else:
        shutil.rmtree(folder)
    assert old.write("b", content(1))
    assert old.used_bytes == sum(files(folder).values())
    new = CacheFolder(folder, budget)
    for number in range(6):
        assert (old, new)[number % 2].write(f"c{number}", content(number))
        assert old.used_bytes == new.used_bytes == sum(files(folder).values()) <= budget


FULL_DISK = """
import logging, sys
from pathlib import Path
from penstock_server.blocks.cache import CacheFolder
logging.basicConfig(format="%(message)s")
folder = Path(sys.argv[1])
cache = CacheFolder(folder, 1 << 30)
stored = [number for number in range(100) if cache.write(str(number), memoryview(bytes([number]) * (1 << 16)))]
assert 10 < len(stored) <= 100, stored
assert cache.room_bytes <= 1 << 20, cache.room_bytes
assert cache.read(str(stored[-1])) is not None
assert not list(folder.glob("*.tmp"))
print("done")
"""


def test_cache_continues_when_its_disk_is_full(tmp_path: Path) -> None:
    mounted = [
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1"',
    ]
    arguments = ["sh", str(tmp_path), sys.executable, FULL_DISK]
    done = subprocess.run([*mounted, *arguments], capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no small disk can be made here: {done.stderr.strip()}")
    assert done.stdout == "done\n", done.stderr
    assert done.stderr.count("older blocks are removed to make room") == 1


def test_full_disk_is_logged_once_and_evicts_old_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = CacheFolder(tmp_path, 100 * KIB)
    assert all(cache.write(str(number), content(number)) for number in range(40))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert not cache.write("a", content(0))
        assert not cache.has("0")
        assert not cache.write("b", content(0))
    [line] = [record.getMessage() for record in caplog.records]
    assert "older blocks are removed to make room" in line
    assert cache.write("a", content(0))


def test_room_is_the_free_space_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CacheFolder(tmp_path, 100 * KIB)
    assert (cache.room_bytes, cache.remedy) == (100 * KIB, "Raise --cache-bytes")
    assert cache.write("a", content(0))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(10 * KIB))
    assert (cache.room_bytes, cache.remedy) == (11 * KIB + OVERHEAD, "Free disk space")


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
    monkeypatch.setattr(cache_module, "_TOUCH_SECONDS", 0.0)
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
    monkeypatch.setattr(cache_module, "_TOUCH_SECONDS", 0.0)
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
    monkeypatch.setattr(cache_module, "_TOUCH_SECONDS", 0.0)
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
    monkeypatch.setattr(cache_module, "_OPEN_BLOCKS", 2)
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


def test_one_file_is_forgotten_when_too_many_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_KNOWN_FILES", 4)
    cache, names = CacheFolder(tmp_path, KIB * KIB), [f"{number}" for number in range(9)]
    for num_read, name in enumerate(names, 1):
        cache.write(name, content(1))
        assert cache.read(name) is not None
        assert sum(cache.read_again(name) is not None for name in names) == min(num_read, 4)


@pytest.mark.parametrize("again", [Blocks.get, Blocks.mapped])
def test_block_damaged_while_unmapped_is_made_again(
    open_blocks: Callable[[], Blocks], cache_dir: Path, monkeypatch: pytest.MonkeyPatch, again: Callable[..., Any]
) -> None:
    monkeypatch.setattr(cache_module, "_OPEN_BLOCKS", 1)
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
        monkeypatch.setattr(cache_module, "_num_waits", lambda: self.num_waits)
        monkeypatch.setattr(cache_module, "_advise", self._advise)

    def _advise(self, address: int, nbytes: int, advice: int) -> None:
        assert advice == mmap.MADV_WILLNEED
        assert address % cache_module.PAGE_BYTES == 0
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
    monkeypatch.setattr(cache_module, "PAGE_BYTES", 1)  # so that addresses are told as they are
    body = batch.frames(chunk, blocks)
    copied = b"".join(ctypes.string_at(address, nbytes) for address, nbytes in told.spans)
    [first, second] = wire.decode(body)
    sent = np.concatenate([first.tensors["input_ids"].reshape(-1), second.tensors["input_ids"].reshape(-1)])
    assert copied == sent[sent != plan.pad_id].tobytes() if packing == "rows" else sent.tobytes()
    store.close()


def test_packings_take_a_quarter_of_the_budget_and_count_with_the_blocks(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, 4000)
    for number in range(3):
        path = tmp_path / f"s-bins-all-{number}-4.index"
        cache.make_room_for_packing(400)
        path.write_bytes(bytes(400))
        os.utime(path, (number, number))
        cache.count_packing(path)
    assert [path.name for path in sorted(tmp_path.glob("*.index"))] == ["s-bins-all-1-4.index", "s-bins-all-2-4.index"]
    assert cache.used_bytes == 800
    assert CacheFolder(tmp_path, 4000).used_bytes == 800
    assert not cache.write("block", bytes(3500))  # with the packings there is no room
    assert cache.write("block", bytes(3000))
