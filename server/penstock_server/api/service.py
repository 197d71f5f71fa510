"""State that the requests of one application share: the catalog, a budget of bytes, and threads."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from anyio import CancelScope
from fastapi import Request
from starlette.concurrency import run_in_threadpool

from penstock.text import counted
from penstock_server.blocks.block import Block
from penstock_server.blocks.on_demand import RowsFuture
from penstock_server.blocks.store import Asked
from penstock_server.catalog.catalog import Catalog
from penstock_server.catalog.view import CatalogView
from penstock_server.monitoring.jobs import Jobs
from penstock_server.monitoring.metrics import Metrics
from penstock_server.problems import Busy, Forbidden
from penstock_server.security.tokens import Identity, Scope

_T = TypeVar("_T")
InThread = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]  # calls a function in a thread, and returns its result

_REMEMBERED_EPOCHS = 1000
_KEPT_SECONDS = 5.0  # for the client to repeat the request, which it does at once


class Executors:
    """Threads of one application: two make batches, two make text for people, and others run work that may block.

    Making batches mostly holds the GIL: with forty threads each step waits for all others, and many ranks take a quarter more
    CPU.
    """

    def __init__(self) -> None:
        self._batches = ThreadPoolExecutor(2, thread_name_prefix="penstock-batches")
        self._text = ThreadPoolExecutor(2, thread_name_prefix="penstock-text")
        self._planning = defaultdict[Hashable, asyncio.Lock](asyncio.Lock)  # by epoch
        self._planned = set[Hashable]()

    async def make_batches(self, make: Callable[[], _T]) -> _T:
        """Runs `make`, which makes batches and does not block."""
        return await _run(self._batches, make)

    async def make_text(self, make: Callable[[], _T]) -> _T:
        """Runs `make`, a slow report or the text of many tokens. It takes much more memory than its result."""
        return await _run(self._text, make)

    async def run_blocking(self, make: Callable[[], _T]) -> _T:
        """Runs `make`, which may block."""
        return await run_in_threadpool(make)

    async def make_of_epoch(self, epoch: Hashable, make: Callable[[], _T]) -> _T:
        """Runs `make`, which makes batches of an epoch. The first call plans the epoch, which may take seconds; others wait.

        Otherwise many ranks that start an epoch would take all threads to wait for its plan.
        """
        if epoch not in self._planned:
            if epoch not in self._planning and len(self._planning) >= _REMEMBERED_EPOCHS:
                self._planning.clear()
                self._planned.clear()
            async with self._planning[epoch]:
                if epoch not in self._planned:
                    made = await self.run_blocking(make)
                    self._planned.add(epoch)
                    return made
        return await self.make_batches(make)


async def _run(threads: ThreadPoolExecutor, make: Callable[[], _T]) -> _T:
    """Runs `make` in one of these threads. A cancelled call still waits for a `make` that has started."""
    made = threads.submit(copy_context().run, make)  # the context has the id of the request
    try:
        return await asyncio.wrap_future(made)
    except asyncio.CancelledError:
        if not made.cancelled():
            with CancelScope(shield=True), suppress(Exception):  # no caller is left for its error
                await asyncio.wrap_future(made)
        raise


class Requested:
    """Requested blocks of a chunk: each is a block, or a future of one until `forget` releases it."""

    def __init__(self, blocks: Sequence[Asked]) -> None:
        self._blocks = blocks
        self.futures = [block for block in blocks if isinstance(block, Future)]

    @property
    def num_done(self) -> int:
        """Number of futures whose block, or its rows, are read."""
        return sum(future.done() or (isinstance(future, RowsFuture) and future.decoded is not None) for future in self.futures)

    def when_done(self) -> asyncio.Event:
        """Returns an event that is set when all blocks are loaded, or one has failed.

        asyncio.wrap_future would create objects for each of dozens of blocks: tens of kilobytes per request, and many requests
        start at once.
        """
        loop, is_over = asyncio.get_running_loop(), asyncio.Event()
        left = count(len(self.futures) - 1, -1)  # several threads count down; each value is returned only once

        def done(future: Future[Block]) -> None:
            is_last = next(left) == 0
            if (is_last or future.cancelled() or future.exception()) and not loop.is_closed():
                loop.call_soon_threadsafe(is_over.set)

        for future in self.futures:
            future.add_done_callback(done)
        if not self.futures:
            is_over.set()
        return is_over

    def result(self) -> list[Block]:
        """Returns the loaded blocks. Raises what loading one raised, also while others are still loading."""
        for future in self.futures:
            if future.done() and (error := future.exception()):
                raise error.with_traceback(None)  # all waiters raise this instance, and each would extend its traceback
        return [block.result() if isinstance(block, Future) else block for block in self._blocks]

    def forget(self) -> None:
        """Cancels the futures of rows. No other request waits for them."""
        for future in self.futures:
            if isinstance(future, RowsFuture):
                future.cancel()


class KeptForRetry:
    """Blocks of requests that got BlocksNotReady, kept for a while for the repeated request."""

    def __init__(self) -> None:
        self._kept = dict[str, tuple[Requested, asyncio.TimerHandle]]()

    def keep(self, etag: str, requested: Requested) -> None:
        """Keeps the blocks of a request; forgets them if it is not repeated in time."""
        if another := self.take(etag):  # two clients of one batch
            another.forget()
        timer = asyncio.get_running_loop().call_later(_KEPT_SECONDS, self._give_up, etag)
        self._kept[etag] = requested, timer

    def take(self, etag: str) -> Requested | None:
        """Removes and returns the blocks kept for a request, if any."""
        requested, timer = self._kept.pop(etag, (None, None))
        if timer:
            timer.cancel()
        return requested

    def _give_up(self, etag: str) -> None:
        self._kept.pop(etag)[0].forget()


@dataclass(slots=True)
class Service:
    """One catalog, one budget of bytes in flight, and the state of requests.

    A server that is draining will stop, and tells clients to leave.
    """

    catalog: Catalog
    in_flight: InFlight
    jobs: Jobs = field(default_factory=Jobs)
    executors: Executors = field(default_factory=Executors)
    kept_for_retry: KeptForRetry = field(default_factory=KeptForRetry)
    refreshing: asyncio.Lock = field(default_factory=asyncio.Lock)  # async, so that waiters take no thread
    is_draining: bool = False

    @property
    def metrics(self) -> Metrics:
        """The metrics of this process."""
        return self.catalog.store.metrics


def service_of(request: Request) -> Service:
    """Returns the service of a request's application."""
    service: Service = request.app.state.service
    return service


def identity_of(request: Request) -> Identity:
    """Returns who sent a request. The layer in gate.py has set it."""
    identity: Identity = request.scope["identity"]
    return identity


def catalog_of(request: Request) -> CatalogView:
    """Returns the datasets that the caller may see."""
    return service_of(request).catalog.seen_by(identity_of(request))


def require_scope(request: Request, *scopes: Scope) -> None:
    """Raises Forbidden: the scope of the caller is not one of these."""
    identity = identity_of(request)
    if identity.scope not in scopes:
        allowed = " or ".join(scopes)
        raise Forbidden(f"The token {identity.name} has the scope {identity.scope}; this needs {allowed}.")


class InFlight:
    """Budget of one process, shared by all of its threads."""

    def __init__(self, budget_bytes: int) -> None:
        self.lock = threading.Lock()
        self.budget_bytes = budget_bytes
        self.reserved_bytes = 0
        self.num_responses = 0

    def admit(self, num_chunks: int, chunk_bytes: int) -> Reservation:
        """Returns a reservation for a response with `num_chunks` chunks in memory; it takes no bytes yet.

        Raises Busy: the budget has no room for it now.
        """
        reservation = Reservation(self, num_chunks, chunk_bytes)
        self.check(reservation.nbytes)
        return reservation

    def check(self, nbytes: int) -> None:
        """Raises Busy: the budget has no room for `nbytes`. An idle process has room for any number."""
        if self.num_responses and self.reserved_bytes + nbytes > self.budget_bytes:
            raise Busy(
                f"{counted(self.num_responses, 'response')} in flight take {self.reserved_bytes:,} bytes, this one needs "
                f"{nbytes:,}, and the budget is {self.budget_bytes:,}. Retry in a second. If this lasts, clients read "
                f"more slowly than the server sends: raise --inflight-bytes, add a server, or request fewer steps at a time."
            )


class Reservation:
    """Bytes of one response; `nbytes` is an estimate until its first chunk is measured."""

    def __init__(self, in_flight: InFlight, num_chunks: int, chunk_bytes: int) -> None:
        self.nbytes = num_chunks * chunk_bytes
        self._in_flight, self._num_chunks = in_flight, num_chunks
        self._is_taken = self._is_measured = False

    def take(self) -> None:
        """Takes the bytes if they are not taken yet. Raises Busy: the budget has no more room for them."""
        with self._in_flight.lock:
            if not self._is_taken:
                self._in_flight.check(self.nbytes)
                self._in_flight.reserved_bytes += self.nbytes
                self._in_flight.num_responses += 1
                self._is_taken = True

    def measured(self, chunk_bytes: int) -> None:
        """Counts `chunk_bytes` per chunk: the first replaces the estimate; a larger one counts even beyond the budget."""
        with self._in_flight.lock:
            more = self._num_chunks * chunk_bytes - self.nbytes
            if more > 0 or not self._is_measured:
                self.nbytes += more
                self._in_flight.reserved_bytes += more
            self._is_measured = True

    def release(self) -> None:
        """Returns the bytes to the budget. Idempotent."""
        with self._in_flight.lock:
            if self._is_taken:
                self._in_flight.reserved_bytes -= self.nbytes
                self._in_flight.num_responses -= 1
                self._is_taken = False
