"""Sets of numbers as half-open intervals, int64 of shape [intervals, 2]; and the positions in an epoch of ranks' steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from penstock.audit.reading import IntArray
from penstock.skip import kept_runs
from penstock.slicing import Slicing

NONE: IntArray = np.empty((0, 2), np.int64)
_LOWEST, _HIGHEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def intervals(pairs: Iterable[tuple[int, int]]) -> IntArray:
    """Return the pairs that are not empty as intervals."""
    return clip(np.array([*pairs], np.int64).reshape(-1, 2), _LOWEST, _HIGHEST)


def size(found: IntArray) -> int:
    """Count the numbers in disjoint intervals."""
    return int((found[:, 1] - found[:, 0]).sum())


def join(parts: Sequence[IntArray]) -> IntArray:
    """Concatenate several arrays of intervals."""
    return np.concatenate([NONE, *parts])


def intervals_of(numbers: IntArray) -> IntArray:
    """Return the intervals of sorted numbers; a repeated number begins another interval."""
    if not len(numbers):
        return NONE
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return np.stack([numbers[np.append(0, breaks)], numbers[np.append(breaks, len(numbers)) - 1] + 1], axis=1)


def clip(found: IntArray, start: int, stop: int) -> IntArray:
    """Return the parts of the intervals in [start, stop)."""
    parts: IntArray = np.clip(found, start, stop)
    return parts[parts[:, 0] < parts[:, 1]]


def covered(found: IntArray, times: int = 1) -> IntArray:
    """Return where at least `times` intervals overlap: sorted, disjoint, and merged."""
    borders, where = np.unique(found, return_inverse=True)
    begun = np.zeros(len(borders), np.int64)  # intervals that begin at a border, less those that end there
    np.add.at(begun, where.reshape(-1), np.tile(np.array([1, -1]), len(found)))
    changes = np.diff((np.cumsum(begun) >= times).astype(np.int8), prepend=0)
    return np.stack([borders[changes == 1], borders[changes == -1]], axis=1)


def without(found: IntArray, others: IntArray) -> IntArray:
    """Return the parts of the intervals that are in none of the others; sorted, disjoint."""
    between = np.concatenate([[_LOWEST], covered(others).reshape(-1), [_HIGHEST]]).reshape(-1, 2)
    return covered(join([covered(found), between]), 2)


def positions_of(slicing: Slicing, steps: Mapping[int, IntArray]) -> IntArray:
    """Return the positions in the epoch of the steps of some ranks, as intervals: sorted, disjoint, and merged.

    `steps` holds disjoint intervals of each rank. The samples from the epoch's start that fill the last step under
    drop_last=false are left out.
    """
    starts, stops = [NONE[:, 0]], [NONE[:, 0]]
    last = slicing.world_size - 1
    for rank, own in steps.items():
        # The ranks whose samples lie right before and after this rank's: those of the step before, and of the step after.
        before = steps.get(rank - 1, NONE) if rank else steps.get(last, NONE) + 1
        after = steps.get(rank + 1, NONE) if rank < last else steps.get(0, NONE) - 1
        starts.append(_numbers(without(own, before)) * slicing.samples_per_step + rank * slicing.batch_size)
        stops.append(_numbers(without(own, after)) * slicing.samples_per_step + (rank + 1) * slicing.batch_size)
    samples = np.stack([np.sort(np.concatenate(starts)), np.sort(np.concatenate(stops))], axis=1)
    samples = clip(samples + slicing.num_kept_before_offset, 0, slicing.num_kept)
    if not slicing.skipped:
        return samples
    firsts, ends = np.array(kept_runs(slicing.skipped, slicing.num_samples), np.int64).reshape(-1, 2).T
    num_skipped = firsts - np.cumsum(ends - firsts) + ends - firsts  # before each run of kept positions
    run = np.searchsorted(firsts - num_skipped, samples - [0, 1], side="right") - 1
    return without(samples + num_skipped[run], intervals(slicing.skipped))


def _numbers(found: IntArray) -> IntArray:
    """Return the numbers in intervals."""
    counts = found[:, 1] - found[:, 0]
    numbers: IntArray = np.arange(counts.sum()) + np.repeat(found[:, 0] - np.cumsum(counts) + counts, counts)
    return numbers
