"""Sets of whole numbers as half-open intervals, int64 of shape [intervals, 2]. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from penstock.audit.reading import IntArray

NONE: IntArray = np.empty((0, 2), np.int64)


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
    clipped = np.clip(found, start, stop)
    inside: IntArray = clipped[clipped[:, 0] < clipped[:, 1]]
    return inside


def covered(found: IntArray, times: int = 1) -> IntArray:
    """Where at least so many of the intervals overlap: sorted, disjoint, and as few as possible."""
    borders, where = np.unique(found.reshape(-1), return_inverse=True)
    begun = np.zeros(len(borders), np.int64)  # intervals that begin at a border, less those that end there
    np.add.at(begun, where.reshape(-1), np.tile(np.array([1, -1]), len(found)))
    changes = np.diff((np.cumsum(begun) >= times).astype(np.int8), prepend=0)
    return np.stack([borders[changes == 1], borders[changes == -1]], axis=1)


def without(found: IntArray, others: IntArray) -> IntArray:
    """What of the intervals none of the others holds; sorted, disjoint."""
    inside, outside = covered(found), covered(others)
    borders = np.unique(np.concatenate([inside.reshape(-1), outside.reshape(-1)]))
    kept = _holds(inside, borders) & ~_holds(outside, borders)
    changes = np.diff(kept.astype(np.int8), prepend=0)
    return np.stack([borders[changes == 1], borders[changes == -1]], axis=1)


def _holds(found: IntArray, numbers: IntArray) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which of the numbers lie in sorted, disjoint intervals."""
    if not len(found):
        return np.zeros(len(numbers), np.bool_)
    at = np.searchsorted(found[:, 0], numbers, side="right") - 1
    held: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = (at >= 0) & (numbers < found[at, 1])
    return held
