"""Runs: steps whose batches are fetched with one request, by a thread that works ahead of the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

from penstock.feeding.prefetch import Prefetch
from penstock.source import Source
from penstock.spec import Spec
from penstock.transport.transport import Transport
from penstock.wire import Frame

PREFETCH_BYTES = 64 << 20  # the default of prefetch_bytes
OBJECT_BYTES = 2048  # about what Python's objects for one batch that waits take
RUN_BYTES = 8 << 20  # a response of a few MiB: the cost of a request vanishes in it
_RUN_SECONDS = 0.5  # that a run may take to come
_ALONE_TIMES = 3.0  # or so many times as long as a batch alone took: on a long way short runs would be all round trips
_MIN_RUNS = 4  # that fit into a budget: one that the loop takes from, one that waits, one that is read, one that is asked for


def fetch_ahead(
    source: Source, transport: Transport, spec: Spec, epoch: int, steps: range, budget_bytes: int
) -> Prefetch[Frame]:
    """The frames of `steps`, in order, fetched by a thread within a budget of bytes. Raises what Source.frames raises.

    Closing it interrupts the transport; to close that is left to the caller.
    """
    run_bytes = min(RUN_BYTES, budget_bytes // _MIN_RUNS)
    ahead: Prefetch[Frame] | None = None

    def fetch(steps: range, then: range) -> Sequence[Frame]:
        # While little is buffered, the next run is asked for, too, so that the server makes it while this one is read. With
        # enough in the buffer nobody would read it for a while, and the server would have to hold it.
        is_short = ahead is None or ahead.buffered_bytes < (_MIN_RUNS - 2) * run_bytes
        return source.frames(transport, spec, epoch, steps, then if is_short else range(0))

    ahead = Prefetch(
        fetch_runs(fetch, steps, run_bytes),
        nbytes=_nbytes,
        budget_bytes=budget_bytes,
        interrupt=transport.interrupt,
    )
    return ahead


def fetch_runs(
    fetch: Callable[[range, range], Sequence[Frame]], steps: range, target_bytes: int
) -> Generator[Sequence[Frame], None, None]:
    """The frames of `steps`, in order, in runs that grow from one frame to `target_bytes` of memory, or less: see _Pace.

    `fetch(steps, then)` gives the frames of `steps`, or only the first few of them, but at least one. Where it gives all, it
    is asked for `then` next. Raises what it raises.
    """
    pace = _Pace(target_bytes)
    start = 0
    run = following = 1  # the first batch comes alone, so that the loop starts at once
    while start < len(steps):
        behind = start + run
        began = time.perf_counter()
        frames = fetch(steps[start:behind], steps[behind : behind + following])
        seconds = time.perf_counter() - began
        yield frames
        start += len(frames)
        largest = pace.largest(len(frames), _nbytes(frames), seconds)
        if start < behind:  # the run broke off: begin with a small one again
            run = following = min(len(frames), largest)
        else:
            run, following = following, min(2 * following, largest)


class _Pace:
    """How large a run may be: `target_bytes`, or what comes within a while if that is less.

    A run is handed over as a whole: the loop would wait for the end of one that takes longer than what it has in hand.
    """

    def __init__(self, target_bytes: int) -> None:
        self._target_bytes = target_bytes
        self._alone_seconds = 0.0  # that the way takes for a batch alone
        self._came_alone = False  # one did, since several told whether it was the way that took them
        self._last_seconds = 0.0
        self._nbytes = self._seconds = 0.0  # of late: each run counts half as much as the one after it

    def largest(self, num_frames: int, nbytes: int, seconds: float) -> int:
        """The most frames that a run may have, at least one, now that one of so many frames and bytes took so many seconds."""
        took = max(seconds, self._last_seconds)  # what was asked for ahead may be there at once, after what took both's time
        if num_frames == 1:
            self._alone_seconds, self._came_alone = max(self._alone_seconds, took), True
        elif self._came_alone and took > _RUN_SECONDS / _ALONE_TIMES:  # what comes sooner may have been there already
            self._came_alone = False
            if self._alone_seconds > _ALONE_TIMES * took:  # it was not the way: the server made a block, or was away
                self._alone_seconds, self._nbytes, self._seconds = took, 0.0, 0.0
        self._last_seconds = seconds
        self._nbytes, self._seconds = self._nbytes / 2 + nbytes, self._seconds / 2 + max(seconds, 1e-9)
        run_seconds = max(_RUN_SECONDS, _ALONE_TIMES * self._alone_seconds)
        run_bytes = min(self._target_bytes, run_seconds * self._nbytes / self._seconds)
        return max(1, int(run_bytes * num_frames / nbytes))


def _nbytes(frames: Sequence[Frame]) -> int:
    return sum(frame.nbytes + OBJECT_BYTES for frame in frames)
