"""Two threads make batches, two make text, and one request plans an epoch while others of the epoch wait."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Coroutine
from contextvars import copy_context
from functools import partial
from typing import Any

import pytest
from anyio import CancelScope

from penstock_server.api import service
from penstock_server.api.admission import current_caller
from penstock_server.api.service import Executors


class Work:
    """Work that waits until it may end, and notes the threads that run it."""

    def __init__(self) -> None:
        self.may_end, self.begun = threading.Event(), threading.Semaphore(0)
        self.made, self.threads = list[int](), list[str]()

    def make(self, number: int = 0) -> int:
        self.threads.append(threading.current_thread().name)
        self.begun.release()
        assert self.may_end.wait(30)
        self.made.append(number)
        return number

    def fail(self) -> None:
        self.make()
        raise ValueError("no such epoch")

    async def wait_until_begun(self, count: int = 1) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(self.begun.acquire, timeout=30)


def test_cancelled_call_waits_for_work_that_has_begun_and_drops_other_work() -> None:
    work, executors = Work(), Executors()

    async def run() -> None:
        tasks = [asyncio.create_task(executors.make_batches(partial(work.make, number))) for number in range(3)]
        await work.wait_until_begun(2)
        for task in tasks:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[2]
        assert not tasks[0].done()
        assert not tasks[1].done()
        work.may_end.set()
        for task in tasks[:2]:
            with pytest.raises(asyncio.CancelledError):
                await task
        assert sorted(work.made) == [0, 1]

    asyncio.run(run())


def test_call_cancelled_repeatedly_as_by_anyio_waits_for_its_work() -> None:
    work, executors = Work(), Executors()

    async def call(scope: CancelScope) -> None:
        with scope:
            await executors.make_batches(work.make)

    async def run() -> None:
        scope = CancelScope()
        calling = asyncio.create_task(call(scope))
        await work.wait_until_begun()
        scope.cancel()
        for _ in range(99):
            await asyncio.sleep(0)
        assert not calling.done()
        work.may_end.set()
        await calling

    asyncio.run(run())


def test_error_of_a_cancelled_call_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    work, executors = Work(), Executors()

    async def run() -> None:
        calling = asyncio.create_task(executors.make_batches(work.fail))
        await work.wait_until_begun()
        calling.cancel()
        await asyncio.sleep(0)
        work.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await calling

    asyncio.run(run())
    gc.collect()
    assert not caplog.records


def begin(caller: str, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task for a request of this caller."""
    context = copy_context()
    context.run(current_caller.set, caller)
    return asyncio.get_running_loop().create_task(call, context=context)


def test_text_is_made_in_two_threads_and_does_not_delay_batches() -> None:
    work, executors = Work(), Executors()

    async def run() -> None:
        crowd = [begin(f"caller {number}", executors.make_text(work.make)) for number in range(6)]
        await work.wait_until_begun(2)
        await executors.make_batches(lambda: None)
        assert not work.begun.acquire(blocking=False)
        work.may_end.set()
        await asyncio.gather(*crowd)

    asyncio.run(run())


def is_batch_thread(name: str) -> bool:
    return name.startswith("penstock-batches")


def test_caller_makes_one_text_at_a_time_and_callers_take_turns() -> None:
    work, executors = Work(), Executors()

    async def run() -> None:
        crowd = [begin("crowd", executors.make_text(partial(work.make, number))) for number in range(9)]
        await work.wait_until_begun()
        others = [begin(f"other {number}", executors.make_text(partial(work.make, number))) for number in (100, 101)]
        await work.wait_until_begun()
        assert not work.begun.acquire(blocking=False)
        work.may_end.set()
        await asyncio.gather(*crowd, *others)

    asyncio.run(run())
    assert sorted(work.made) == [*range(9), 100, 101]
    assert [number for number in work.made if number < 100] == [*range(9)]
    assert work.made.index(101) <= 3  # after at most the running ones, and one more of the crowd


def test_requests_of_an_epoch_wait_for_the_first_which_plans_it_and_not_for_other_epochs() -> None:
    work, executors = Work(), Executors()

    async def run() -> None:
        crowd = [asyncio.create_task(executors.make_of_epoch("epoch 0", work.make)) for _ in range(50)]
        await work.wait_until_begun()
        other = begin("another caller", executors.make_of_epoch("epoch 1", work.make))
        await work.wait_until_begun()
        work.may_end.set()
        await asyncio.gather(*crowd, other)

    asyncio.run(run())
    assert len(work.threads) == 51
    assert not any(map(is_batch_thread, work.threads[:2]))
    assert all(map(is_batch_thread, work.threads[2:]))


def test_next_request_plans_an_epoch_that_could_not_be_planned() -> None:
    work, executors = Work(), Executors()
    work.may_end.set()

    async def run() -> None:
        crowd = [asyncio.create_task(executors.make_of_epoch("epoch 0", work.fail)) for _ in range(9)]
        assert [type(error) for error in await asyncio.gather(*crowd, return_exceptions=True)] == [ValueError] * 9
        await executors.make_of_epoch("epoch 0", work.make)
        await executors.make_of_epoch("epoch 0", work.make)

    asyncio.run(run())
    assert [is_batch_thread(name) for name in work.threads] == [False] * 10 + [True]


def test_number_of_remembered_epochs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_REMEMBERED_EPOCHS", 2)
    work, executors = Work(), Executors()
    work.may_end.set()

    async def run() -> None:
        for number in (0, 1, 1, 2, 2, 0):
            await executors.make_of_epoch(f"epoch {number}", work.make)

    asyncio.run(run())
    assert [is_batch_thread(name) for name in work.threads] == [False, False, True, False, True, False]
