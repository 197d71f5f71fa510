"""Statistics of running and ended iterators."""

from __future__ import annotations

import pickle

import pytest

from penstock.stats import Stats, StatsAggregator


class Counted:
    """An iterator that gave 3 batches."""

    is_left = is_closed = False

    def close(self) -> None:
        self.is_closed = True

    def stats(self) -> Stats:
        return Stats(num_batches=3, buffered_bytes=5)


def test_total_counts_an_iterator_once_while_it_runs_and_after_it_ended() -> None:
    stats = StatsAggregator()
    with stats.counting(Counted()), stats.counting(Counted()):
        assert stats.total() == Stats(num_batches=6, buffered_bytes=10)
    assert stats.total() == Stats(num_batches=6)


def test_failed_iterator_is_counted_and_closed() -> None:
    stats, iterator = StatsAggregator(), Counted()
    with pytest.raises(OSError, match="broken"), stats.counting(iterator):
        raise OSError("broken")
    assert stats.total() == Stats(num_batches=3)
    assert iterator.is_closed


def test_copy_has_the_statistics_without_iterators() -> None:
    stats = StatsAggregator()
    with stats.counting(Counted()):
        copy = pickle.loads(pickle.dumps(stats))
    assert copy.total() == Stats(num_batches=3)
