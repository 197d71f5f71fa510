"""Schedule: (step, rank, index) -> epoch position, and back. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from penstock.skip import kept_runs, num_kept_before
from penstock.slicing import Slicing
from penstock.text import counted
from penstock_server.order.arrays import IntArray, find, starts_of
from penstock_server.order.mixture import ENDLESS
from penstock_server.problems import RankOutOfRange, StepOutOfRange


class Schedule(Slicing):
    """Slicing of an epoch into batches and samples, with range checks."""

    def check(self, step: int, rank: int) -> None:
        """Checks that the epoch has the batch.

        Raises StepOutOfRange: step is not in [0, num_steps).
        Raises RankOutOfRange: rank is not in [0, world_size).
        """
        if not 0 <= rank < self.world_size:
            raise RankOutOfRange(
                f"rank {rank} does not exist: world_size is {self.world_size}, so ranks are 0 to {self.world_size - 1}. "
                f"Pass the trainer's world_size, or a rank below it."
            )
        if not 0 <= step < self.num_steps:
            range_of_steps = f", 0 to {self.num_steps - 1}" if self.num_steps else ""
            raise StepOutOfRange(
                f"step {step} does not exist: this epoch has {counted(self.num_steps, 'step')}{range_of_steps}."
                f"{'' if self.num_samples == ENDLESS else ' What follows is step 0 of the next epoch.'}"
            )

    def positions(self, steps: Sequence[int], rank: int) -> IntArray:
        """Returns epoch positions of some batches of a rank, shape [len(steps), batch_size], in [0, num_samples).

        Raises StepOutOfRange, RankOutOfRange: see check.
        """
        self.check(min(steps), rank)
        self.check(max(steps), rank)
        starts = (np.asarray(steps, np.int64) * self.world_size + rank) * self.batch_size
        return self.positions_of(starts[:, None] + np.arange(self.batch_size))

    def positions_of(self, samples: IntArray) -> IntArray:
        """Returns epoch positions of samples, counted over all ranks from step 0; shape of `samples`."""
        samples = (self.num_kept_before_offset + samples) % self.num_kept
        if not self.skipped:
            return samples
        starts, firsts = self._runs
        run = find(firsts, samples)
        return starts[run] + samples - firsts[run]

    def locate(self, position: int) -> Iterator[tuple[int, int, int]]:
        """Yields each (step, rank, index) that shows a position, in the order of samples.

        It yields none for a skipped or dropped position. It yields several if the last step wraps: a small dataset may fill a
        large step several times.
        """
        for sample in self._samples(position):
            step, within = divmod(sample, self.samples_per_step)
            yield step, *divmod(within, self.batch_size)

    def earliest(self, positions: IntArray, count: int) -> IntArray:
        """Returns those of the positions that are not skipped, in the order of their steps; at most `count`."""
        samples = positions
        if self.skipped:
            starts, firsts = self._runs
            run = find(starts, positions)
            samples = firsts[run] + positions - starts[run]
            is_kept = (run >= 0) & (samples < firsts[run + 1])
            positions, samples = positions[is_kept], samples[is_kept]
        order = np.argsort((samples - self.num_kept_before_offset) % self.num_kept)
        first: IntArray = positions[order[:count]]
        return first

    def shows(self, position: int, step: int) -> bool:
        """Returns whether a step shows a position, on any rank."""
        samples = self._samples(position)
        at = bisect_left(samples, step * self.samples_per_step)
        return at < len(samples) and samples[at] < (step + 1) * self.samples_per_step

    def _samples(self, position: int) -> range:
        """Returns the samples that show a position."""
        if any(start <= position < stop for start, stop in self.skipped):
            return range(0)
        begin, number = self.num_kept_before_offset, num_kept_before(self.skipped, position)
        first = number - begin + (self.num_kept if number < begin else 0)
        return range(first, self.num_steps * self.samples_per_step, self.num_kept)

    @cached_property
    def _runs(self) -> tuple[IntArray, IntArray]:
        """Runs of positions between skipped ones: the start of each, and the samples before it, then the total."""
        starts, stops = np.array(kept_runs(self.skipped, self.num_samples), np.int64).reshape(-1, 2).T
        return starts, starts_of(stops - starts)
