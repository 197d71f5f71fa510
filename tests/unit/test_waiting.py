import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from penstock_server.waiting import when_all_are_there


def answers(num_futures: int) -> list[Future[Any]]:
    return [Future() for _ in range(num_futures)]


def test_it_is_over_when_the_last_block_is_there() -> None:
    async def main() -> None:
        futures = answers(3)
        futures[1].set_result("block")
        is_over = when_all_are_there(futures)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(futures[0].set_result, "block").result()
            await asyncio.sleep(0.01)
            assert not is_over.is_set()
            threads.submit(futures[2].set_result, "block")
            await asyncio.wait_for(is_over.wait(), 10)

    asyncio.run(main())


@pytest.mark.parametrize("num_there", [0, 1])
def test_it_is_over_when_one_has_failed_while_others_are_still_loaded(num_there: int) -> None:
    async def main() -> None:
        futures = answers(3)
        for future in futures[:num_there]:
            future.set_result("block")
        is_over = when_all_are_there(futures)
        futures[2].set_exception(OSError("broken"))
        await asyncio.wait_for(is_over.wait(), 10)

    asyncio.run(main())


def test_it_is_over_where_nothing_is_waited_for_or_all_is_there() -> None:
    async def main() -> None:
        futures = answers(2)
        for future in futures:
            future.set_result("block")
        for some in ([], futures):
            await asyncio.wait_for(when_all_are_there(some).wait(), 10)

    asyncio.run(main())


def test_a_block_that_comes_when_nobody_serves_any_more_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    [future] = answers(1)

    async def main() -> None:
        when_all_are_there([future])

    asyncio.run(main())
    future.set_result("block")
    assert not caplog.records
