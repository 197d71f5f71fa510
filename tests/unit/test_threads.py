from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from penstock_server.threads import in_two_threads


def test_who_is_cancelled_stays_until_what_has_begun_is_done_and_what_has_not_is_never_made() -> None:
    may_end, begun, made = threading.Event(), threading.Semaphore(0), list[int]()

    def make(number: int) -> None:
        begun.release()
        assert may_end.wait(30)
        made.append(number)

    async def run() -> None:
        tasks = [asyncio.create_task(in_two_threads(partial(make, number))) for number in range(3)]
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


def test_what_fails_in_a_thread_fails_for_who_asked() -> None:
    def fail() -> None:
        raise ValueError("no such batch")

    with pytest.raises(ValueError, match="no such batch"):
        asyncio.run(in_two_threads(fail))
