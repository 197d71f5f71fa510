"""The tally: the figures of all iterations of a dataset in this process, those under way included."""

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
    """Counts the feeds of iterations, and what those that have ended came to. What is pickled or copied has no feeds.

    Both are one tuple, replaced as a whole: else another thread that asks while a feed ends might count it twice or not at all.
    """

    def __init__(self) -> None:
        self._counted: _Counted = (Stats(), ())
        self._lock = threading.RLock()

    @contextmanager
    def counting(self, make: Callable[[], BatchIterator]) -> Iterator[BatchIterator]:
        """Makes a feed and counts it, and closes it at the end."""
        feed: BatchIterator | None = None
        try:
            own = feed = make()
            self._replace(lambda ended, feeds: (ended, (*feeds, own)))
            yield feed
        finally:
            if feed and not feed.is_left:  # else modules may be taken apart, and what is called here is gone
                try:
                    feed.close()
                except BaseException:  # Ctrl-C once more
                    feed.close_aside()
                    raise
                finally:
                    self._end(feed)

    def total(self) -> Stats:
        """The figures of all together, now."""
        ended, feeds = self._counted
        return sum((feed.stats() for feed in feeds), ended)

    def _end(self, feed: BatchIterator) -> None:
        came_to = replace(feed.stats(), buffered_bytes=0)  # another thread may still be closing it
        self._replace(lambda ended, feeds: (ended + came_to, tuple(other for other in feeds if other is not feed)))

    def _replace(self, change: Callable[[Stats, tuple[BatchIterator, ...]], _Counted]) -> None:
        while True:
            before = self._counted
            after = change(*before)
            with self._lock:  # the garbage collector may end other feeds of this tally at any step, also behind this one
                if self._counted is before:
                    self._counted = after
                    return

    def __getstate__(self) -> dict[str, Any]:
        """The figures alone: the threads of a feed stay in this process."""
        return {"_counted": (replace(self.total(), buffered_bytes=0), ())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """With a lock of its own."""
        self.__dict__ |= {**state, "_lock": threading.RLock()}
