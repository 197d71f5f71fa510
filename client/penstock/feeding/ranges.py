"""Ranges of steps, each fetched with one request by a thread that works ahead of the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

from penstock.feeding.prefetch import Prefetch
from penstock.source import Source
from penstock.spec import Spec
from penstock.transport.transport import Transport
from penstock.wire import Frame

PREFETCH_BYTES = 64 << 20  # the default of prefetch_bytes
OBJECT_BYTES = 2048  # approximate memory of Python's objects for one buffered batch
RUN_BYTES = 8 << 20  # large enough to make the cost of a request negligible
_RUN_SECONDS = 0.5  # target duration of a range's fetch
# A fetch may also take 3 times as long as a single batch: with a high latency, short ranges would be all round trips.
_ALONE_TIMES = 3.0
# Ranges that fit into the budget: one that the loop consumes, one ready, one in transfer, one requested.
_MIN_RUNS = 4


def fetch_ahead(
    source: Source, transport: Transport, spec: Spec, epoch: int, steps: range, budget_bytes: int
) -> Prefetch[Frame]:
    """Fetch the frames of `steps` in order, by a thread, within a budget of bytes. Raises what Source.frames raises.

    `close` of the returned Prefetch interrupts the transport; the caller must close the transport.
    """
    run_bytes = min(RUN_BYTES, budget_bytes // _MIN_RUNS)
    ahead: Prefetch[Frame] | None = None

    def fetch(steps: range, then: range) -> Sequence[Frame]:
        # While the buffer is low, request the next range ahead: the server prepares it while this one is read. With a full
        # buffer the next range would stay unread, and the server would have to hold it.
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
    """Yield the frames of `steps` in order, in ranges that grow from one frame to at most `target_bytes`: see _Pace.

    `fetch(steps, then)` returns the frames of `steps`, or only the first few, but at least one. If it returns all, the next
    call is for `then`. Raises what `fetch` raises.
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
        if start < behind:  # the range is incomplete: begin with a small one again
            run = following = min(len(frames), largest)
        else:
            run, following = following, min(2 * following, largest)


class _Pace:
    """Limit for the size of a range: `target_bytes`, or the bytes that arrive within a target time.

    The thread passes a range on as a whole: if it takes longer than the loop's buffered batches last, the loop waits.
    """

    def __init__(self, target_bytes: int) -> None:
        self._target_bytes = target_bytes
        self._alone_seconds = 0.0  # network time of a single batch
        # A single batch arrived since a larger range last showed whether the network took that time.
        self._came_alone = False
        self._last_seconds = 0.0
        # Recent totals: each range has half the weight of the one after it.
        self._nbytes = self._seconds = 0.0

    def largest(self, num_frames: int, nbytes: int, seconds: float) -> int:
        """Return the maximum number of frames of a range (>= 1), after a fetch of `num_frames` took `seconds`."""
        # A response requested ahead may be ready at once: the fetch before it then took the time of both.
        took = max(seconds, self._last_seconds)
        if num_frames == 1:
            self._alone_seconds, self._came_alone = max(self._alone_seconds, took), True
        elif self._came_alone and took > _RUN_SECONDS / _ALONE_TIMES:  # a faster response may have been ready already
            self._came_alone = False
            if self._alone_seconds > _ALONE_TIMES * took:  # not the network: the server built a block, or was down
                self._alone_seconds, self._nbytes, self._seconds = took, 0.0, 0.0
        self._last_seconds = seconds
        self._nbytes, self._seconds = self._nbytes / 2 + nbytes, self._seconds / 2 + max(seconds, 1e-9)
        run_seconds = max(_RUN_SECONDS, _ALONE_TIMES * self._alone_seconds)
        run_bytes = min(self._target_bytes, run_seconds * self._nbytes / self._seconds)
        return max(1, int(run_bytes * num_frames / nbytes))


def _nbytes(frames: Sequence[Frame]) -> int:
    return sum(frame.nbytes + OBJECT_BYTES for frame in frames)
