"""Prefetch: a thread makes items ahead of the loop that takes them, within a budget of bytes."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from multiprocessing import current_process
from typing import Generic, TypeVar

from penstock.errors import PenstockError
from penstock.threads import own_thread, signal_of, start

T = TypeVar("T")

_CLOSE_SECONDS = 5.0
_ORPHAN_SECONDS = 2.0  # after which a loader worker that waits looks whether its loader is gone


class Prefetch(Generic[T]):
    """Iterates over the items of `groups`, in their order. A thread makes the groups, and hands each over as a whole.

    `nbytes(group)` is the size of one. At most `budget_bytes` are buffered, beside one group and what is left of the one before
    it. `groups` is closed by its thread. `close` calls `interrupt()`, which makes a `next` of `groups` that is under way fail.

    It belongs to the process that made it: a fork has neither the thread nor, maybe, the lock, which the thread may hold just
    then. There `next` raises PenstockError, and closing does nothing. Once it is closed, `next` raises PenstockError, too.

    So it does in a loader worker whose loader was killed: else the worker would wait for a server, and keep its files locked.
    """

    def __init__(
        self,
        groups: Generator[Sequence[T], None, None],
        *,
        nbytes: Callable[[Sequence[T]], int],
        budget_bytes: int,
        interrupt: Callable[[], None],
    ) -> None:
        self._generator, self._nbytes, self._interrupt = groups, nbytes, interrupt
        self._budget_bytes = budget_bytes
        self._groups: deque[tuple[Sequence[T], int]] = deque()  # each with its size
        self._groups_bytes = 0
        self._hand: deque[T] = deque()  # what the consumer has left of a group
        self._hand_item_bytes = 0.0  # the mean of that group
        self._failure: BaseException | None = None
        self._finished = self._closed = False
        self._process, self._parent = os.getpid(), os.getppid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread = own_thread("fetch", self._run)
        start(self._thread, self._give_up)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if os.getpid() != self._process:
            raise PenstockError(
                f"this iteration began in process {self._process}, and process {os.getpid()} was forked off it: the thread "
                f"that fetches and its connections are there. Begin an iteration of its own in each process."
            )
        while True:
            try:
                return self._hand.popleft()
            except IndexError:  # also if another thread closes it just now
                pass
            self._take()  # not in the handler: what it raises has nothing to do with that error

    @property
    def has_next(self) -> bool:
        """Whether the next item is there, so that nobody waits for it."""
        return bool(self._hand or self._groups)

    @property
    def buffered_bytes(self) -> int:
        """About the size of what is there and not yet consumed."""
        return self._groups_bytes + round(len(self._hand) * self._hand_item_bytes)

    def close(self) -> None:
        """Stops the thread and drops what is buffered. Idempotent."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            self._failure = None  # in its traceback is all of this: what was fetched would wait for the garbage collector
            self._hand.clear()
            self._groups.clear()
            self._groups_bytes = 0
            self._changed.notify_all()
        self._interrupt()
        self._thread.join(_CLOSE_SECONDS)

    def _give_up(self) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def _take(self) -> None:
        """The next group comes to hand."""
        try:
            self._take_once_there()
        except RuntimeError as error:
            raise signal_of(error) or error from None

    def _take_once_there(self) -> None:
        with self._lock:
            while not self._changed.wait_for(lambda: self._groups or self._finished or self._closed, _ORPHAN_SECONDS):
                if current_process().daemon and os.getppid() != self._parent:
                    raise PenstockError("the process whose loader worker this is has ended, and this ends, too.")
            if self._groups:
                group, nbytes = self._groups.popleft()
                self._groups_bytes -= nbytes
                self._hand.extend(group)
                self._hand_item_bytes = nbytes / max(len(group), 1)
                self._changed.notify_all()
                return
            if self._closed:  # another thread did; a StopIteration would pass for the end of the epoch
                raise PenstockError("this iteration was closed, as all are when the interpreter exits: begin another one.")
            if self._failure:
                raise self._failure
        raise StopIteration

    def _run(self) -> None:
        try:
            self._work_ahead()
        except BaseException as error:
            with self._lock:
                if not self._closed:
                    self._failure = error
        finally:
            with self._lock:
                self._finished = True
                self._changed.notify_all()

    def _work_ahead(self) -> None:
        with closing(self._generator):  # or what it holds would stay until all of this is collected
            for group in self._generator:
                with self._lock:
                    if self._closed:
                        return
                    nbytes = self._nbytes(group)
                    self._groups.append((group, nbytes))
                    self._groups_bytes += nbytes
                    self._changed.notify_all()
                    self._changed.wait_for(self._has_room)
                    if self._closed:
                        return

    def _has_room(self) -> bool:
        return self._closed or not self._groups or self.buffered_bytes < self._budget_bytes
