"""Sets of whole numbers as half-open intervals, int64 of shape [intervals, 2]. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from penstock.audit.reading import IntArray

NONE: IntArray = np.empty((0, 2), np.int64)
_LOWEST, _HIGHEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def intervals(pairs: Iterable[tuple[int, int]]) -> IntArray:
    """The intervals of these pairs that are not empty."""
    return np.array([(start, stop) for start, stop in pairs if start < stop], np.int64).reshape(-1, 2)


def size(found: IntArray) -> int:
    """How many numbers disjoint intervals hold."""
    return int((found[:, 1] - found[:, 0]).sum())


def join(parts: Sequence[IntArray]) -> IntArray:
    """All intervals of several arrays."""
    return np.concatenate([NONE, *parts])


def runs_of(numbers: IntArray) -> IntArray:
    """The intervals that sorted numbers make up; a number that comes again begins one anew."""
    if not len(numbers):
        return NONE
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return np.stack([numbers[np.append(0, breaks)], numbers[np.append(breaks, len(numbers)) - 1] + 1], axis=1)


def clip(found: IntArray, start: int, stop: int) -> IntArray:
    """What of the intervals lies in [start, stop)."""
    return not_empty(np.clip(found, start, stop))


def covered(found: IntArray, times: int = 1) -> IntArray:
    """Return where at least `times` intervals overlap: sorted, disjoint, and merged."""
    borders, where = np.unique(found, return_inverse=True)
    begun = np.zeros(len(borders), np.int64)  # intervals that begin at a border, less those that end there
    np.add.at(begun, where.reshape(-1), np.tile(np.array([1, -1]), len(found)))
    changes = np.diff((np.cumsum(begun) >= times).astype(np.int8), prepend=0)
    return np.stack([borders[changes == 1], borders[changes == -1]], axis=1)


def without(found: IntArray, others: IntArray) -> IntArray:
    """What of the intervals none of the others holds; sorted, disjoint."""
    between = np.concatenate([[_LOWEST], covered(others).reshape(-1), [_HIGHEST]]).reshape(-1, 2)
    return covered(join([covered(found), between]), 2)


def not_empty(found: IntArray) -> IntArray:
    """The intervals that hold a number."""
    kept: IntArray = found[found[:, 0] < found[:, 1]]
    return kept
