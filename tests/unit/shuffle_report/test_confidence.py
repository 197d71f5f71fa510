"""Ranges of confidence hold and are narrow: against exact tails, and against counting."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.shuffle_report.confidence import num_distinct, range_of_count, range_of_mean


def tail(num: int, chance: float, low: float, high: float) -> float:
    """Returns the chance that `num` throws show heads fewer than low * num or more than high * num times."""
    outside = [k for k in range(num + 1) if not low * num - 1e-9 <= k <= high * num + 1e-9]
    return math.fsum(math.comb(num, k) * chance**k * (1 - chance) ** (num - k) for k in outside)


@pytest.mark.parametrize("num", [1, 7, 60, 500])
@pytest.mark.parametrize("chance", [0.001, 0.01, 0.3, 0.5, 0.95])
def test_range_of_mean_is_left_less_than_twice_in_a_million(num: int, chance: float) -> None:
    low, high = range_of_mean(chance, num)
    assert low <= chance <= high
    assert tail(num, chance, low, high) <= 2e-6


def test_range_of_mean_is_narrow() -> None:
    low, high = range_of_mean(0.5, 500)
    assert tail(500, 0.5, low + 0.02, high - 0.02) > 2e-6


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_range_of_mean_is_a_point_when_the_mean_is_certain(mean: float) -> None:
    assert range_of_mean(mean, 5) == (mean, mean)


def test_range_of_count_holds_distinct_groups() -> None:
    random = np.random.default_rng(0)
    drawn = [len(np.unique(random.integers(0, 40, 30))) for _ in range(2000)]
    low, high = range_of_count(float(np.mean(drawn)), 30, 1)
    assert low < min(drawn)
    assert max(drawn) < high


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any), st.data())
def test_num_distinct_is_the_mean_over_all_draws(sizes: list[int], data: st.DataObject) -> None:
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    num_drawn = data.draw(st.integers(0, len(groups)))
    draws = [len({groups[i] for i in draw}) for draw in combinations(range(len(groups)), num_drawn)]
    assert num_distinct(np.array(sizes), num_drawn) == pytest.approx(np.mean(draws), rel=0.03, abs=0.01)
