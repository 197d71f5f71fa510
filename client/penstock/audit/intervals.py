"""Sets of numbers as half-open intervals, int64 of shape [intervals, 2]; and the positions in an epoch of ranks' steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from penstock.audit.reading import IntArray
from penstock.skip import kept_runs
from penstock.slicing import Slicing

NONE: IntArray = np.empty((0, 2), np.int64)
_RUNS_AT_ONCE = 1 << 15
_CELLS_AT_ONCE = 1 << 26  # a run and a rank each
_LOWEST, _HIGHEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def intervals(pairs: Iterable[tuple[int, int]]) -> IntArray:
    """Return the pairs that are not empty as intervals."""
    return np.array([(start, stop) for start, stop in pairs if start < stop], np.int64).reshape(-1, 2)


def size(found: IntArray) -> int:
    """Count the numbers in disjoint intervals."""
    return int((found[:, 1] - found[:, 0]).sum())


def join(parts: Sequence[IntArray]) -> IntArray:
    """Concatenate several arrays of intervals."""
    return np.concatenate([NONE, *parts])


def runs_of(numbers: IntArray) -> IntArray:
    """Return the intervals of sorted numbers; a repeated number begins another interval."""
    if not len(numbers):
        return NONE
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return np.stack([numbers[np.append(0, breaks)], numbers[np.append(breaks, len(numbers)) - 1] + 1], axis=1)


def clip(found: IntArray, start: int, stop: int) -> IntArray:
    """Return the parts of the intervals in [start, stop)."""
    return _not_empty(np.clip(found, start, stop))


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


def _not_empty(found: IntArray) -> IntArray:
    """Return the intervals that are not empty."""
    kept: IntArray = found[found[:, 0] < found[:, 1]]
    return kept


def positions_of(slicing: Slicing, runs: Mapping[int, IntArray]) -> IntArray:
    """Return the positions in the epoch of the steps of some ranks, as intervals.

    `runs` holds the steps of each rank, sorted and disjoint intervals. The samples from the epoch's start that fill the last
    step under drop_last=false are left out. Steps that all ranks have are one interval, others one or more a step.
    """
    return _not_empty(_unskipped(slicing, join([_samples(slicing, *group) for group in _groups(slicing.world_size, runs)])))


def _groups(world_size: int, runs: Mapping[int, IntArray]) -> Iterator[tuple[IntArray, IntArray, IntArray, IntArray]]:
    """Yield neighbouring ranks that have steps in common, as arrays of first step, stop, first rank, last rank + 1."""
    borders, _ = np.unique(join([*runs.values()]), return_inverse=True)  # else numpy hashes: a hundred times slower here
    inline = max(1, min(_RUNS_AT_ONCE, _CELLS_AT_ONCE // (world_size + 2)))
    for at in range(0, len(borders) - 1, inline):
        # At the last border, one more than there are stops, no rank has a step.
        starts, stops = borders[at : at + inline], borders[at + 1 : at + 1 + inline]
        has = np.zeros((len(starts), world_size + 2), np.int8)  # one column for no rank on each side
        for rank, run in runs.items():
            if len(run):
                found = np.searchsorted(run[:, 0], starts, side="right") - 1
                has[:, rank + 1] = (found >= 0) & (starts < run[found, 1])
        changes = np.diff(has, axis=1)
        which, ranks = np.nonzero(changes == 1)
        _, ends = np.nonzero(changes == -1)
        yield starts[which], stops[which], ranks, ends


def _samples(slicing: Slicing, starts: IntArray, stops: IntArray, ranks: IntArray, ends: IntArray) -> IntArray:
    """Return the samples of such groups as intervals, counted from the epoch's first."""
    is_all = ends - ranks == slicing.world_size
    whole = np.stack([starts[is_all], stops[is_all]], axis=1) * slicing.samples_per_step
    sizes = (stops - starts)[~is_all]
    steps = _concatenated_ranges(starts[~is_all], sizes)
    edges = np.stack([ranks[~is_all], ends[~is_all]], axis=1) * slicing.batch_size
    parts = (steps * slicing.samples_per_step)[:, None] + np.repeat(edges, sizes, axis=0)
    samples: IntArray = np.minimum(np.concatenate([whole, parts]) + slicing.num_left_out, slicing.num_kept)
    return samples


def _unskipped(slicing: Slicing, samples: IntArray) -> IntArray:
    """Return the positions of samples; an interval that contains skipped positions is split."""
    if not slicing.skipped:
        return samples
    starts, stops = np.array(kept_runs(slicing.skipped, slicing.num_samples), np.int64).reshape(-1, 2).T
    firsts = np.cumsum(stops - starts) - (stops - starts)
    low, high = (np.searchsorted(firsts, ends, side="right") - 1 for ends in (samples[:, 0], samples[:, 1] - 1))
    counts = high - low + 1
    which = np.repeat(np.arange(len(samples)), counts)
    run = _concatenated_ranges(low, counts)
    shift = starts[run] - firsts[run]
    return np.stack(
        [np.maximum(samples[which, 0] + shift, starts[run]), np.minimum(samples[which, 1] + shift, stops[run])], axis=1
    )


def _concatenated_ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """[starts[0], starts[0] + 1, ..., starts[1], starts[1] + 1, ...], counts[i] numbers from each starts[i]."""
    return np.arange(counts.sum()) + np.repeat(starts - np.cumsum(counts) + counts, counts)
