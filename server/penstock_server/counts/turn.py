"""Turns: of several processes with one cache folder, one at a time counts the same; the others find what it stored."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

_NAME = ".counting"


@contextmanager
def turn(path: Path) -> Iterator[None]:
    """Around what makes this file: waits until no other process makes it, and then has the others wait.

    On a disk that has no locks nobody waits, and the same is counted twice. Threads of one process do not wait for each other.
    """
    place = int.from_bytes(blake2b(path.name.encode(), digest_size=7).digest(), "big")  # a byte of the lock file, by the name
    with suppress(OSError):
        fcntl.lockf(_lock_file(path.parent), fcntl.LOCK_EX, 1, place)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.lockf(_lock_file(path.parent), fcntl.LOCK_UN, 1, place)


@cache
def _lock_file(folder: Path) -> int:
    # Opened once: whoever closes a file gives up every lock that the process has on it.
    return os.open(folder / _NAME, os.O_RDWR | os.O_CREAT, 0o666)
