"""Turns: of several processes with one cache folder, one at a time counts the same; the others find what it stored."""

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
_MARKS = 1 << 12  # bytes that stand in the lock file: who counts changes some of them, by the names, as long as it gets further
_MARK_SECONDS = 1.0  # between changes
_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 120.0  # for who gets no further: it may have been stopped, or its disk hang, and all others wait with it


@contextmanager
def turn(*paths: Path) -> Iterator[Callable[[], None]]:
    """Waits while another process makes any of these files, which are of one folder; then the others wait until the block ends.

    The block calls the function that it is given after each piece of progress. After two minutes without any, or on a disk
    without locks, nobody waits, and the work is done twice. Threads of one process do not wait for each other.
    """
    folder, places = paths[0].parent, [_place(path) for path in paths]
    marks, marked_at = count(1), 0.0  # a byte that nobody has written is 0

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
    """Locks the place of each file, until it is there; gives up once who holds one has got no further for two minutes.

    As long as that one gets further, so does who waits for it, holding others that a third may wait for.
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
            if now - since >= _PATIENCE_SECONDS:  # nor is the next file waited for then: it may be held by the same
                log.warning("who counts %s has got no further for %.0f seconds; it is counted here, too", path, now - since)
                break
            time.sleep(_POLL_SECONDS)
        else:
            since = time.monotonic()  # the next file may be another's


def _has_locked(file: int, place: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except (BlockingIOError, PermissionError):  # either tells that another process has
        return False
    return True


def _place(path: Path) -> int:
    """A byte of the lock file, by the name."""
    return int.from_bytes(blake2b(path.name.encode(), digest_size=7).digest(), "big")


@cache
def _lock_file(folder: Path) -> int:
    # Opened once: whoever closes a file gives up every lock that the process has on it.
    return os.open(folder / _NAME, os.O_RDWR | os.O_CREAT, 0o666)
