"""Prefetch: a thread that produces items ahead of the loop, within a budget of bytes."""

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
_ORPHAN_SECONDS = 2.0  # between checks of a waiting loader worker for its parent process


class Prefetch(Generic[T]):
    """Iterator over the items of `groups`, in order. A thread produces the groups, and passes each on as a whole.

    `nbytes(group)` is the size of a group. The buffer holds at most `budget_bytes`, plus one group and the rest of the one
    before it. The thread closes `groups`. `close` calls `interrupt()`, which makes a running `next(groups)` fail.

    It works only in the process that created it: a fork does not have the thread, and perhaps inherits a lock that the thread
    held. In a fork `next` raises PenstockError, and `close` does nothing. After `close`, `next` raises PenstockError, too.

    `next` also raises PenstockError in a loader worker whose parent was killed: otherwise the worker would wait for a server,
    and keep its files locked.
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
        self._groups: deque[tuple[Sequence[T], int]] = deque()  # each with its bytes
        self._groups_bytes = 0
        self._hand: deque[T] = deque()  # the rest of the consumer's current group
        self._hand_item_bytes = 0.0  # mean of that group
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
            except IndexError:  # also if another thread closes it concurrently
                pass
            self._take()  # outside the handler: its errors must not have the IndexError as their context

    @property
    def has_next(self) -> bool:
        """Whether the next item is ready, so that `next` does not block."""
        return bool(self._hand or self._groups)

    @property
    def buffered_bytes(self) -> int:
        """Approximate bytes that are buffered and not yet consumed."""
        return self._groups_bytes + round(len(self._hand) * self._hand_item_bytes)

    def close(self) -> None:
        """Stop the thread and drop the buffer. Idempotent."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            self._failure = None  # its traceback refers to this object: the cycle would keep fetched data in memory
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
        """Take the next group."""
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
            if self._closed:  # by another thread; a StopIteration would pass for the end of the epoch
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
        with closing(self._generator):  # otherwise its resources would stay until this object is collected
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
