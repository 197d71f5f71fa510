"""Statistics of running and ended iterators."""

from __future__ import annotations

import pickle
from typing import cast
from unittest.mock import create_autospec

import pytest

from penstock.iteration import BatchIterator
from penstock.stats import Stats, StatsAggregator


def counted() -> BatchIterator:
    """Return an iterator that gave 3 batches."""
    iterator = create_autospec(BatchIterator, instance=True, is_left=False)
    iterator.stats.return_value = Stats(num_batches=3, buffered_bytes=5)
    return cast(BatchIterator, iterator)


def test_total_counts_an_iterator_once_while_it_runs_and_after_it_ended() -> None:
    stats = StatsAggregator()
    with stats.counting(counted()), stats.counting(counted()):
        assert stats.total() == Stats(num_batches=6, buffered_bytes=10)
    assert stats.total() == Stats(num_batches=6)


def test_failed_iterator_is_counted_and_closed() -> None:
    stats, iterator = StatsAggregator(), counted()
    with pytest.raises(OSError, match="broken"), stats.counting(iterator):
        raise OSError("broken")
    assert stats.total() == Stats(num_batches=3)
    iterator.close.assert_called_once_with()  # type: ignore[attr-defined]


def test_copy_has_the_statistics_without_iterators() -> None:
    stats = StatsAggregator()
    with stats.counting(counted()):
        copy = pickle.loads(pickle.dumps(stats))
    assert copy.total() == Stats(num_batches=3)
