"""Prefetch: a thread that fetches ranges of steps ahead of the loop, within a budget of bytes."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import chain, pairwise
from multiprocessing import current_process
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from penstock.client import Client, Steps
from penstock.errors import PenstockError
from penstock.transport import Transport
from penstock.waits import Span
from penstock.wire import Frame

T = TypeVar("T")

PREFETCH_BYTES = 64 << 20  # the default of prefetch_bytes
OBJECT_BYTES = 2048  # approximate memory of Python's objects for one buffered batch
RANGE_BYTES = 8 << 20  # large enough to make the cost of a request negligible
# Ranges that fit into the budget: one that the loop consumes, one ready, one in transfer, one requested.
_MIN_RANGES = 4
_CLOSE_SECONDS = 5.0
_ORPHAN_SECONDS = 2.0  # between checks of a waiting loader worker for its parent process


class Prefetch(Generic[T]):
    """Iterator over the items of `groups`, in order. A thread produces the groups, and passes each on as a whole.

    `nbytes(group)` is the size of a group. The buffer holds at most `budget_bytes`, plus one group and the rest of the one
    before it. The thread closes `groups`. `close` calls `interrupt()`, which makes a running `next(groups)` fail.

    It works only in the process that created it: a fork does not have the thread. There, and after `close`, `next` raises
    PenstockError. It also does in a loader worker whose parent was killed: otherwise the worker would wait for a server, and
    keep its files locked.

    `blocked` is the time in which `next` waits for the thread.

    Threads share only SimpleQueues: a signal handler that raises, as Ctrl-C does, leaves no lock of theirs taken.
    """

    def __init__(
        self,
        groups: Generator[Sequence[T], None, None],
        *,
        nbytes: Callable[[Sequence[T]], int],
        budget_bytes: int,
        interrupt: Callable[[], None],
        blocked: Span | None = None,
    ) -> None:
        self._generator, self._nbytes, self._interrupt = groups, nbytes, interrupt
        self._blocked = blocked or Span()
        self._budget_bytes = budget_bytes
        # Groups with their bytes; at last the exception that ends the iteration.
        self._ready = SimpleQueue[tuple[Sequence[T], int] | BaseException]()
        self._produced_bytes = self._taken_bytes = 0  # each written by one thread
        self._room = SimpleQueue[None]()  # wakes the thread
        self._hand: deque[T] = deque()  # the rest of the consumer's current group
        self._hand_item_bytes = 0.0  # mean of that group
        self._is_closed = False
        self._process, self._parent = os.getpid(), os.getppid()
        self._thread = threading.Thread(target=self._run, name="penstock-fetch", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C: the thread may run already
            self._stop()
            raise

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if os.getpid() != self._process:
            raise PenstockError(
                f"this iteration began in process {self._process}, and process {os.getpid()} was forked off it: the thread "
                f"that fetches and its connections are there. Begin a new iteration in each process."
            )
        while True:
            try:
                return self._hand.popleft()
            except IndexError:  # also if another thread closes it concurrently
                pass
            self._take()  # outside the handler: its errors must not have the IndexError as their context

    @property
    def has_next(self) -> bool:
        """Whether `next` does not block."""
        return bool(self._hand) or not self._ready.empty()

    @property
    def buffered_bytes(self) -> int:
        """Approximate bytes that are buffered and not yet consumed."""
        if self._is_closed:
            return 0
        return self._produced_bytes - self._taken_bytes + round(len(self._hand) * self._hand_item_bytes)

    def close(self) -> None:
        """Stop the thread and drop the buffer. Idempotent; does nothing in a fork."""
        if os.getpid() != self._process:
            return
        self._stop()
        self._hand.clear()
        # Python may collect a dropped iterator in any thread, also in its own.
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)
        with suppress(Empty):
            while True:
                self._ready.get_nowait()
        # For a loop in another thread. A StopIteration would pass for the end of the epoch.
        self._ready.put(PenstockError("this iteration was closed, as all are when the interpreter exits: begin another one."))

    def _stop(self) -> None:
        self._is_closed = True
        self._room.put(None)
        self._interrupt()

    def _take(self) -> None:
        """Take the next group. Raises the exception that ends the iteration."""
        self._blocked.begin(time.perf_counter())
        try:
            group = self._get()
        finally:
            self._blocked.end(time.perf_counter())
        if isinstance(group, BaseException):
            self._ready.put(group)  # for the next call
            try:
                raise group
            finally:
                del group  # its traceback refers to this frame: the cycle would keep fetched data in memory
        items, nbytes = group
        self._hand.extend(items)
        self._hand_item_bytes = nbytes / max(len(items), 1)
        self._taken_bytes += nbytes
        if self._room.empty():
            self._room.put(None)

    def _get(self) -> tuple[Sequence[T], int] | BaseException:
        while True:
            with suppress(Empty):
                return self._ready.get(timeout=_ORPHAN_SECONDS)
            if current_process().daemon and os.getppid() != self._parent:
                raise PenstockError("the process of the training loop has ended, so its loader worker ends.")

    def _run(self) -> None:
        try:
            with closing(self._generator):  # otherwise its resources would stay until this object is collected
                for group in self._generator:
                    if self._is_closed:
                        return
                    nbytes = self._nbytes(group)
                    self._produced_bytes += nbytes
                    self._ready.put((group, nbytes))
                    while not self._is_closed and not self._ready.empty() and self.buffered_bytes >= self._budget_bytes:
                        self._room.get()
            self._ready.put(StopIteration())
        except BaseException as error:
            # A closed iterator drops it: its traceback would keep fetched data in memory.
            if not self._is_closed:
                self._ready.put(error)


def fetch_ahead(
    client: Client, transport: Transport, epochs: Iterable[Steps], budget_bytes: int, blocked: Span | None = None
) -> Prefetch[Frame]:
    """Fetch the frames of all steps in order, by a thread, within a budget of bytes. Raises what Client.frames raises.

    `close` of the returned Prefetch interrupts the transport; the caller must close the transport.
    """
    range_bytes = min(RANGE_BYTES, budget_bytes // _MIN_RANGES)
    ahead: Prefetch[Frame] | None = None

    def fetch(steps: Steps, then: Steps | None) -> Sequence[Frame]:
        # While the buffer is low, request the next range ahead: the server prepares it while this one is read. With a full
        # buffer the next range would stay unread, and the server would have to hold it.
        is_short = ahead is None or ahead.buffered_bytes < (_MIN_RANGES - 2) * range_bytes
        return client.frames(transport, steps, then if is_short else None)

    ahead = Prefetch(
        fetch_ranges(fetch, epochs, range_bytes),
        nbytes=_nbytes,
        budget_bytes=budget_bytes,
        interrupt=transport.interrupt,
        blocked=blocked,
    )
    return ahead


def fetch_ranges(
    fetch: Callable[[Steps, Steps | None], Sequence[Frame]], epochs: Iterable[Steps], target_bytes: int
) -> Generator[Sequence[Frame], None, None]:
    """Yield the frames of the steps of some epochs in order, in ranges that double from one frame up to `target_bytes`.

    The largest ranges have n steps, and no range goes beyond a multiple of n; strided steps are counted by their stride. So a
    job soon requests the ranges of other jobs, wherever it resumes. A cache between them and the server then has them.

    `fetch(steps, then)` returns the frames of `steps`, or only the first few, but at least one. If it returns all, the next
    call is for `then`; None after the last steps. Raises what `fetch` raises.
    """
    size = limit = largest = 1  # the first batch comes alone, so that the loop starts at once
    wanted: Iterator[Steps | None] = chain((epoch for epoch in epochs if len(epoch)), [None])
    for epoch, after in pairwise(wanted):
        assert epoch
        while epoch:
            steps = epoch[:size]
            rest = epoch[size:] or after
            then = rest and rest[: _range_size(rest, limit, largest)]
            frames = fetch(steps, then)
            yield frames
            epoch = epoch[len(frames) :]
            largest = _rounded(max(1, target_bytes * len(frames) // _nbytes(frames)))
            if len(frames) < len(steps):  # the range is incomplete: begin with a small one again
                limit = min(len(frames), largest)
                size = _range_size(epoch, limit, largest)
            elif then:
                size, limit = len(then), min(2 * limit, largest)


def _range_size(steps: Steps, limit: int, largest: int) -> int:
    """Return the number of steps of the next range: see fetch_ranges."""
    place = steps.numbers[0] // steps.numbers.step
    return min(limit, largest - place % largest)


def _rounded(number: int) -> int:
    """Round down by an eighth at most: frames of different lengths must not change the largest range of each job."""
    spare = max(0, number.bit_length() - 4)
    return number >> spare << spare


def _nbytes(frames: Sequence[Frame]) -> int:
    return sum(frame.nbytes + OBJECT_BYTES for frame in frames)
