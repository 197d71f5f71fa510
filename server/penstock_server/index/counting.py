"""Counting: results that need a pass over a dataset, made once in the background; until then callers get the progress."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from penstock_server.checksummed import is_there
from penstock_server.problems import MORE_THREADS, IndexFailed, IndexNotReady, OutOfMemory, Problem, lacks_threads

T = TypeVar("T")

log = logging.getLogger("penstock.counting")

_PATIENCE_SECONDS = 1.0  # from the start, one deadline for all callers; once more shortly before the end
_FAILURE_SECONDS = 30.0  # all callers get a failure for this long; the next call after it starts again


def _duration(seconds: int) -> str:
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"


class Counting(Generic[T]):
    """A result that a background thread makes on the first call of `get`.

    what   name of the result in messages: "the tokens of wiki"
    total  number of steps
    make   makes the result, and calls its argument with the number of steps done
    files  returns the files that hold the result
    """

    def __init__(
        self, what: str, total: int, make: Callable[[Callable[[int], None]], T], files: Callable[[], Iterable[Path]]
    ) -> None:
        self.num_done = 0
        self.total = total
        self._what, self._make, self._files = what, make, files
        self._lock = threading.Lock()
        self._made: list[T] = []
        self._thread: threading.Thread | None = None
        self._failure: tuple[Problem, float] | None = None
        self._began_at = self._wait_until = 0.0
        self._has_neared_end = False

    def get(self) -> T:
        """Returns the result; the first call starts to make it.

        Raises IndexNotReady: the result is not ready; the message gives the progress. Raises the error that stopped it.
        """
        if not self._made and (thread := self._start()):
            thread.join(max(0.0, self._wait_until - time.monotonic()))
        if self._made:
            return self._made[0]
        if failure := self._failure:
            raise failure[0].with_traceback(None)  # otherwise the traceback would grow with every caller
        done, seconds_left = self.num_done, self._seconds_left(time.monotonic())
        # The time comes first: a terminal truncates long lines.
        if seconds_left is None:
            told = f"{self._what} are being counted"
        else:
            told = f"about {_duration(seconds_left)} left until {self._what} are counted"
        share = f"{done:,} of {self.total:,} blocks are done ({done / max(self.total, 1):.0%})"
        raise IndexNotReady(f"{told}: {share}. This happens once.", done, self.total, seconds_left)

    def _start(self) -> threading.Thread | None:
        """Starts the thread unless it runs or failed recently; returns the running thread, if any."""
        with self._lock:
            now = time.monotonic()
            if self._made or (self._failure and now < self._failure[1]):
                return None
            if self._thread:
                if not self._has_neared_end and self._will_end_soon(now):
                    # Once, with one deadline for all callers: they arrive one by one, and each holds a thread that others need.
                    self._has_neared_end, self._wait_until = True, now + _PATIENCE_SECONDS
                return self._thread
            self.num_done, self._failure, self._has_neared_end = 0, None, False
            self._began_at, self._wait_until = now, now + _PATIENCE_SECONDS
            self._thread = threading.Thread(target=self._run, name="penstock-counting", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no thread can be started now; the next call retries
                self._thread = None
                raise
            return self._thread

    def _will_end_soon(self, now: float) -> bool:
        """Returns whether it will end within the patience, at the rate so far."""
        seconds_left = self._seconds_left(now)
        return seconds_left is not None and seconds_left <= _PATIENCE_SECONDS

    def _seconds_left(self, now: float) -> int | None:
        """Returns the seconds left at the rate so far, rounded up; None before the first step is done."""
        elapsed, done = now - self._began_at, self.num_done
        return max(1, math.ceil(elapsed * (self.total - done) / done)) if done else None

    @property
    def is_ready(self) -> bool:
        """Whether the result is in memory."""
        return bool(self._made)

    @property
    def is_stored(self) -> bool:
        """Whether all files of the result exist."""
        return all(map(is_there, self._files()))

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
        for path in self._files():
            with suppress(OSError):  # not made yet, could not be stored, or the folder became read-only
                os.utime(path)

    def _advance(self, num_done: int) -> None:
        self.num_done = num_done

    def _run(self) -> None:
        try:
            self.make(self._advance)
        except Problem as problem:
            self._fail(problem)
        except MemoryError as error:
            self._fail(OutOfMemory(f"to count {self._what}", error, "write smaller row groups"))
        except Exception as error:
            if lacks_threads(error):
                self._fail(OutOfMemory(f"to count {self._what}", error, MORE_THREADS))
                return
            log.exception("%s cannot be counted", self._what)
            self._fail(IndexFailed(f"{self._what} cannot be counted because of a fault in penstock: {error!r}."))
        finally:
            self._thread = None

    def _fail(self, problem: Problem) -> None:
        self._failure = (problem, time.monotonic() + _FAILURE_SECONDS)
