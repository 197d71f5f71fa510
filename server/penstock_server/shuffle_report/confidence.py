"""Confidence ranges: statistics of a uniform shuffle stay within them, except for one order in a million.

They depend on the sample size alone and are conservative: Hoeffding, "Probability inequalities for sums of bounded
random variables", JASA 58, 1963, theorem 1, for means; McDiarmid, "On the method of bounded differences", Surveys in
Combinatorics, 1989, for statistics that each element changes by a bounded amount.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from penstock_server.order.arrays import IntArray

Range = tuple[float, float]
_NATS = math.log(1e6)


def range_of_mean(mean: float, count: int) -> Range:
    """Return the range of the mean of `count` values in [0, 1], each with the expectation `mean`."""

    def far(value: float) -> bool:
        return _divergence(value, mean) * count > _NATS

    return _border(far, mean, 0.0), _border(far, mean, 1.0)


def range_of_count(expected: float, num_elements: int, each: float) -> Range:
    """Return the range of a statistic with expectation `expected` that each element changes by at most `each`."""
    luck = each * math.sqrt(_NATS / 2 * num_elements)
    return max(0.0, expected - luck), expected + luck


def num_distinct(sizes: IntArray, num_drawn: int) -> float:
    """Return the expected number of distinct groups of these sizes among `num_drawn` elements, drawn without replacement.

    The chance of missing a group is a product with a factor per element of the group, or per drawn element. The middle factor
    stands for each: exact to a few parts in a thousand, for groups of a handful to a few in a hundred.
    """
    fewer, more = np.minimum(sizes, num_drawn), np.maximum(sizes, num_drawn)
    missed = np.maximum(1 - more / (sizes.sum() - (fewer - 1) / 2), 0) ** fewer
    return float((1 - missed).sum())


def _border(far: Callable[[float], bool], near: float, end: float) -> float:
    """Find the value between `near` and `end` where `far` becomes true, by bisection."""
    if not far(end):
        return end
    for _ in range(60):
        middle = (near + end) / 2
        near, end = (near, middle) if far(middle) else (middle, end)
    return near


def _divergence(value: float, mean: float) -> float:
    """Return the Kullback-Leibler divergence, in nats, of Bernoulli(value) from Bernoulli(mean)."""
    terms = ((value, mean), (1 - value, 1 - mean))
    return sum(math.inf if not q else p * math.log(p / q) for p, q in terms if p)
