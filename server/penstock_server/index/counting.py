"""Counting: results that need a pass over a dataset, made once in the background; until then callers get the progress."""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import Generic, TypeVar

from penstock_server.problems import IndexFailed, IndexNotReady, OutOfMemory, Problem

T = TypeVar("T")

log = logging.getLogger("penstock.counting")

_PATIENCE_SECONDS = 1.0  # from the start, one deadline for all callers
_FAILURE_SECONDS = 30.0  # all callers get a failure for this long; the next call after it starts again
_LOCK_FILE = ".counting"
_POLL_SECONDS = 0.1


class Counting(Generic[T]):
    """A result that a background thread makes on the first call of `get`.

    `what` is its name in messages: "the tokens of wiki". `make` calls its argument with the number of steps done, of `total`.
    `files` returns the files that hold the result.
    """

    def __init__(
        self, what: str, total: int, make: Callable[[Callable[[int], None]], T], files: Callable[[], Iterable[Path]]
    ) -> None:
        self.num_done = 0
        self.total = total
        self._what, self._make, self.files = what, make, files
        self._lock = threading.Lock()
        self._made: list[T] = []
        self._thread: threading.Thread | None = None
        self._failure: tuple[Problem, float] | None = None
        self._began_at = 0.0

    def get(self) -> T:
        """Returns the result; the first call starts to make it. Raises IndexNotReady, and the error that stopped it."""
        if not self._made and (thread := self._start()):
            thread.join(max(0.0, self._began_at + _PATIENCE_SECONDS - time.monotonic()))
        if self._made:
            return self._made[0]
        if failure := self._failure:
            raise failure[0].with_traceback(None)  # otherwise the traceback would grow with every caller
        done, seconds_left = self.num_done, self.seconds_left
        progress = f"{done:,} of {self.total:,} blocks are done ({done / max(self.total, 1):.0%})"
        # The time comes first: a terminal truncates long lines.
        left = f"about {timedelta(seconds=seconds_left)} left, " if seconds_left else ""
        raise IndexNotReady(
            f"{left}{self._what} are being counted: {progress}. This happens once.", done, self.total, seconds_left
        )

    def _start(self) -> threading.Thread | None:
        """Starts the thread unless it runs or failed recently; returns the running thread, if any."""
        with self._lock:
            now = time.monotonic()
            if self._made or (self._failure and now < self._failure[1]):
                return None
            if not (self._thread and self._thread.is_alive()):
                self.num_done, self._failure, self._began_at = 0, None, now
                self._thread = threading.Thread(target=self._run, name="penstock-counting", daemon=True)
                self._thread.start()
            return self._thread

    @property
    def seconds_left(self) -> int | None:
        """Estimated seconds until the running thread has the result; None without one, and before its first step."""
        done, seconds = self.num_done, time.monotonic() - self._began_at
        if self._made or not done or not (self._thread and self._thread.is_alive()):
            return None
        return max(1, math.ceil(seconds * (self.total - done) / done))

    @property
    def num_files_done(self) -> int:
        """Number of files of the result up to the first missing one: another process may be making them."""
        return sum(1 for _ in takewhile(os.path.exists, self.files()))

    @property
    def is_ready(self) -> bool:
        """Whether the result is in memory."""
        return bool(self._made)

    @property
    def is_running(self) -> bool:
        """Whether the thread makes the result now."""
        return bool((thread := self._thread) and thread.is_alive())

    @property
    def is_stored(self) -> bool:
        """Whether all files of the result exist."""
        return all(map(os.path.exists, self.files()))

    def read(self) -> None:
        """Reads the result if it is stored, without counting. `get` raises what stops that."""
        if not self._made and self.is_stored:
            with suppress(Problem):
                self.get()

    def make(self, advance: Callable[[int], None]) -> T:
        """Makes the result now, in this thread. Raises the error that stops it."""
        if not self._made:
            made = self._make(advance)
            self.mark_used()
            with self._lock:
                self._made.append(made)
        return self._made[0]

    def mark_used(self) -> None:
        """Sets the mtime of the result's files to now, so that cleanup does not remove them."""
        for path in self.files():
            with suppress(OSError):  # not made yet, could not be stored, or the folder became read-only
                os.utime(path)

    def _run(self) -> None:
        try:
            self.make(partial(setattr, self, "num_done"))
            return
        except Problem as problem:
            failure = problem
        except MemoryError as error:
            failure = OutOfMemory(f"to count {self._what}", error, "write smaller row groups")
        except Exception as error:
            log.exception("%s cannot be counted", self._what)
            failure = IndexFailed(f"{self._what} cannot be counted because of a fault in penstock: {error!r}.")
        self._failure = (failure, time.monotonic() + _FAILURE_SECONDS)


@contextmanager
def build_lock(*paths: Path) -> Iterator[None]:
    """Locks files of one folder that this process is to make; waits while another process makes one of them.

    A file that exists is not locked. On a disk without locks, processes do the same work twice. Threads of one process do not
    wait for each other.
    """
    folder, missing = paths[0].parent, [path.name.encode() for path in paths if not os.path.exists(path)]  # noqa: PTH110
    offsets = [int.from_bytes(blake2b(name, digest_size=7).digest(), "big") for name in missing]  # of their bytes in the lock
    with suppress(OSError):
        for offset in offsets:
            _lock_byte(_lock_file(folder), offset)
    try:
        yield
    finally:
        with suppress(OSError):
            for offset in offsets:
                fcntl.lockf(_lock_file(folder), fcntl.LOCK_UN, 1, offset)


def _lock_byte(file: int, offset: int) -> None:
    """Locks a byte of the lock file; waits while another process holds it."""
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX, 1, offset)
        except OSError as error:
            # The kernel refuses to wait where two processes wait for each other, though another thread of each will go on.
            if error.errno != errno.EDEADLK:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return


@cache
def _lock_file(folder: Path) -> int:
    # Once for the process, like its locks: closing any descriptor of a file releases all locks of the process on it.
    return os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
