from __future__ import annotations

import pickle
from typing import Any

import pytest

from penstock.feeding.tally import Tally
from penstock.stats import Stats


class Counted:
    """A feed of 3 batches; `seen` is what another thread might see when it is asked after it was closed."""

    is_left = False

    def __init__(self, tally: Tally) -> None:
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
    tally = Tally()
    feed: Any = Counted(tally)
    with tally.counting(feed):
        assert tally.total() == Stats(num_batches=3, buffered_bytes=5)
    assert feed.seen == [3]
    assert tally.total() == Stats(num_batches=3)


def test_a_feed_that_fails_counts_too_and_a_copy_has_the_figures_alone() -> None:
    tally = Tally()
    first, second = Counted(tally), Counted(tally)
    with tally.counting(first), pytest.raises(OSError, match="broken"), tally.counting(second):  # type: ignore[arg-type]
        raise OSError("broken")
    assert tally.total() == Stats(num_batches=6)
    with tally.counting(first):  # type: ignore[arg-type]
        assert pickle.loads(pickle.dumps(tally)).total() == Stats(num_batches=9)
