"""Batch iterator: batches of some steps, fetched ahead of the loop, each with its frame's step and digest."""

from __future__ import annotations

import atexit
import time
from collections.abc import Container, Iterator
from contextlib import closing
from functools import partial
from itertools import cycle, islice, repeat

from penstock.feeding.device import Destination, OnDevice
from penstock.feeding.item import Item
from penstock.feeding.pinned import allocate_pinned
from penstock.feeding.ranges import fetch_ahead
from penstock.feeding.uncompiled import uncompiled
from penstock.source import Source
from penstock.spec import Spec
from penstock.stats import Stats
from penstock.tensors import CPU, expand
from penstock.threads import is_own_thread, own_thread
from penstock.wire import Frame


class BatchIterator:
    """Iterator over the batches of `steps`; with `replay`, the first `replay` batches repeat for len(steps) steps.

    It opens connections and starts threads; `close` ends them, which an exit of the interpreter calls, too.
    Raises what Source.frames raises.
    """

    def __init__(
        self,
        source: Source,
        spec: Spec,
        epoch: int,
        steps: range,
        *,
        prefetch_bytes: int,
        destination: Destination,
        replay: int | None,
        tensors: Container[str],
    ) -> None:
        self._destination, self._num_steps, self._replay = destination, len(steps), replay
        self._tensors = tensors
        self._num_batches = self._num_tokens = 0
        self._compute_seconds = 0.0
        # (seconds waited so far, start of the current wait or None). One tuple: another thread must not count a wait twice.
        self._waits: tuple[float, float | None] = (0.0, None)
        device = destination.device
        self._transport = source.connect(None if device == CPU else partial(allocate_pinned, device))
        try:
            self._frames = fetch_ahead(source, self._transport, spec, epoch, steps[:replay], prefetch_bytes)
        except BaseException:  # no more threads can start, or Ctrl-C
            self._transport.close()
            raise
        # Without atexit, an iterator that is still referenced is closed only when the interpreter clears modules. Daemon
        # threads no longer run then: a wait for one, or for a lock that it holds, never ends.
        self.is_left = False  # True: the interpreter exits
        atexit.register(self._leave)

    def __iter__(self) -> Iterator[Item]:
        items = self._items()
        asked_at = time.perf_counter()
        while True:
            waited, _ = self._waits
            self._waits = waited, asked_at
            try:
                item = next(items, None)
            finally:
                given_at = time.perf_counter()
                self._waits = waited + given_at - asked_at, None
            if item is None:
                return
            self._num_batches += 1
            self._num_tokens += item.num_tokens
            yield item
            asked_at = time.perf_counter()
            self._compute_seconds += asked_at - given_at

    def _items(self) -> Iterator[Item]:
        items = self._made()
        if self._replay is None:
            return items
        # Copy the dict: a loop that removes tensors from its batch must find them again in the next repeat.
        again = (item._replace(batch=dict(item.batch)) for item in cycle(items))
        return islice(again, self._num_steps)

    def _made(self) -> Iterator[Item]:
        device = self._destination.device
        if device != CPU:
            return map(uncompiled(_next), repeat(OnDevice(self._frames, device, self._tensors)))
        return map(uncompiled(self._expanded), self._frames)

    def _expanded(self, frame: Frame) -> Item:
        # Expand as late as possible: the loop then reads from the CPU cache, and waiting batches stay as small as on the wire.
        return Item.of(frame, expand(frame, pin_memory=self._destination.pin_memory, tensors=self._tensors))

    def stats(self) -> Stats:
        """Return the statistics so far. Any thread may call it, such as one that detects hangs of the loop."""
        waited, asked_at = self._waits
        waits = 0.0 if asked_at is None else time.perf_counter() - asked_at
        return Stats(
            num_batches=self._num_batches,
            num_tokens=self._num_tokens,
            num_bytes=self._transport.num_bytes,
            num_retries=self._transport.num_retries,
            num_corrupted=self._transport.num_corrupted,
            wait_seconds=waited + waits,
            compute_seconds=self._compute_seconds,
            buffered_bytes=self._frames.buffered_bytes,
        )

    def close(self) -> None:
        """Stop fetching and drop the buffer. Idempotent.

        Python may collect a dropped iterator in any thread. A thread of this package cannot join itself, and may hold a lock
        that `close` needs: there a new thread closes the iterator, without a join.
        """
        if is_own_thread():
            self.close_aside()
        else:
            self._close()

    def close_aside(self) -> None:
        """Close it, or finish its close, in a new thread."""
        own_thread("close", self._close).start()

    def _leave(self) -> None:
        self.is_left = True
        self._close()

    def _close(self) -> None:
        with closing(self._transport), closing(self._frames):
            atexit.unregister(self._leave)


def _next(items: Iterator[Item]) -> Item:
    return next(items)
