"""Arrays of whole numbers, and the runs that they make up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_FEW = 4  # times as many different values as there are values


def starts_of(counts: IntArray) -> IntArray:
    """[0, c0, c0 + c1, ...]: where each run of `counts` starts, and at last where all end."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def concatenated_ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """[starts[0], starts[0] + 1, ..., starts[1], starts[1] + 1, ...], counts[i] numbers from each starts[i]."""
    return np.arange(counts.sum()) + np.repeat(starts - starts_of(counts)[:-1], counts)


def numbered(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Element by element of groups of `counts` elements: which group it is of, and its number there."""
    groups = np.repeat(np.arange(len(counts)), counts)
    return groups, np.arange(len(groups)) - np.repeat(np.cumsum(counts) - counts, counts)


def find(starts: IntArray, slots: IntArray) -> IntArray:
    """In which run each slot lies; empty runs hold none."""
    return np.searchsorted(starts, slots, side="right") - 1


def find_one(starts: IntArray, slot: int) -> int:
    """In which run one slot lies."""
    return int(np.searchsorted(starts, slot, side="right")) - 1


def by_value(values: IntArray) -> Iterator[tuple[int, IntArray]]:
    """Each value once, and where it stands; in the time of a sort, however many there are."""
    order = np.argsort(values, kind="stable")
    for value, own in equal_runs(values[order]):
        yield value, order[own]


def equal_runs(values: IntArray) -> Iterator[tuple[int, slice]]:
    """Each run of equal values: the value, and where the run stands."""
    starts = np.flatnonzero(begins_run(values))
    borders = pairwise([*starts.tolist(), len(values)])
    for value, (start, stop) in zip(values[starts].tolist(), borders, strict=True):
        yield value, slice(start, stop)


def distinct(values: IntArray) -> IntArray:
    """Each value once, ascending. np.unique takes ten times as long, and a hundred times where they lie at equal distances."""
    if len(values) and values.min() >= 0 and values.max() < _FEW * len(values):
        return np.flatnonzero(np.bincount(values))  # a tenth of the time of a sort
    ascending = np.sort(values)
    return ascending[begins_run(ascending)]


def places_in(ascending: IntArray, values: IntArray) -> IntArray:
    """Where each value, of which all are there, stands among those that ascend."""
    first, last = int(ascending[0]), int(ascending[-1])
    if last - first >= _FEW * len(values):
        return np.searchsorted(ascending, values)
    places = np.zeros(last - first + 1, np.int64)
    places[ascending - first] = np.arange(len(ascending))
    found: IntArray = places[values - first]  # a fifth of the time of a search
    return found


def in_order(tables: Sequence[tuple[npt.NDArray[Any], ...]]) -> list[npt.NDArray[Any]]:
    """The columns of all tables as one, sorted by the first column; what is equal there keeps its order."""
    columns = [np.concatenate(column) for column in zip(*tables, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return [column[order] for column in columns]


def begins_run(values: IntArray) -> npt.NDArray[np.bool_]:
    """Whether each value differs from the one before it; the first does."""
    is_new = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_new[1:])
    return is_new
