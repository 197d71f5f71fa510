"""Least recently used cache."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class LruCache(Generic[T]):
    """Results that were used last, within a budget of bytes; `nbytes` measures one. For all threads.

    most, fewest  how many are kept: at most, and at least whatever their size
    """

    def __init__(self, budget_bytes: int, nbytes: Callable[[T], int], *, most: int | None = None, fewest: int = 0) -> None:
        self._budget_bytes, self._measure, self._most, self._fewest = budget_bytes, nbytes, most, fewest
        self._results = OrderedDict[Hashable, tuple[T, int]]()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> T | None:
        """Returns the result of this key, or None."""
        with self._lock:
            if found := self._results.get(key):
                self._results.move_to_end(key)
                return found[0]
        return None

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the result of this key; calls `make` if it is not cached. Raises what `make` raises."""
        found = self.find(key)
        if found is not None:
            return found
        made = make()
        nbytes = self._measure(made)
        with self._lock:
            if key not in self._results:
                self._results[key] = made, nbytes
                self._num_bytes += nbytes
            while self._is_full():
                _, (_, nbytes) = self._results.popitem(last=False)
                self._num_bytes -= nbytes
        return made

    def _is_full(self) -> bool:
        number = len(self._results)
        return number > self._fewest and (
            self._num_bytes > self._budget_bytes or (self._most is not None and number > self._most)
        )
