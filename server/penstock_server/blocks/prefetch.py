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
    def seconds_left(self) -> float:
        """Seconds until the next pending block is needed, at the pace of the ranks so far."""
        began_at, first = self.began
        _, needed_at = self.pending[0]
        return (needed_at - self.position) * (self.asked_at - began_at) / max(1, self.position - first)


class ReadAhead:
    """A pool of `num_threads` threads that always makes the soonest needed block of all jobs.

    No request waits for it or depends on it: a block that it did not make is made on request.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._num_threads = num_threads
        self._jobs: dict[Hashable, _Job] = {}
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def want(
        self,
        job: Hashable,
        position: int,
        count: int,
        blocks: Callable[[], Sequence[tuple[int, int]]],
        load: Callable[[int], object],
    ) -> None:
        """Records that a job has reached a position. Call it with every request.

        `blocks()` returns (block, position that needs it) from there on, ascending. It is called again when the job has
        advanced by a quarter of `count`, or is `count` behind: ranks slightly behind find the blocks made for the others.
        `load(block)` makes one block.
        """
        now = time.monotonic()
        with self._changed:
            known = self._jobs.get(job)
            if known and _is_old(known):
                known = None
            if known and known.position - count < position < known.position + max(1, count // 4):
                known.asked_at = now
                return
            wanted = blocks()
            begun = known.begun.intersection(block for block, _ in wanted) if known else set()
            pending = deque(own for own in wanted if own[0] not in begun)
            began = known.began if known and known.position < position else (now, position)
            self._jobs[job] = _Job(position, pending, load, now, begun, began)
            while len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._run, name="penstock-read-ahead", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # no thread can be started now
                    if not self._threads:
                        log.warning("nothing is loaded ahead of its time: %s", error)
                    break
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
                self._jobs = {name: job for name, job in self._jobs.items() if not _is_old(job)}
                if waiting := [job for job in self._jobs.values() if job.pending]:
                    job = min(waiting, key=lambda job: job.seconds_left)
                    block, _ = job.pending.popleft()
                    job.begun.add(block)
                    return job.load, block
                self._changed.wait()


def _is_old(job: _Job) -> bool:
    return time.monotonic() >= job.asked_at + _FORGET_SECONDS
