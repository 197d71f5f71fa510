"""Runs: how many batches one request asks for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from penstock.wire import Frame

RUN_BYTES = 4 << 20  # a response of a few MiB: the cost of a request vanishes in it
_MOST_FRAMES = 1024  # of the smallest the objects in memory are larger than what they hold


def fetch_runs(
    fetch: Callable[[range], Sequence[Frame]], steps: range, target_bytes: int = RUN_BYTES
) -> Generator[Sequence[Frame], None, None]:
    """The frames of `steps`, in order, in runs that grow from one frame to `target_bytes`, or to a thousand frames.

    `fetch(steps)` gives a frame for each of at least the first of the steps. Raises what it raises.
    """
    start, run = 0, 1  # the first batch comes alone, so that the loop starts at once
    while start < len(steps):
        frames = fetch(steps[start : start + run])
        yield frames
        start += len(frames)
        run = max(
            1, min(_MOST_FRAMES, 2 * len(frames), target_bytes * len(frames) // max(sum(frame.nbytes for frame in frames), 1))
        )
