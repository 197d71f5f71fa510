"""Ranges that statistics of an exact uniform shuffle leave in at most one order of a million.

They depend on the number of samples alone and are conservative. Means: Hoeffding, "Probability inequalities for sums of bounded
random variables", JASA 58, 1963, theorem 1. Counts: McDiarmid, "On the method of bounded differences", Surveys in
Combinatorics, 1989.
"""

from __future__ import annotations

import math

import numpy as np

from penstock_server.order.arrays import IntArray

Range = tuple[float, float]
_NATS = math.log(1e6)
_BISECTIONS = 60


def range_of_mean(mean: float, count: int) -> Range:
    """Return the range of the mean of `count` values in [0, 1], each with the expectation `mean`."""

    def is_likely(value: float) -> bool:
        # The Kullback-Leibler divergence of Bernoulli(value) from Bernoulli(mean).
        terms = ((value, mean), (1 - value, 1 - mean))
        return sum(math.inf if not q else p * math.log(p / q) for p, q in terms if p) * count <= _NATS

    def last_likely(end: float) -> float:
        likely, unlikely = (end, end) if is_likely(end) else (mean, end)
        for _ in range(_BISECTIONS):
            middle = (likely + unlikely) / 2
            likely, unlikely = (middle, unlikely) if is_likely(middle) else (likely, middle)
        return likely

    return last_likely(0.0), last_likely(1.0)


def range_of_count(expected: float, num_elements: int, each: float) -> Range:
    """Return the range of a statistic that each element changes by at most `each`."""
    deviation = each * math.sqrt(_NATS / 2 * num_elements)
    return max(0.0, expected - deviation), expected + deviation


def num_distinct(sizes: IntArray, num_drawn: int) -> float:
    """Return the expected number of groups, of these sizes, among `num_drawn` elements drawn without replacement.

    The chance of missing a group is a product with a factor per element of the group, or per drawn element. The middle factor
    stands for each: exact to a few thousandths, for groups of a handful to a few hundredths.
    """
    fewer, more = np.minimum(sizes, num_drawn), np.maximum(sizes, num_drawn)
    missed = np.maximum(1 - more / (sizes.sum() - (fewer - 1) / 2), 0) ** fewer
    return float((1 - missed).sum())
