"""The tally: the figures of all iterations of a dataset in this process, those under way included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from penstock.feeding.feed import Feed
from penstock.stats import Stats


class Tally:
    """Counts the feeds of iterations, and what those that have ended came to. What is pickled or copied has no feeds.

    Both are one tuple, replaced as a whole: else another thread that asks while a feed ends might count it twice or not at all.
    """

    def __init__(self) -> None:
        self._counted: tuple[Stats, tuple[Feed, ...]] = (Stats(), ())

    @contextmanager
    def counting(self, feed: Feed) -> Iterator[Feed]:
        """Counts a feed, and closes it at the end."""
        ended, feeds = self._counted
        self._counted = ended, (*feeds, feed)
        try:
            yield feed
        finally:
            if not feed.is_left:  # else modules may be taken apart, and what is called here is gone
                feed.close()
                ended, feeds = self._counted
                own = replace(feed.stats(), buffered_bytes=0)  # another thread may still be closing it
                self._counted = ended + own, tuple(other for other in feeds if other is not feed)

    def total(self) -> Stats:
        """The figures of all together, now."""
        ended, feeds = self._counted
        return sum((feed.stats() for feed in feeds), ended)

    def __getstate__(self) -> dict[str, Any]:
        """The figures alone: the threads of a feed stay in this process."""
        return {"_counted": (replace(self.total(), buffered_bytes=0), ())}
