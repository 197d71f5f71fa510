"""Read-ahead: the blocks that a job comes to next are loaded while it trains on those before, so that few begin cold."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from penstock_server.problems import Problem

log = logging.getLogger("penstock.read_ahead")

_FORGET_SECONDS = 30.0  # a job that has asked for nothing for so long has ended, or is far from what comes next


@dataclass(slots=True)
class _Job:
    """`pending` are the blocks that nobody has begun to load, `begun` those of the last that were wanted that somebody has."""

    place: int
    pending: deque[int]
    load: Callable[[int], object]
    asked_at: float
    begun: set[int]


class ReadAhead:
    """Loads `num_blocks` at a time, in threads of its own, turn by turn for all jobs; what is asked for now goes beside it.

    Nothing waits for it and nothing depends on it: a block that it did not load is loaded when it is needed.
    """

    def __init__(self, num_blocks: int = 1) -> None:
        self.num_blocks = num_blocks
        self._jobs: dict[Hashable, _Job] = {}
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def want(self, job: Hashable, place: int, blocks: Callable[[], Sequence[int]], load: Callable[[int], object]) -> None:
        """A job comes next to `place` in the order of its blocks, where `blocks()` are; `load(block)` loads one of them.

        Called with every request: what was wanted at another place, or by a job that no longer asks, is dropped. Ranks of a
        job that are a little behind the others, by fewer than twice `num_blocks`, find what those have had loaded.
        """
        with self._changed:
            known = self._jobs.get(job)
            if known and _is_old(known):
                known = None
            if known and 0 <= known.place - place < 2 * self.num_blocks:
                known.asked_at = time.monotonic()
                return
            wanted = blocks()
            begun = known.begun.intersection(wanted) if known else set()
            pending = deque(block for block in wanted if block not in begun)
            self._jobs[job] = _Job(place, pending, load, time.monotonic(), begun)
            while len(self._threads) < self.num_blocks:
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
                pass  # whoever needs the block is told
            except Exception:  # else all later ones would begin cold
                log.exception("block %d could not be loaded ahead; it is loaded when it is needed", block)

    def _next(self) -> tuple[Callable[[int], object], int]:
        with self._changed:
            while True:
                self._jobs = {name: job for name, job in self._jobs.items() if not _is_old(job)}
                for name, job in self._jobs.items():
                    if job.pending:
                        self._jobs[name] = self._jobs.pop(name)  # to the end of the queue
                        block = job.pending.popleft()
                        job.begun.add(block)
                        return job.load, block
                self._changed.wait()


def _is_old(job: _Job) -> bool:
    return time.monotonic() >= job.asked_at + _FORGET_SECONDS
