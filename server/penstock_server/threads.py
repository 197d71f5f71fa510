"""Threads: what makes batches runs in a few, and what waits for anything in others.

With forty threads a crowd of requests takes a quarter more CPU: each of them waits for the interpreter's lock at every step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from anyio import CancelScope

_T = TypeVar("_T")
_few = ThreadPoolExecutor(2, thread_name_prefix="penstock-batches")  # two: copying and digests release the lock


async def in_few_threads(make: Callable[[], _T]) -> _T:
    """What `make` gives, which waits for nothing, in one of a few threads. Who is cancelled stays until it is done."""
    made = asyncio.get_running_loop().run_in_executor(_few, make)
    with CancelScope(shield=True):
        await made
    return made.result()
