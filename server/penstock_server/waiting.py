"""Waiting on the event loop for blocks that threads load: many requests at a time, each for dozens of blocks.

A client may limit the wait with `Prefer: wait=2` (RFC 7240). It then gets the progress and repeats the request, and the work
has continued meanwhile.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any

from penstock_server.blocks.on_demand import RowsFuture
from penstock_server.problems import BlocksNotReady

_WAIT = re.compile(r"(?:^|,)\s*wait\s*=\s*\"?([0-9]{1,5})\b")
_KEPT_SECONDS = 5.0  # for the client to repeat the request, which it does at once


def when_all_are_there(futures: Sequence[Future[Any]]) -> asyncio.Event:
    """Returns an event that is set when all futures are done, or one has failed.

    asyncio.wrap_future would create objects for each of dozens of blocks: tens of kilobytes per request, and many requests
    start at once.
    """
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()
    left = count(len(futures) - 1, -1)  # several threads count down; each value is returned only once

    def answered(future: Future[Any]) -> None:
        is_last = next(left) == 0
        if (is_last or future.cancelled() or future.exception()) and not loop.is_closed():
            loop.call_soon_threadsafe(is_over.set)

    for future in futures:
        future.add_done_callback(answered)
    if not futures:
        is_over.set()
    return is_over


def preferred_wait(header: str) -> float | None:
    """Returns the seconds in a `Prefer: wait` header; None means no limit."""
    found = _WAIT.search(header)
    return float(found[1]) if found else None


async def wait_for_all(is_over: asyncio.Event, futures: Sequence[Future[Any]], seconds: float | None, work: str) -> None:
    """Waits for `is_over`, the event of `when_all_are_there` for these futures. `work` names the work in messages.

    Raises BlocksNotReady: after `seconds` without completion.
    """
    began, num_before = time.monotonic(), _num_done(futures)
    try:
        async with asyncio.timeout(seconds):
            await is_over.wait()
    except TimeoutError:
        total, num_done = len(futures), _num_done(futures)
        left = None
        if num_done > num_before:
            left = round((total - num_done) * (time.monotonic() - began) / (num_done - num_before))
        told = f", about {max(1, left)} s left" if left else ""
        text = f"The server is {work}: {num_done} of {total} row groups{told}."
        if num_done == total:
            text = f"The server is tokenizing the rows that it has read from {total} row groups."
        raise BlocksNotReady(text, num_done, total, left) from None


class Unanswered:
    """Blocks of requests that got BlocksNotReady, kept for a while for the repeated request."""

    def __init__(self) -> None:
        self._kept = dict[str, tuple[list[Any], asyncio.TimerHandle, Callable[[], None]]]()

    def keep(self, request: str, asked: list[Any], forget: Callable[[], None]) -> None:
        """Keeps the blocks of a request; calls `forget` if it is not repeated in time."""
        if other := self._kept.pop(request, None):
            other[1].cancel()
            other[2]()
        timer = asyncio.get_running_loop().call_later(_KEPT_SECONDS, self._give_up, request)
        self._kept[request] = asked, timer, forget

    def take(self, request: str) -> list[Any] | None:
        """Removes and returns the blocks kept for a request, if any."""
        if kept := self._kept.pop(request, None):
            kept[1].cancel()
            return kept[0]
        return None

    def _give_up(self, request: str) -> None:
        self._kept.pop(request)[2]()


def _num_done(futures: Sequence[Future[Any]]) -> int:
    return sum(future.done() or (isinstance(future, RowsFuture) and future.is_decoded) for future in futures)
