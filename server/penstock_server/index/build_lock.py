"""Build lock: of the processes with one cache folder, one counts a shard; the others read the file that it stores."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from itertools import count
from pathlib import Path

log = logging.getLogger("penstock.turn")

_NAME = ".counting"
_MARKS = 1 << 12  # bytes of the lock file: a counting process changes those of its files as a heartbeat
_MARK_SECONDS = 1.0  # between heartbeats
_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 120.0  # without a heartbeat: the process may be stopped, or its disk hang, while all others wait


@contextmanager
def turn(*paths: Path) -> Iterator[Callable[[], None]]:
    """Waits while another process makes any of these files of one folder, then locks them until the `with` block ends.

    The block calls the yielded function after each piece of progress. After two minutes without progress, or on a disk without
    locks, the processes do not wait, and do the work twice. Threads of one process do not wait for each other.
    """
    folder, places = paths[0].parent, [_place(path) for path in paths]
    marks, marked_at = count(1), 0.0  # from 1: an unwritten byte is 0

    def get_further() -> None:
        nonlocal marked_at
        now = time.monotonic()
        if now - marked_at >= _MARK_SECONDS:
            marked_at, mark = now, bytes([next(marks) % 256])
            with suppress(OSError):
                for place in places:
                    os.pwrite(_lock_file(folder), mark, place % _MARKS)

    with suppress(OSError):
        _wait(_lock_file(folder), paths)
    try:
        yield get_further
    finally:
        with suppress(OSError):
            for place in places:
                fcntl.lockf(_lock_file(folder), fcntl.LOCK_UN, 1, place)


def _wait(file: int, paths: Sequence[Path]) -> None:
    """Locks the byte of each file that does not exist yet; gives up after two minutes without a heartbeat of its holder.

    While the holder makes progress, this process forwards its heartbeat to the bytes that it holds, for processes that wait
    for those.
    """
    since = time.monotonic()
    places = [_place(path) for path in paths]
    for number, (path, place) in enumerate(zip(paths, places, strict=True)):
        seen = None
        while not _has_locked(file, place) and not path.exists():
            now, mark = time.monotonic(), os.pread(file, 1, place % _MARKS)
            if seen not in (None, mark):
                since = now
                for own in places[:number]:
                    os.pwrite(file, mark, own % _MARKS)
            seen = mark
            if now - since >= _PATIENCE_SECONDS:  # the same process may hold the next file, so do not wait for that either
                log.warning("who counts %s has got no further for %.0f seconds; it is counted here, too", path, now - since)
                break
            time.sleep(_POLL_SECONDS)
        else:
            since = time.monotonic()  # another process may hold the next file


def _has_locked(file: int, place: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except (BlockingIOError, PermissionError):  # either error means that another process holds it
        return False
    return True


def _place(path: Path) -> int:
    """Returns the offset of a file's byte in the lock file, from its name."""
    return int.from_bytes(blake2b(path.name.encode(), digest_size=7).digest(), "big")


@cache
def _lock_file(folder: Path) -> int:
    # Opened once: closing any descriptor of a file releases all locks of the process on it.
    return os.open(folder / _NAME, os.O_RDWR | os.O_CREAT, 0o666)
