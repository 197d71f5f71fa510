"""Warm batches are made in two threads, and of a crowd one plans the epoch that it begins."""

from __future__ import annotations

import asyncio
import gc
import threading
from functools import partial
from unittest.mock import Mock

import pytest
from anyio import CancelScope
from starlette.requests import ClientDisconnect

from penstock_server import threads
from penstock_server.threads import Epochs, in_batch_threads, in_json_threads, while_asked


def test_who_is_cancelled_stays_until_what_has_begun_is_done_and_what_has_not_is_never_made() -> None:
    may_end, begun, made = threading.Event(), threading.Semaphore(0), list[int]()

    def make(number: int) -> None:
        begun.release()
        assert may_end.wait(30)
        made.append(number)

    async def run() -> None:
        tasks = [asyncio.create_task(in_batch_threads(partial(make, number))) for number in range(3)]
        for _ in range(2):
            assert await asyncio.to_thread(begun.acquire, timeout=30)
        for task in tasks:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[2]
        assert not tasks[0].done()
        assert not tasks[1].done()
        may_end.set()
        for task in tasks[:2]:
            with pytest.raises(asyncio.CancelledError):
                await task
        assert sorted(made) == [0, 1]

    asyncio.run(run())


def test_what_was_not_begun_when_who_asked_for_it_left_is_never_made() -> None:
    may_end, begun, made = threading.Event(), threading.Semaphore(0), list[int]()

    def make(number: int) -> int:
        begun.release()
        assert may_end.wait(30)
        made.append(number)
        if number == 1:
            raise ZeroDivisionError
        return number

    async def run() -> None:
        leaves, requests = asyncio.Event(), [Mock() for _ in range(4)]
        for number, request in enumerate(requests):
            request.receive = _stays if number < 2 else partial(_leaves, leaves)
        tasks = [asyncio.create_task(while_asked(request, partial(make, n))) for n, request in enumerate(requests)]
        for _ in range(2):
            assert await asyncio.to_thread(begun.acquire, timeout=30)
        leaves.set()
        for task in tasks[2:]:
            with pytest.raises(ClientDisconnect):
                await task
        may_end.set()
        assert await tasks[0] == 0
        with pytest.raises(ZeroDivisionError):
            await tasks[1]
        assert sorted(made) == [0, 1]

    asyncio.run(run())


async def _stays() -> dict[str, str]:
    await asyncio.sleep(30)
    return {"type": "http.disconnect"}


async def _leaves(leaves: asyncio.Event) -> dict[str, str]:
    await leaves.wait()
    return {"type": "http.disconnect"}


def test_who_is_cancelled_again_and_again_as_anyio_does_it_stays_too() -> None:
    may_end, begun = threading.Event(), threading.Event()

    def make() -> None:
        begun.set()
        assert may_end.wait(30)

    async def ask(scope: CancelScope) -> None:
        with scope:
            await in_batch_threads(make)

    async def run() -> None:
        scope = CancelScope()
        asked = asyncio.create_task(ask(scope))
        assert await asyncio.to_thread(begun.wait, 30)
        scope.cancel()
        for _ in range(99):
            await asyncio.sleep(0)
        assert not asked.done()
        may_end.set()
        await asked

    asyncio.run(run())


def test_what_fails_when_nobody_asks_for_it_any_more_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    may_end, begun = threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        assert may_end.wait(30)
        raise ValueError("given up")

    async def run() -> None:
        asked = asyncio.create_task(in_batch_threads(fail))
        assert await asyncio.to_thread(begun.wait, 30)
        asked.cancel()
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(run())
    gc.collect()
    assert not caplog.records


def test_what_fails_in_a_thread_fails_for_who_asked() -> None:
    def fail() -> None:
        raise ValueError("no such batch")

    with pytest.raises(ValueError, match="no such batch"):
        asyncio.run(in_batch_threads(fail))


class Requests:
    """What requests do in threads, whose names are noted: they wait until they may plan, and `fail` fails then."""

    def __init__(self) -> None:
        self.thread_of = Epochs().thread_of
        self.threads = list[str]()
        self.may_plan = threading.Event()

    def make(self) -> None:
        self.threads.append(threading.current_thread().name)
        assert self.may_plan.wait(30)

    def fail(self) -> None:
        self.make()
        raise ValueError("no such epoch")


def test_a_crowd_waits_for_the_first_that_plans_an_epoch_and_others_for_nobody() -> None:
    requests = Requests()

    async def run() -> None:
        crowd = [asyncio.create_task(requests.thread_of("epoch 0")(requests.make)) for _ in range(50)]
        while not requests.threads:
            await asyncio.sleep(0.001)
        other = asyncio.create_task(requests.thread_of("epoch 1")(requests.make))
        while len(requests.threads) < 2:
            await asyncio.sleep(0.001)
        requests.may_plan.set()
        await asyncio.gather(*crowd, other)

    asyncio.run(run())
    assert len(requests.threads) == 51
    assert not any(name.startswith("penstock-batches") for name in requests.threads[:2])
    assert all(name.startswith("penstock-batches") for name in requests.threads[2:])


def test_an_epoch_that_could_not_be_planned_is_planned_by_the_next_of_the_crowd() -> None:
    requests = Requests()

    async def run() -> None:
        crowd = [asyncio.create_task(requests.thread_of("epoch 0")(requests.fail)) for _ in range(9)]
        while not requests.threads:
            await asyncio.sleep(0.001)
        requests.may_plan.set()
        assert [type(answer) for answer in await asyncio.gather(*crowd, return_exceptions=True)] == [ValueError] * 9
        await requests.thread_of("epoch 0")(requests.make)
        await requests.thread_of("epoch 0")(requests.make)

    asyncio.run(run())
    assert not any(name.startswith("penstock-batches") for name in requests.threads[:10])
    assert requests.threads[10].startswith("penstock-batches")


def test_of_very_many_epochs_the_last_are_known_to_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_REMEMBERED_EPOCHS", 2)
    requests = Requests()
    requests.may_plan.set()

    async def run() -> None:
        for number in (0, 1, 1, 2, 2, 0):
            await requests.thread_of(f"epoch {number}")(requests.make)

    asyncio.run(run())
    assert [name.startswith("penstock-batches") for name in requests.threads] == [False, False, True, False, True, False]


def test_text_for_people_is_made_for_two_at_a_time_and_holds_back_no_batch() -> None:
    may_end, begun = threading.Event(), threading.Semaphore(0)

    def make() -> None:
        begun.release()
        assert may_end.wait(30)

    async def run() -> None:
        crowd = [asyncio.create_task(in_json_threads(make)) for _ in range(6)]
        for _ in range(2):
            assert await asyncio.to_thread(begun.acquire, timeout=30)
        await in_batch_threads(lambda: None)
        assert not begun.acquire(blocking=False)
        may_end.set()
        await asyncio.gather(*crowd)

    asyncio.run(run())
