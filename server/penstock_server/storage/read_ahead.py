"""Read-ahead: the blocks of a job's next window are loaded while it trains on this one, so that no window begins cold."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from penstock_server.problems import Problem

log = logging.getLogger("penstock.read_ahead")

_FORGET_SECONDS = 30.0  # a job that has asked for nothing for so long has ended, or is far from its next window


@dataclass(slots=True)
class _Job:
    window: int
    pending: deque[int]
    load: Callable[[int], object]
    asked_at: float


class ReadAhead:
    """Loads blocks one at a time, in a thread of its own, turn by turn for all jobs; what is asked for now goes beside it.

    Nothing waits for it and nothing depends on it: a block that it did not load is loaded when it is needed.
    """

    def __init__(self) -> None:
        self._jobs: dict[Hashable, _Job] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def want(self, job: Hashable, window: int, blocks: Callable[[], Sequence[int]], load: Callable[[int], object]) -> None:
        """A job has reached `window`, so the blocks `blocks()` come next; `load(block)` loads one of them.

        Called with every request: what was wanted for an earlier window, or by a job that no longer asks, is dropped.
        """
        with self._changed:
            known = self._jobs.get(job)
            if known and known.window == window:
                known.asked_at = time.monotonic()
                return
            self._jobs[job] = _Job(window, deque(blocks()), load, time.monotonic())
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="penstock-read-ahead", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # no thread can be started now
                    log.warning("nothing is loaded ahead before the next window: %s", error)
                    return
                self._thread = thread
            self._changed.notify()

    def _run(self) -> None:
        while True:
            load, block = self._next()
            try:
                load(block)
            except Problem:
                pass  # whoever needs the block is told
            except Exception:  # else every later window would begin cold
                log.exception("block %d could not be loaded ahead; it is loaded when it is needed", block)

    def _next(self) -> tuple[Callable[[int], object], int]:
        with self._changed:
            while True:
                latest = time.monotonic() - _FORGET_SECONDS
                self._jobs = {name: job for name, job in self._jobs.items() if job.asked_at > latest}
                for name, job in self._jobs.items():
                    if job.pending:
                        self._jobs[name] = self._jobs.pop(name)  # to the end of the queue
                        return job.load, job.pending.popleft()
                self._changed.wait()
