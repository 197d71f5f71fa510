"""State that the requests of one application share: the catalog, budgets, and threads."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from anyio import CancelScope
from fastapi import Request
from starlette.concurrency import run_in_threadpool

from penstock.spec import Spec
from penstock_server.api.admission import DistinctLimit, InFlight, current_caller
from penstock_server.blocks.block import Block
from penstock_server.blocks.on_demand import RowsFuture
from penstock_server.blocks.store import Asked
from penstock_server.catalog.catalog import Catalog
from penstock_server.catalog.view import CatalogView
from penstock_server.monitoring.jobs import Jobs
from penstock_server.monitoring.metrics import Metrics
from penstock_server.problems import Forbidden
from penstock_server.security.tokens import Identity, Scope

_T = TypeVar("_T")
InThread = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]  # calls a function in a thread, and returns its result

_REMEMBERED_EPOCHS = 256  # as many as plans are kept: see PLANS_KEPT
MAX_NEW_PACKINGS = 32  # of one caller an hour
MAX_NEW_SPECS = 6000  # of one caller a minute: a job has one
_KEPT_SECONDS = 5.0  # for the client to repeat the request, which it does at once


class FairThreads:
    """Threads that callers share. Waiting callers take turns, and each runs at most `per_caller` calls at a time."""

    def __init__(self, num_threads: int, per_caller: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free, self._per_caller = num_threads, per_caller
        self._lock = threading.Lock()
        self._running = Counter[str]()
        self._waiting = OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]]()  # the next caller first

    def submit(self, caller: str, make: Callable[[], _T]) -> Future[_T]:
        """Returns the future result of `make`. Raises RuntimeError: no thread can be started."""
        with self._lock:
            if not self._num_free or self._running[caller] >= self._per_caller:
                future = Future[_T]()
                self._waiting.setdefault(caller, deque()).append((future, make))
                return future
            self._begin(caller)
        try:
            future = self._threads.submit(self._run, caller, make)
        except RuntimeError:
            self._end(caller)
            raise
        future.add_done_callback(partial(self._end_cancelled, caller))
        return future

    def _run(self, caller: str, make: Callable[[], _T]) -> _T:
        try:
            return make()
        finally:
            self._end(caller)

    def _run_waiting(self, caller: str, future: Future[Any], make: Callable[[], Any]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(make())
        except BaseException as error:
            future.set_exception(error)
            del error, future  # they refer to this frame
        finally:
            self._end(caller)

    def _begin(self, caller: str) -> None:
        self._num_free -= 1
        self._running[caller] += 1

    def _end(self, caller: str) -> None:
        """Ends a call of this caller, and runs the next one that waits."""
        with self._lock:
            self._num_free += 1
            self._running[caller] -= 1
            if not self._running[caller]:
                del self._running[caller]
            following = next((other for other in self._waiting if self._running[other] < self._per_caller), None)
            if following is None:
                return
            future, make = self._waiting[following].popleft()
            if self._waiting[following]:
                self._waiting.move_to_end(following)
            else:
                del self._waiting[following]
            self._begin(following)
        self._threads.submit(self._run_waiting, following, future, make)

    def _end_cancelled(self, caller: str, future: Future[Any]) -> None:
        if future.cancelled():  # before it began
            self._end(caller)


class Executors:
    """Threads of one application. They make batches, plan, make text for people, or run other work that may block.

    Making batches mostly holds the GIL: with forty threads each step waits for all others, and many ranks take a quarter more
    CPU. Plans and reports may take seconds and much memory: each caller makes one at a time.
    """

    def __init__(self) -> None:
        self._batches = FairThreads(2, 2, "penstock-batches")
        self._plans = FairThreads(2, 1, "penstock-plans")
        self._text = FairThreads(2, 1, "penstock-text")
        self._planning = WeakValueDictionary[Hashable, asyncio.Lock]()  # by epoch
        self._planned = OrderedDict[Hashable, None]()

    async def make_batches(self, make: Callable[[], _T]) -> _T:
        """Runs `make`, which makes batches and does not block."""
        return await _run(self._batches, make)

    async def make_text(self, make: Callable[[], _T]) -> _T:
        """Runs `make`, a slow report or the text of many tokens. It takes much more memory than its result."""
        return await _run(self._text, make)

    async def make_plan(self, make: Callable[[], _T]) -> _T:
        """Runs `make`, which plans and may sort the samples of a window."""
        return await _run(self._plans, make)

    async def run_blocking(self, make: Callable[[], _T]) -> _T:
        """Runs `make`, which may block."""
        return await run_in_threadpool(make)

    async def make_of_epoch(
        self, epoch: Hashable, make: Callable[[], _T], before_plan: Callable[[], object] = lambda: None
    ) -> _T:
        """Runs `make`, which makes batches of an epoch. The first call plans the epoch, which may take seconds; others wait.

        Calls `before_plan` before it plans; an exception from it ends the call.

        Without this, ranks that start an epoch together would occupy all threads while they wait for its plan.
        """
        if epoch not in self._planned:
            before_plan()
            planning = self._planning.setdefault(epoch, asyncio.Lock())
            async with planning:
                if epoch not in self._planned:
                    made = await self.make_plan(make)
                    self._planned[epoch] = None
                    if len(self._planned) > _REMEMBERED_EPOCHS:
                        self._planned.popitem(last=False)
                    return made
        self._planned[epoch] = None
        self._planned.move_to_end(epoch)
        return await self.make_batches(make)


async def _run(threads: FairThreads, make: Callable[[], _T]) -> _T:
    """Runs `make` in one of these threads. A cancelled call still waits for a `make` that has started."""
    made = threads.submit(current_caller.get(), partial(copy_context().run, make))  # the context has the id of the request
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
    new_packings: DistinctLimit = field(
        default_factory=lambda: DistinctLimit(MAX_NEW_PACKINGS, 3600.0, "seq_len of packing=best_fit")
    )
    new_specs: DistinctLimit = field(default_factory=lambda: DistinctLimit(MAX_NEW_SPECS, 60.0, "specs"))
    kept_for_retry: KeptForRetry = field(default_factory=KeptForRetry)
    refreshing: asyncio.Lock = field(default_factory=asyncio.Lock)  # async, so that waiters take no thread
    is_draining: bool = False

    def check_new(self, dataset: str, spec: Spec) -> None:
        """Notes a spec that the caller uses. Raises LimitExceeded: it has used too many others recently."""
        caller = current_caller.get()
        self.new_specs.check(caller, (dataset, spec))
        if spec.packing == "best_fit":
            self.new_packings.check(caller, (spec.split, spec.sample_len))  # each is a file

    @property
    def metrics(self) -> Metrics:
        """The metrics of this process."""
        return self.catalog.store.metrics


def service_of(request: Request) -> Service:
    """Returns the service of a request's application."""
    service: Service = request.app.state.service
    return service


def identity_of(request: Request) -> Identity:
    """Returns the identity of the caller, which gate.py has set."""
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
        raise Forbidden(
            f"The token {identity.name} has the scope {identity.scope}, but this needs {allowed}. Use another token."
        )
