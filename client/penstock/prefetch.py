"""Prefetch: one thread fetches ahead of the training loop, within a budget of bytes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

_RUN_BYTES = 4 << 20  # a response of a few MiB: the cost of a request vanishes in it
_CLOSE_SECONDS = 5.0


class Prefetch(Generic[T]):
    """Iterates over the items of `steps`, in order, fetched by a thread of its own in runs that grow to a few MiB.

    `fetch(steps)` returns an item for each of at least the first of the steps; `nbytes(item)` is its size. At most
    `budget_bytes` are buffered, but always room for one run. `interrupt()` makes a fetch in the thread fail.
    `wait_seconds` is how long the consumer has waited so far, `buffered_bytes` what is fetched and not yet consumed.
    """

    def __init__(
        self,
        fetch: Callable[[range], Sequence[T]],
        steps: range,
        *,
        nbytes: Callable[[T], int],
        budget_bytes: int,
        interrupt: Callable[[], None],
    ) -> None:
        self.wait_seconds = 0.0
        self.buffered_bytes = 0
        self._fetch, self._nbytes, self._interrupt = fetch, nbytes, interrupt
        self._steps, self._budget_bytes = steps, budget_bytes
        self._items: deque[T] = deque()
        self._failure: BaseException | None = None
        self._finished = self._closed = False
        self._changed = threading.Condition()
        # A daemon: an interpreter that exits in mid-epoch must not wait for a server that is away.
        self._thread = threading.Thread(target=self._run, name="penstock-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._finished)
            self.wait_seconds += time.perf_counter() - began
            if self._items:
                item = self._items.popleft()
                self.buffered_bytes -= self._nbytes(item)
                self._changed.notify_all()
                return item
        if self._failure:
            raise self._failure
        raise StopIteration

    @property
    def has_next(self) -> bool:
        """Whether the next item is there, so that nobody waits for it."""
        return bool(self._items)

    def close(self) -> None:
        """Stops the thread and drops what is buffered. Idempotent."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self.buffered_bytes = 0
            self._changed.notify_all()
        self._interrupt()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._fetch_all()
        except BaseException as error:
            self._failure = error
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()

    def _fetch_all(self) -> None:
        target_bytes = max(1, min(_RUN_BYTES, self._budget_bytes // 4))
        start, run = 0, 1  # the first batch comes alone, so that the loop starts at once
        while start < len(self._steps):
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._items or self.buffered_bytes < self._budget_bytes)
                if self._closed:
                    return
            items = self._fetch(self._steps[start : start + run])
            run_bytes = sum(map(self._nbytes, items))
            with self._changed:
                if self._closed:
                    return
                self._items.extend(items)
                self.buffered_bytes += run_bytes
                self._changed.notify_all()
            start += len(items)
            run = max(1, min(2 * len(items), target_bytes * len(items) // max(run_bytes, 1)))
