"""Which positions of an epoch the steps of its ranks are. Pure arithmetic on whole arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from penstock.audit.intervals import join, not_empty
from penstock.audit.reading import IntArray
from penstock.skip import kept_runs
from penstock.slicing import Slicing

_RUNS_AT_ONCE = 1 << 15
_CELLS_AT_ONCE = 1 << 26  # a run and a rank each


def positions_of(slicing: Slicing, runs: Mapping[int, IntArray]) -> IntArray:
    """The intervals [start, stop) of positions that the steps of some ranks are, shape [intervals, 2].

    `runs` are half-open ranges of steps of each rank, shape [runs, 2], sorted and disjoint. What drop_last=false repeats from
    the
    epoch's start is left out. As few intervals as possible where all ranks have a step, else some for each step.
    """
    return not_empty(_unskipped(slicing, join([_samples(slicing, *group) for group in _groups(slicing.world_size, runs)])))


def _groups(world_size: int, runs: Mapping[int, IntArray]) -> Iterator[tuple[IntArray, IntArray, IntArray, IntArray]]:
    """Neighbouring ranks that have steps in common: arrays of step, stop, rank, last rank + 1; half-open."""
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
    """The intervals of samples, counted from the epoch's first, that such groups are."""
    is_all = ends - ranks == slicing.world_size
    whole = np.stack([starts[is_all], stops[is_all]], axis=1) * slicing.samples_per_step
    sizes = (stops - starts)[~is_all]
    steps = _concatenated_ranges(starts[~is_all], sizes)
    edges = np.stack([ranks[~is_all], ends[~is_all]], axis=1) * slicing.batch_size
    parts = (steps * slicing.samples_per_step)[:, None] + np.repeat(edges, sizes, axis=0)
    samples: IntArray = np.minimum(np.concatenate([whole, parts]) + slicing.num_left_out, slicing.num_samples)
    return samples


def _unskipped(slicing: Slicing, samples: IntArray) -> IntArray:
    """Positions of samples: an interval that goes over skipped ones is several."""
    if not slicing.skipped:
        return samples
    starts, stops = np.array(kept_runs(slicing.skipped, slicing.num_positions), np.int64).reshape(-1, 2).T
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
