"""What luck explains: the ranges that statistics of a uniform shuffle stay within, but for one order in a million.

They follow from the size of a sample alone and are on the safe side: Hoeffding, "Probability inequalities for sums of bounded
random variables", JASA 58, 1963, theorem 1, for means; McDiarmid, "On the method of bounded differences", Surveys in
Combinatorics, 1989, for whatever each element moves by a bounded amount.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from penstock_server.order.arrays import IntArray

Range = tuple[float, float]
_NATS = math.log(1e6)


def range_of_mean(mean: float, count: int) -> Range:
    """The range of the mean of `count` values in [0, 1], each expected to be `mean`."""

    def far(value: float) -> bool:
        return _divergence(value, mean) * count > _NATS

    return _border(far, mean, 0.0), _border(far, mean, 1.0)


def range_of_count(expected: float, num_elements: int, each: float) -> Range:
    """The range of a number that is expected to be `expected`, and that each of the elements moves by `each` at most."""
    luck = each * math.sqrt(_NATS / 2 * num_elements)
    return max(0.0, expected - luck), expected + luck


def num_distinct(sizes: IntArray, num_drawn: int) -> float:
    """From how many groups of these sizes `num_drawn` elements are, on average, none of them drawn twice.

    The chance that a group is missed is a product of as many factors as it has elements, or as are drawn; here each is the
    middle one, which is exact to a few parts in a thousand, of groups of a handful to a few in a hundred.
    """
    fewer, more = np.minimum(sizes, num_drawn), np.maximum(sizes, num_drawn)
    missed = np.maximum(1 - more / (sizes.sum() - (fewer - 1) / 2), 0) ** fewer
    return float((1 - missed).sum())


def _border(far: Callable[[float], bool], near: float, end: float) -> float:
    """The value between the two at which `far` begins to hold."""
    if not far(end):
        return end
    for _ in range(60):
        middle = (near + end) / 2
        near, end = (near, middle) if far(middle) else (middle, end)
    return near


def _divergence(value: float, mean: float) -> float:
    """Kullback and Leibler's, in nats, of a coin that shows heads with chance `value` from one of chance `mean`."""
    terms = ((value, mean), (1 - value, 1 - mean))
    return sum(math.inf if not q else p * math.log(p / q) for p, q in terms if p)
