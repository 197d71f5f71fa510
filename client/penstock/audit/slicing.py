"""Slicing: which samples of an epoch the steps of its ranks are. Pure arithmetic on whole arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from penstock.audit.intervals import join, not_empty
from penstock.audit.reading import IntArray
from penstock.ledger import Begin
from penstock.skip import Ranges, before, behind, kept

_RUNS_AT_ONCE = 1 << 15


@dataclass(frozen=True, slots=True)
class Slicing:
    """How an iteration slices an epoch: sample n = (step * world_size + rank) * batch_size + index of those after `offset`.

    Positions in `skipped`, half-open ranges, are no samples. `num_sequences` is the number of all positions. `tail` decides
    what the last step is and no more: slicings that differ in it are equal.
    """

    batch_size: int
    world_size: int
    offset: int
    skipped: Ranges
    num_sequences: int
    tail: str = field(compare=False)

    @classmethod
    def of(cls, begin: Begin) -> Slicing:
        """That of an iteration."""
        spec = begin.spec
        return cls(spec.batch_size, spec.world_size, spec.offset, spec.skipped(), begin.num_sequences, spec.tail)

    @property
    def per_step(self) -> int:
        """Samples of one step of all ranks."""
        return self.batch_size * self.world_size

    def counts_like(self, other: Slicing) -> bool:
        """Whether each step begins at the same sample in both."""
        return (self.offset, self.per_step, self.skipped) == (other.offset, other.per_step, other.skipped)

    @property
    def num_steps(self) -> int:
        """Steps of the epoch after `offset`; tail=drop leaves the incomplete last one out, tail=wrap fills it."""
        left = self._num_samples - self._first
        return left // self.per_step if self.tail == "drop" else -(-left // self.per_step)

    @property
    def num_repeated(self) -> int:
        """Samples from the epoch's start with which tail=wrap fills the last step."""
        return max(0, self.num_steps * self.per_step - (self._num_samples - self._first)) if self.tail == "wrap" else 0

    def position(self, step: int) -> int:
        """Where a step begins, or the epoch's end."""
        return min(behind(self.skipped, self.offset, step * self.per_step), self.num_sequences)

    def num_steps_before(self, position: int) -> int:
        """How many steps begin before a position."""
        return max(0, -(-(before(self.skipped, position) - self._first) // self.per_step))

    def num_steps_within(self, position: int) -> int:
        """How many steps have all of their samples before a position."""
        return max(0, (before(self.skipped, position) - self._first) // self.per_step)

    def step_of(self, position: int) -> tuple[int, int]:
        """The (step, rank) that shows a position; it must lie after `offset`, and not be skipped."""
        step, within = divmod(before(self.skipped, position) - self._first, self.per_step)
        return step, within // self.batch_size

    def positions(self, runs: Mapping[int, IntArray]) -> IntArray:
        """The intervals [start, stop) of positions that the steps of some ranks are, shape [intervals, 2].

        `runs` are half-open ranges of steps of each rank, shape [runs, 2], sorted and disjoint. What tail=wrap repeats from the
        epoch's start is left out. As few intervals as possible where all ranks have a step, else some for each step.
        """
        return not_empty(self._unskipped(join([self._numbers(*group) for group in self._groups(runs)])))

    @property
    def _num_samples(self) -> int:
        return before(self.skipped, self.num_sequences)

    @property
    def _first(self) -> int:
        return before(self.skipped, min(self.offset, self.num_sequences))

    def _groups(self, runs: Mapping[int, IntArray]) -> Iterator[tuple[IntArray, IntArray, IntArray, IntArray]]:
        """Neighbouring ranks that have steps in common: arrays of step, stop, rank, last rank + 1; half-open."""
        borders, _ = np.unique(join([*runs.values()]), return_inverse=True)  # else numpy hashes: a hundred times slower here
        for at in range(0, len(borders) - 1, _RUNS_AT_ONCE):
            # At the last border, one more than there are stops, no rank has a step.
            starts, stops = borders[at : at + _RUNS_AT_ONCE], borders[at + 1 : at + 1 + _RUNS_AT_ONCE]
            has = np.zeros((len(starts), self.world_size + 2), np.int8)  # one column for no rank on each side
            for rank, run in runs.items():
                if len(run):
                    found = np.searchsorted(run[:, 0], starts, side="right") - 1
                    has[:, rank + 1] = (found >= 0) & (starts < run[found, 1])
            changes = np.diff(has, axis=1)
            which, ranks = np.nonzero(changes == 1)
            _, ends = np.nonzero(changes == -1)
            yield starts[which], stops[which], ranks, ends

    def _numbers(self, starts: IntArray, stops: IntArray, ranks: IntArray, ends: IntArray) -> IntArray:
        """The intervals of samples, counted from the epoch's first, that such groups are."""
        is_all = ends - ranks == self.world_size
        whole = np.stack([starts[is_all], stops[is_all]], axis=1) * self.per_step
        sizes = (stops - starts)[~is_all]
        steps = _concatenated_ranges(starts[~is_all], sizes)
        edges = np.stack([ranks[~is_all], ends[~is_all]], axis=1) * self.batch_size
        parts = (steps * self.per_step)[:, None] + np.repeat(edges, sizes, axis=0)
        numbers: IntArray = np.minimum(np.concatenate([whole, parts]) + self._first, self._num_samples)
        return numbers

    def _unskipped(self, numbers: IntArray) -> IntArray:
        """Positions of samples: an interval that goes over skipped ones is several."""
        if not self.skipped:
            return numbers
        starts, stops = np.array(kept(self.skipped, self.num_sequences), np.int64).reshape(-1, 2).T
        firsts = np.cumsum(stops - starts) - (stops - starts)
        low, high = (np.searchsorted(firsts, ends, side="right") - 1 for ends in (numbers[:, 0], numbers[:, 1] - 1))
        counts = high - low + 1
        which = np.repeat(np.arange(len(numbers)), counts)
        run = _concatenated_ranges(low, counts)
        shift = starts[run] - firsts[run]
        return np.stack(
            [np.maximum(numbers[which, 0] + shift, starts[run]), np.minimum(numbers[which, 1] + shift, stops[run])], axis=1
        )


def _concatenated_ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """[starts[0], starts[0] + 1, ..., starts[1], starts[1] + 1, ...], counts[i] numbers from each starts[i]."""
    return np.arange(counts.sum()) + np.repeat(starts - np.cumsum(counts) + counts, counts)
