"""Statistics of all iterations of a dataset in this process, running ones included."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from penstock.feeding.batch_iterator import BatchIterator
from penstock.stats import Stats

_Counted = tuple[Stats, tuple[BatchIterator, ...]]


class StatsAggregator:
    """Sum of the running iterators' stats and those of ended ones. A pickled or copied aggregator has no iterators.

    Both are in one tuple, replaced as a whole: otherwise a thread that reads while an iterator ends might count it twice, or
    not at all.
    """

    def __init__(self) -> None:
        self._counted: _Counted = (Stats(), ())
        self._lock = threading.RLock()

    @contextmanager
    def counting(self, make: Callable[[], BatchIterator]) -> Iterator[BatchIterator]:
        """Create an iterator, count it, and close it at the end of the block."""
        feed: BatchIterator | None = None
        try:
            own = feed = make()
            self._replace(lambda ended, feeds: (ended, (*feeds, own)))
            yield feed
        finally:
            if feed and not feed.is_left:  # at interpreter exit the functions called here may be gone
                try:
                    feed.close()
                except BaseException:  # Ctrl-C once more
                    feed.close_aside()
                    raise
                finally:
                    self._end(feed)

    def total(self) -> Stats:
        """Return the current statistics of all iterators together."""
        ended, feeds = self._counted
        return sum((feed.stats() for feed in feeds), ended)

    def _end(self, feed: BatchIterator) -> None:
        came_to = replace(feed.stats(), buffered_bytes=0)  # another thread may still be closing it
        self._replace(lambda ended, feeds: (ended + came_to, tuple(other for other in feeds if other is not feed)))

    def _replace(self, change: Callable[[Stats, tuple[BatchIterator, ...]], _Counted]) -> None:
        while True:
            before = self._counted
            after = change(*before)
            with self._lock:  # reentrant: the garbage collector may end other iterators at any bytecode, also inside this block
                if self._counted is before:
                    self._counted = after
                    return

    def __getstate__(self) -> dict[str, Any]:
        """Return only the statistics: the threads of an iterator stay in this process."""
        return {"_counted": (replace(self.total(), buffered_bytes=0), ())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the statistics, with a new lock."""
        self.__dict__ |= {**state, "_lock": threading.RLock()}
