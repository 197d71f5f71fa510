"""Waiting on the event loop for blocks that threads load: many requests at a time, each for dozens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any


def when_all_are_there(futures: Sequence[Future[Any]]) -> asyncio.Event:
    """Is set once all are answered, or one has failed.

    A crowd that begins waits for dozens of blocks each, for all of which asyncio would have objects of its own: tens of
    kilobytes a request.
    """
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()
    left = count(len(futures) - 1, -1)  # to be counted down by several threads: the next of it is nobody else's

    def answered(future: Future[Any]) -> None:
        is_last = next(left) == 0
        if (is_last or future.cancelled() or future.exception()) and not loop.is_closed():
            loop.call_soon_threadsafe(is_over.set)

    for future in futures:
        future.add_done_callback(answered)
    if not futures:
        is_over.set()
    return is_over
