"""Threads: batches are made in two, and what may wait for anything is done in others.

Most of the work of making them holds the interpreter's lock: in forty threads each step of it waits for all others, and a crowd
of ranks takes a quarter more CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from anyio import CancelScope

_T = TypeVar("_T")
_two = ThreadPoolExecutor(2, thread_name_prefix="penstock-batches")  # copying and digests release the lock


async def in_two_threads(make: Callable[[], _T]) -> _T:
    """What `make` gives, which waits for nothing. Who is cancelled stays until it is done, if it has begun."""
    made = _two.submit(make)
    try:
        return await asyncio.wrap_future(made)
    except asyncio.CancelledError:
        if not made.cancelled():
            with CancelScope(shield=True):
                await asyncio.wait([asyncio.wrap_future(made)])
        raise
