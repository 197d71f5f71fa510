"""Read-ahead: makes blocks in the background, the soonest needed first."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from penstock_server.problems import Problem

log = logging.getLogger("penstock.read_ahead")

_FORGET_SECONDS = 30.0  # without a request for this long, a job has ended or will not need its blocks soon


@dataclass(slots=True)
class _Job:
    """One pass of ranks over an epoch.

    position    position of the front rank when `pending` was made
    pending     (block, position that needs it) of blocks that no thread has begun to make, ascending
    begun       the blocks wanted then that a thread has begun to make
    began       (time, position) that the pace, in positions per second, is measured from
    """

    position: int
    pending: deque[tuple[int, int]]
    load: Callable[[int], object]
    asked_at: float
    begun: set[int]
    began: tuple[float, int]

    @property
    def is_old(self) -> bool:
        """Whether its ranks have stopped."""
        return time.monotonic() >= self.asked_at + _FORGET_SECONDS

    @property
    def seconds_left(self) -> float:
        """Seconds until the next pending block is needed, at the pace of the ranks so far."""
        began_at, first = self.began
        _, needed_at = self.pending[0]
        return (needed_at - self.position) * (self.asked_at - began_at) / max(1, self.position - first)


class ReadAhead:
    """Threads that always make the soonest needed block of all jobs.

    No request waits for it or depends on it: a block that it did not make is made on request.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._num_threads = num_threads
        self._jobs: dict[Hashable, _Job] = {}
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def is_due(self, job: Hashable, position: int, count: int) -> bool:
        """Returns whether to call `want` for a job that has reached a position. Call it with every request.

        It is due when the job has advanced by a quarter of `count` since, or is `count` behind: ranks slightly behind find
        the blocks made for the others.
        """
        with self._changed:
            known = self._jobs.get(job)
            if not known or known.is_old or not known.position - count < position < known.position + max(1, count // 4):
                return True
            known.asked_at = time.monotonic()
            return False

    def want(self, job: Hashable, position: int, blocks: Sequence[tuple[int, int]], load: Callable[[int], object]) -> None:
        """Replaces the blocks that a job wants: (block, position that needs it), ascending. `load(block)` makes one."""
        now = time.monotonic()
        with self._changed:
            known = self._jobs.get(job)
            begun = known.begun.intersection(block for block, _ in blocks) if known and not known.is_old else set()
            pending = deque((block, needed_at) for block, needed_at in blocks if block not in begun)
            began = known.began if known and not known.is_old and known.position < position else (now, position)
            self._jobs[job] = _Job(position, pending, load, now, begun, began)
            while len(self._threads) < self._num_threads:
                # Daemon threads: the process need not wait for blocks that nothing will read.
                thread = threading.Thread(target=self._run, name="penstock-read-ahead", daemon=True)
                thread.start()
                self._threads.append(thread)
            self._changed.notify(len(pending))

    def _run(self) -> None:
        while True:
            load, block = self._next()
            try:
                load(block)
            except Problem:
                pass  # the request that needs the block gets the error
            except Exception:  # otherwise the thread would end and later blocks would be cold
                log.exception("block %d could not be loaded ahead; it is loaded when it is needed", block)

    def _next(self) -> tuple[Callable[[int], object], int]:
        with self._changed:
            while True:
                self._jobs = {name: job for name, job in self._jobs.items() if not job.is_old}
                waiting = (job for job in self._jobs.values() if job.pending)
                if job := min(waiting, key=lambda job: job.seconds_left, default=None):
                    block, _ = job.pending.popleft()
                    job.begun.add(block)
                    return job.load, block
                self._changed.wait()
