"""Parallel map: threads make the results, in the order of the items."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from itertools import islice
from typing import TypeVar

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


def map_ordered(threads: Executor, num_threads: int, make: Callable[[_Item], _Made], items: Iterable[_Item]) -> Iterator[_Made]:
    """Yield `make(item)` in order; `num_threads` calls run at a time, and one more waits. Raises what `make` raises.

    It takes items only shortly before their turn, so `items` may be endless.
    """
    ahead = deque[Future[_Made]]()
    rest = iter(items)
    try:
        while True:
            ahead += (threads.submit(make, item) for item in islice(rest, num_threads + 1 - len(ahead)))
            if not ahead:
                return
            yield ahead.popleft().result()
    finally:
        for future in ahead:
            future.cancel()
