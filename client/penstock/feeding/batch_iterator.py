"""A feed: the batches of some steps, fetched ahead of the loop, each with the step and digest of its frame."""

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
    """Iterates over the batches of `steps`, once; or over the first `replay` of them, again and again, for as many steps.

    Its connections and its threads begin here, and end with `close`, which an exit of the interpreter calls, too.
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
        self._busy_seconds = 0.0
        # Until it asked last, and when, while it waits for that. One tuple: another thread must not count a wait twice.
        self._waits: tuple[float, float | None] = (0.0, None)
        device = destination.device
        self._transport = source.connect(None if device == CPU else partial(allocate_pinned, device))
        try:
            self._frames = fetch_ahead(source, self._transport, spec, epoch, steps[:replay], prefetch_bytes)
        except BaseException:  # no more threads may be started, or Ctrl-C
            self._transport.close()
            raise
        # An iterator that is still referenced is only closed when modules are taken apart. Daemon threads run no more then:
        # who waits for one, or for a lock that it holds, waits for ever.
        self.is_left = False  # by an interpreter that exits
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
            self._busy_seconds += asked_at - given_at

    def _items(self) -> Iterator[Item]:
        items = self._made()
        if self._replay is None:
            return items
        # A loop that takes something out of its batch must find it there again.
        again = (item._replace(batch=dict(item.batch)) for item in cycle(items))
        return islice(again, self._num_steps)

    def _made(self) -> Iterator[Item]:
        device = self._destination.device
        if device != CPU:
            return map(uncompiled(_next), repeat(OnDevice(self._frames, device, self._tensors)))
        return map(uncompiled(self._expanded), self._frames)

    def _expanded(self, frame: Frame) -> Item:
        # As late as can be: what is written to memory that is used again now is still in the processor's cache when it is read,
        # and what waits is as small as it travelled.
        return Item.of(frame, expand(frame, pin_memory=self._destination.pin_memory, tensors=self._tensors))

    def stats(self) -> Stats:
        """What this feed has done so far. Another thread may ask, too, such as one that watches whether the loop hangs."""
        waited, asked_at = self._waits
        waits = 0.0 if asked_at is None else time.perf_counter() - asked_at
        return Stats(
            num_batches=self._num_batches,
            num_tokens=self._num_tokens,
            num_bytes=self._transport.num_bytes,
            num_retries=self._transport.num_retries,
            num_corrupted=self._transport.num_corrupted,
            wait_seconds=waited + waits,
            compute_seconds=self._busy_seconds,
            buffered_bytes=self._frames.buffered_bytes,
        )

    def close(self) -> None:
        """Stops the fetching and drops what is buffered. Idempotent.

        Python may collect a dropped iterator in any thread. One of this package's own cannot wait for its own end, and may hold
        a lock that closing needs: there a new thread does the closing, and nobody waits for it.
        """
        if is_own_thread():
            self.close_aside()
        else:
            self._close()

    def close_aside(self) -> None:
        """Has another thread do the closing, or what is left of it."""
        own_thread("close", self._close).start()

    def _leave(self) -> None:
        self.is_left = True
        self._close()

    def _close(self) -> None:
        with closing(self._transport), closing(self._frames):
            atexit.unregister(self._leave)


def _next(items: Iterator[Item]) -> Item:
    return next(items)
