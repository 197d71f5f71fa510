from __future__ import annotations

import pickle
import sys
import threading
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.feeding.stats_aggregator import StatsAggregator
from penstock.stats import Stats


class Counted:
    """A feed of 3 batches; `seen` is what another thread might see when it is asked after it was closed."""

    is_left = False

    def __init__(self, tally: StatsAggregator) -> None:
        self._tally = tally
        self._is_closed = False
        self.seen: list[int] = []

    def stats(self) -> Stats:
        if self._is_closed:
            self._is_closed = False
            self.seen.append(self._tally.total().num_batches)
        return Stats(num_batches=3, buffered_bytes=5)

    def close(self) -> None:
        self._is_closed = True


def test_whoever_looks_while_a_feed_ends_counts_it_once() -> None:
    tally = StatsAggregator()
    feed: Any = Counted(tally)
    with tally.counting(lambda: feed):
        assert tally.total() == Stats(num_batches=3, buffered_bytes=5)
    assert feed.seen == [3]
    assert tally.total() == Stats(num_batches=3)


def test_a_feed_whose_closing_is_interrupted_is_closed_by_another_thread_and_counted() -> None:
    tally = StatsAggregator()
    feed: Any = Mock(is_left=False)
    feed.stats.return_value = Stats(num_batches=3, buffered_bytes=5)
    feed.close.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), tally.counting(lambda: feed):
        pass
    feed.close_aside.assert_called_once_with()
    assert tally.total() == Stats(num_batches=3)


def test_no_figures_are_lost_however_many_threads_begin_and_end_feeds() -> None:
    tally, interval = StatsAggregator(), sys.getswitchinterval()

    def count() -> None:
        for _ in range(200):
            feed: Any = Counted(tally)
            with tally.counting(lambda feed=feed: feed):  # type: ignore[misc]
                pass

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert tally.total() == Stats(num_batches=4 * 200 * 3)


def test_a_feed_that_fails_counts_too_and_a_copy_has_the_figures_alone() -> None:
    tally = StatsAggregator()
    first, second = Counted(tally), Counted(tally)
    with tally.counting(lambda: first), pytest.raises(OSError, match="broken"), tally.counting(lambda: second):  # type: ignore[arg-type, return-value]
        raise OSError("broken")
    assert tally.total() == Stats(num_batches=6)
    with tally.counting(lambda: first):  # type: ignore[arg-type, return-value]
        assert pickle.loads(pickle.dumps(tally)).total() == Stats(num_batches=9)
