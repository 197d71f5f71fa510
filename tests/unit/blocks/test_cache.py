import errno
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pytest

from penstock_server.blocks import cache as cache_module
from penstock_server.blocks.cache import CacheFolder
from penstock_server.checksummed import write_sealed, write_with_seal

KIB = 1 << 10
OVERHEAD = 8  # the digest behind each file


class Disk(NamedTuple):
    free: int


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if not path.name.startswith(".")}


def content(number: int, nbytes: int = KIB) -> memoryview:
    return memoryview(number.to_bytes(4, "big") * (nbytes // 4))


def test_what_is_stored_is_read_back_also_by_another_process(tmp_path: Path) -> None:
    assert CacheFolder(tmp_path, 9 * KIB).write("a", content(1))
    again = CacheFolder(tmp_path, 9 * KIB)
    stored = again.read("a")
    assert stored is not None
    assert bytes(stored) == bytes(content(1))
    assert again.read("b") is None
    assert again.used_bytes == sum(files(tmp_path).values()) == KIB + OVERHEAD


def test_the_least_recently_used_goes_first_and_a_map_outlives_its_file(tmp_path: Path) -> None:
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


def test_what_is_larger_than_the_budget_is_not_stored_and_nothing_makes_room_for_it(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, 2 * KIB)
    assert cache.write("small", content(0))
    assert not cache.write("large", content(1, 2 * KIB))
    assert (files(tmp_path), cache.used_bytes) == ({"small.block": KIB + OVERHEAD}, KIB + OVERHEAD)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, None])
def test_what_fails_half_way_gives_its_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
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
    assert (files(tmp_path), cache.used_bytes) == ({"a.block": KIB + OVERHEAD}, KIB + OVERHEAD)
    assert cache.failure == ("Input/output error" if number == errno.EIO else None)
    monkeypatch.undo()
    cache.budget_bytes = cache.configured_bytes
    assert cache.write("b", content(2))
    assert cache.failure is None


def test_a_lower_budget_takes_effect_at_the_start(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, 100 * KIB)
    for number in range(50):
        cache.write(str(number), content(number))
    lower = CacheFolder(tmp_path, 10 * KIB)
    assert sum(files(tmp_path).values()) == lower.used_bytes <= 10 * KIB


def test_without_a_budget_half_of_the_free_disk_is_taken(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert 0.4 * free < CacheFolder(tmp_path).budget_bytes < 0.6 * free


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "empty"])
def test_a_damaged_file_is_dropped_and_its_room_is_free_again(tmp_path: Path, damage: str) -> None:
    cache = CacheFolder(tmp_path, 9 * KIB)
    cache.write("a", content(1))
    path = tmp_path / "a.block"
    whole = path.read_bytes()
    path.write_bytes({"flip": b"?" + whole[1:], "cut": whole[:-1], "grow": whole + b"x", "empty": b""}[damage])
    assert cache.read("a") is None
    assert files(tmp_path) == {}
    assert cache.write("a", content(1))
    assert CacheFolder(tmp_path, 9 * KIB).used_bytes == KIB + OVERHEAD


def test_files_that_changed_places_are_dropped(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, 9 * KIB)
    for number, name in enumerate("ab"):
        cache.write(name, content(number))
    for source, target in [("a.block", "aside"), ("b.block", "a.block"), ("aside", "b.block")]:
        (tmp_path / source).rename(tmp_path / target)
    assert [cache.read(name) for name in "ab"] == [None, None]
    assert (files(tmp_path), cache.used_bytes) == ({}, 0)


def test_what_takes_the_place_of_a_file_that_was_evicted_is_looked_at(tmp_path: Path) -> None:
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


def test_a_file_that_is_stored_twice_counts_once(tmp_path: Path) -> None:
    one, two = (CacheFolder(tmp_path, 9 * KIB) for _ in range(2))
    one.write("a", content(1))
    two.write("a", content(1))
    assert one.used_bytes == KIB + OVERHEAD


def test_what_a_crash_left_half_written_is_removed_once_it_is_old(tmp_path: Path) -> None:
    (tmp_path / "old.tmp").write_bytes(bytes(KIB))
    (tmp_path / "young.block.tmp").write_bytes(bytes(KIB))
    os.utime(tmp_path / "old.tmp", (time.time() - 3600,) * 2)
    assert CacheFolder(tmp_path, 9 * KIB).used_bytes == KIB
    assert list(files(tmp_path)) == ["young.block.tmp"]


def test_counts_that_are_being_written_push_no_block_out(tmp_path: Path) -> None:
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


def test_several_processes_on_one_folder_never_exceed_the_budget(tmp_path: Path) -> None:
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
def test_where_the_folder_was_removed_meanwhile_all_count_in_a_new_one(tmp_path: Path, is_lock_file_alone: bool) -> None:
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


def test_threads_that_write_at_once_never_exceed_the_budget(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, 100 * KIB)
    gate, peaks = threading.Barrier(5), []

    def write(number: int) -> None:
        gate.wait()
        for turn in range(50):
            cache.write(f"{number}-{turn}", content(number, 40 * KIB))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    gate.wait()
    while any(thread.is_alive() for thread in threads):
        peaks.append(cache.used_bytes)
    assert 0 < max(peaks) <= 100 * KIB


FULL_DISK = """
import logging, sys
from pathlib import Path
from penstock_server.blocks.cache import CacheFolder
logging.basicConfig(format="%(message)s")
folder = Path(sys.argv[1])
cache = CacheFolder(folder, 1 << 30)
stored = [number for number in range(100) if cache.write(str(number), memoryview(bytes([number]) * (1 << 16)))]
assert 10 < len(stored) <= 100, stored
assert cache.budget_bytes <= 1 << 20, cache.budget_bytes
assert cache.read(str(stored[-1])) is not None
assert not list(folder.glob("*.tmp"))
print("done")
"""


def test_a_full_disk_lowers_the_budget_and_loses_nothing(tmp_path: Path) -> None:
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
    assert done.stderr.count("the budget of the block cache is lowered to") == 1


def test_a_disk_that_stays_full_is_not_told_of_for_each_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = CacheFolder(tmp_path, 100 * KIB)
    assert all(cache.write(str(number), content(number)) for number in range(40))
    monkeypatch.setattr(os, "posix_fallocate", full)
    for name in "abcd":
        assert not cache.write(name, content(0))
    [line] = [record.getMessage() for record in caplog.records]
    assert f"the budget of the block cache is lowered to {cache.budget_bytes:,} bytes" in line


def test_counts_that_are_stored_beside_the_blocks_meanwhile_disturb_nobody(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, 9 * KIB)
    is_over = threading.Event()

    def store_counts() -> None:
        while not is_over.is_set():
            write_sealed(tmp_path / "some.lengths", [bytes(KIB)], "")

    storing = threading.Thread(target=store_counts)
    storing.start()
    try:
        for number in range(500):
            assert CacheFolder(tmp_path, 9 * KIB).budget_bytes == 9 * KIB
            assert cache.write(str(number), content(number))
    finally:
        is_over.set()
        storing.join()


def test_the_budget_rises_again_once_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    free = [0]
    monkeypatch.setattr(cache_module, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(free[0]))
    cache = CacheFolder(tmp_path, 100 * KIB)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert not cache.write("a", content(0))
    assert (cache.budget_bytes, cache.remedy) == (0, "Free disk space")
    assert not cache.write("a", content(0))  # it still has none
    free[0] = 10 * KIB
    assert cache.write("a", content(0))
    assert cache.budget_bytes == 5 * KIB
    free[0] = 20 * KIB
    assert cache.write("a", content(1))
    assert cache.budget_bytes == 11 * KIB + OVERHEAD  # half of that, and what it has
    free[0] = 1000 * KIB
    assert cache.write("b", content(0))
    assert cache.budget_bytes == cache.configured_bytes == 100 * KIB
    assert cache.remedy == "Raise --cache-bytes"
    assert f"has room again; the budget of the block cache is {100 * KIB:,} bytes" in caplog.text


def test_who_frees_a_full_disk_may_remove_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_module, "_LOOK_SECONDS", 0.0)
    cache = CacheFolder(tmp_path / "cache", 100 * KIB)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert not cache.write("a", content(0))
    shutil.rmtree(tmp_path / "cache")
    assert cache.write("a", content(0))
    assert (cache.budget_bytes, (tmp_path / "cache").exists()) == (100 * KIB, True)
