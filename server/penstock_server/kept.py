"""Kept results: the ones used last, within a budget of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """Least recently used cache of at most `most` results of at most `budget_bytes`; `nbytes` measures one. For all threads."""

    def __init__(self, budget_bytes: int, most: int, nbytes: Callable[[T], int]) -> None:
        self._budget_bytes, self._most, self._measure = budget_bytes, most, nbytes
        self._results = OrderedDict[Hashable, tuple[T, int]]()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the result of this key; calls `make` if it is not kept. Raises what `make` raises."""
        with self._lock:
            if found := self._results.get(key):
                self._results.move_to_end(key)
                return found[0]
        made = make()
        num_bytes = self._measure(made)
        with self._lock:
            if key not in self._results:
                self._results[key] = made, num_bytes
                self._num_bytes += num_bytes
            while self._num_bytes > self._budget_bytes or len(self._results) > self._most:
                _, (_, num_bytes) = self._results.popitem(last=False)
                self._num_bytes -= num_bytes
        return made
