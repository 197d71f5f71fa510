"""Integer arrays, and the runs of elements in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_FEW = 4  # maximum ratio of the range of values to their number for a table


def starts_of(counts: IntArray) -> IntArray:
    """Returns [0, c0, c0 + c1, ...]: the start of each run of `counts`, then the total."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def concatenated_ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """Returns [starts[0], starts[0] + 1, ..., starts[1], starts[1] + 1, ...], counts[i] numbers from each starts[i]."""
    return np.arange(counts.sum()) + np.repeat(starts - starts_of(counts)[:-1], counts)


def numbered(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Returns the group of each element, and its number in the group, for groups of `counts` elements."""
    groups = np.repeat(np.arange(len(counts)), counts)
    return groups, np.arange(len(groups)) - np.repeat(np.cumsum(counts) - counts, counts)


def find(starts: IntArray, slots: IntArray) -> IntArray:
    """Returns the run of each slot; empty runs have no slots."""
    return np.searchsorted(starts, slots, side="right") - 1


def find_one(starts: IntArray, slot: int) -> int:
    """Returns the run of one slot."""
    return int(np.searchsorted(starts, slot, side="right")) - 1


def by_value(values: IntArray) -> Iterator[tuple[int, IntArray]]:
    """Yields each distinct value and its indices, in the time of one sort."""
    order = np.argsort(values, kind="stable")
    for value, own in equal_runs(values[order]):
        yield value, order[own]


def equal_runs(values: IntArray) -> Iterator[tuple[int, slice]]:
    """Yields each run of equal values: the value, and the slice of the run."""
    starts = np.flatnonzero(begins_run(values))
    offsets = pairwise([*starts.tolist(), len(values)])
    for value, (start, stop) in zip(values[starts].tolist(), offsets, strict=True):
        yield value, slice(start, stop)


def distinct(values: IntArray) -> IntArray:
    """Returns the distinct values, ascending. np.unique takes 10 times as long, 100 times for evenly spaced values."""
    if len(values) and values.min() >= 0 and values.max() < _FEW * len(values):
        return np.flatnonzero(np.bincount(values))  # a tenth of the time of a sort
    ascending = np.sort(values)
    return ascending[begins_run(ascending)]


def places_in(ascending: IntArray, values: IntArray) -> IntArray:
    """Returns the index of each value in `ascending`, which contains all of them."""
    first, last = int(ascending[0]), int(ascending[-1])
    if last - first >= _FEW * len(values):
        return np.searchsorted(ascending, values)
    places = np.zeros(last - first + 1, np.int64)
    places[ascending - first] = np.arange(len(ascending))
    found: IntArray = places[values - first]  # a fifth of the time of a search
    return found


def in_order(tables: Sequence[tuple[npt.NDArray[Any], ...]]) -> list[npt.NDArray[Any]]:
    """Concatenates the columns of all tables, sorted by the first column; the sort is stable."""
    columns = [np.concatenate(column) for column in zip(*tables, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return [column[order] for column in columns]


def begins_run(values: IntArray) -> npt.NDArray[np.bool_]:
    """Returns whether each value differs from its predecessor; True for the first."""
    is_new = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_new[1:])
    return is_new
