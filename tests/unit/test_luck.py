"""The ranges that luck explains hold, and are of use; against exact tails, and against counting."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.shuffle_report.confidence import num_distinct, range_of_count, range_of_mean


def tail(num: int, chance: float, low: float, high: float) -> float:
    """The chance that a coin shows heads fewer than low * num or more than high * num times in num throws."""
    outside = [k for k in range(num + 1) if not low * num - 1e-9 <= k <= high * num + 1e-9]
    return math.fsum(math.comb(num, k) * chance**k * (1 - chance) ** (num - k) for k in outside)


@pytest.mark.parametrize("num", [1, 7, 60, 500])
@pytest.mark.parametrize("chance", [0.001, 0.01, 0.3, 0.5, 0.95])
def test_a_mean_leaves_its_range_less_than_twice_in_a_million(num: int, chance: float) -> None:
    low, high = range_of_mean(chance, num)
    assert low <= chance <= high
    assert tail(num, chance, low, high) <= 2e-6


def test_the_range_of_a_mean_is_hardly_wider_than_it_must_be() -> None:
    low, high = range_of_mean(0.5, 500)
    assert tail(500, 0.5, low + 0.02, high - 0.02) > 2e-6


@given(st.floats(0, 1), st.integers(1, 10**6))
def test_more_values_have_a_narrower_range_of_their_mean(mean: float, count: int) -> None:
    low, high = range_of_mean(mean, count)
    closer, nearer = range_of_mean(mean, 4 * count)
    assert 0 <= low <= closer <= mean <= nearer <= high <= 1


def test_what_is_certain_has_no_luck() -> None:
    assert range_of_mean(0.0, 5) == (0.0, 0.0)
    assert range_of_mean(1.0, 5) == (1.0, 1.0)


def test_distinct_groups_stay_in_their_range_of_count() -> None:
    random = np.random.default_rng(0)
    drawn = [len(np.unique(random.integers(0, 40, 30))) for _ in range(2000)]
    low, high = range_of_count(float(np.mean(drawn)), 30, 1)
    assert low < min(drawn)
    assert max(drawn) < high


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any), st.data())
def test_distinct_groups_are_those_of_all_ways_to_draw(sizes: list[int], data: st.DataObject) -> None:
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    num_drawn = data.draw(st.integers(0, len(groups)))
    ways = [len({groups[i] for i in way}) for way in combinations(range(len(groups)), num_drawn)]
    assert num_distinct(np.array(sizes), num_drawn) == pytest.approx(np.mean(ways), rel=0.03, abs=0.01)


@given(st.lists(st.integers(20, 400), min_size=2, max_size=30), st.data())
def test_distinct_groups_of_larger_sizes_are_as_exact_chances_say(sizes: list[int], data: st.DataObject) -> None:
    num_drawn = data.draw(st.integers(1, sum(sizes)))
    exact = sum(1 - math.comb(sum(sizes) - size, num_drawn) / math.comb(sum(sizes), num_drawn) for size in sizes)
    assert num_distinct(np.array(sizes), num_drawn) == pytest.approx(exact, rel=0.005)
