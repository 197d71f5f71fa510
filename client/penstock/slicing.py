"""Slicing of an epoch into steps of ranks. Plain arithmetic, shared by the server and the audit."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from penstock.skip import Ranges, num_kept_before, position_after
from penstock.spec import Spec


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """Mapping from steps to samples.

    Sample `index` of a batch is number (step * world_size + rank) * batch_size + index of the kept samples, counted from
    position `offset`. Another world size or batch size slices the same order differently. Each rank has the same number of
    steps: unequal ranks would hang the trainer's collectives.

    The epoch's samples are at positions 0 to num_samples - 1; those in the half-open ranges `skipped` are in no step.
    `drop_last` decides only the last step: slicings that differ only in it are equal.
    """

    num_samples: int
    batch_size: int
    world_size: int
    offset: int
    drop_last: bool = field(compare=False)
    skipped: Ranges = ()

    @classmethod
    def of(cls, spec: Spec, num_samples: int) -> Self:
        """Build the slicing of a spec's epoch, which has `num_samples` samples, skipped ones included."""
        return cls(
            num_samples=num_samples,
            batch_size=spec.batch_size,
            world_size=spec.world_size,
            offset=spec.offset,
            drop_last=spec.drop_last,
            skipped=spec.skipped(),
        )

    @property
    def samples_per_step(self) -> int:
        """Samples of one step, over all ranks."""
        return self.batch_size * self.world_size

    @cached_property
    def num_kept(self) -> int:
        """Samples of the epoch without skipped ones."""
        return num_kept_before(self.skipped, self.num_samples)

    @cached_property
    def num_kept_before_offset(self) -> int:
        """Kept samples before `offset`."""
        return num_kept_before(self.skipped, min(self.offset, self.num_samples))

    @cached_property
    def num_steps(self) -> int:
        """Steps of the epoch; `drop_last` omits an incomplete last one, otherwise the epoch's start fills it."""
        left = self.num_kept - self.num_kept_before_offset
        return left // self.samples_per_step if self.drop_last else -(-left // self.samples_per_step)

    @property
    def num_repeated(self) -> int:
        """Number of samples from the epoch's start that fill the last step under drop_last=false."""
        return max(0, self.num_kept_before_offset + self.num_steps * self.samples_per_step - self.num_kept)

    def position(self, step: int) -> int:
        """Return the position where a step begins, or the epoch's end."""
        return min(position_after(self.skipped, self.offset, step * self.samples_per_step), self.num_samples)

    def num_steps_before(self, position: int) -> int:
        """Count the steps that begin before a position."""
        return max(0, -(-self._number(position) // self.samples_per_step))

    def step_of(self, position: int) -> tuple[int, int]:
        """Return the (step, rank) of a position, which must not be before `offset` or skipped."""
        step, within = divmod(self._number(position), self.samples_per_step)
        return step, within // self.batch_size

    def _number(self, position: int) -> int:
        """Return the number of the sample at a position, counted from `offset`; negative before `offset`."""
        return num_kept_before(self.skipped, position) - self.num_kept_before_offset
