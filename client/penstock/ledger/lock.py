"""Locks around ledgers."""

from __future__ import annotations

import os
import sys
import threading


class Lock:
    """A lock. A thread that holds one, or waits for one, must not wait for a thread that may need one: see is_at_a_ledger.

    The garbage collector may close the ledger of an iterator that was dropped, at any line of any thread, these among them.
    """

    _depth = threading.local()

    def __init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        self._lock = threading.Lock()

    @classmethod
    def renewed_in_forks(cls) -> Lock:
        """One that nobody has in a process that was forked off: the thread that had it is not in there. It stays for ever."""
        lock = cls()
        if sys.platform != "win32":
            os.register_at_fork(after_in_child=lock._renew)
        return lock

    def __enter__(self) -> None:
        self._depth.now = self.depth() + 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._depth.now -= 1

    @classmethod
    def depth(cls) -> int:
        """How many of these the calling thread has, or waits for."""
        return getattr(cls._depth, "now", 0)


def is_at_a_ledger() -> bool:
    """Whether the calling thread is in the midst of opening one or of writing to it."""
    return Lock.depth() > 0
