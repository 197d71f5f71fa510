"""Threads: two threads make batches, and others do all work that may block.

Making batches mostly holds the GIL: with forty threads each step waits for all others, and many ranks take a quarter more CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from anyio import CancelScope
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

_T = TypeVar("_T")
InThread = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]  # calls a function in a thread, and returns its result

_REMEMBERED_EPOCHS = 1000
_batch_threads = ThreadPoolExecutor(2, thread_name_prefix="penstock-batches")  # digests release the lock
_json_threads = ThreadPoolExecutor(2, thread_name_prefix="penstock-json")
_fact_threads = ThreadPoolExecutor(2, thread_name_prefix="penstock-facts")


async def in_batch_threads(make: Callable[[], _T]) -> _T:
    """Runs `make`, which does not block. A cancelled call still waits for a `make` that has started."""
    return await _in(_batch_threads, make)


async def in_json_threads(make: Callable[[], _T]) -> _T:
    """Runs `make`, which takes long, and much more memory than its result: text of many tokens."""
    return await _in(_json_threads, make)


async def while_asked(request: Request, make: Callable[[], _T]) -> _T:
    """Runs `make`, a slow report for people; skips it if the client leaves before it starts.

    Otherwise a client that sends a hundred requests and leaves would block other clients. Raises ClientDisconnect: it has left.
    """
    making = asyncio.create_task(_in(_fact_threads, make))
    leaving = asyncio.create_task(has_left(request.receive))
    try:
        await asyncio.wait({making, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not making.done():
            raise ClientDisconnect
        return making.result()
    finally:
        making.cancel()
        leaving.cancel()


async def has_left(receive: Receive) -> None:
    """Waits until the client of a request disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def in_waiting_threads(make: Callable[[], _T]) -> _T:
    """Runs `make`, which may block."""
    return await run_in_threadpool(make)


async def _in(threads: ThreadPoolExecutor, make: Callable[[], _T]) -> _T:
    made = threads.submit(make)
    try:
        return await asyncio.wrap_future(made)
    except asyncio.CancelledError:
        if not made.cancelled():
            with CancelScope(shield=True), suppress(Exception):  # no caller is left for its error
                await asyncio.wrap_future(made)
        raise


class Epochs:
    """Threads for the batches of epochs. The first request of an epoch plans it, which may take seconds; others wait.

    Otherwise many ranks that start an epoch would plan it many times, or take the threads that others need.
    """

    def __init__(self) -> None:
        self._planned = set[Hashable]()
        self._under_way = dict[Hashable, asyncio.Event]()

    def thread_of(self, epoch: Hashable) -> InThread:
        """Returns a function that runs work for an epoch in a thread. The first successful call plans the epoch."""
        return partial(self._in_thread, epoch)

    async def _in_thread(self, epoch: Hashable, make: Callable[[], _T]) -> _T:
        while is_planned := self._under_way.get(epoch):
            await is_planned.wait()
        if epoch in self._planned:
            return await in_batch_threads(make)
        is_planned = self._under_way[epoch] = asyncio.Event()
        try:
            made = await in_waiting_threads(make)
            if len(self._planned) >= _REMEMBERED_EPOCHS:
                self._planned.clear()
            self._planned.add(epoch)
            return made
        finally:
            del self._under_way[epoch]
            is_planned.set()
