"""Side by side: what threads make at the same time, given in the order in which it was asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from itertools import islice
from typing import TypeVar

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


def map_ordered(threads: Executor, num_threads: int, make: Callable[[_Item], _Made], items: Iterable[_Item]) -> Iterator[_Made]:
    """What `make` gives for each item, in turn; `num_threads` are made at a time, and one more waits. Raises what it raises.

    An item is taken when its turn comes near, so items may be as many as they like.
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
