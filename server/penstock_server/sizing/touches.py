"""Touches: the blocks that the batches of an epoch need, one after the other. Only the plan and the index are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock_server.batches.plan import Plan
from penstock_server.order.arrays import IntArray, begins_run, distinct, starts_of

MAX_TOUCHES = 1 << 20  # of one epoch; seconds of CPU, and 150 MB of memory with the next epoch
_CHUNK_SPANS = 1 << 17  # looked up at a time
_MAX_EPOCHS = 1 << 10  # of members; each is planned in a millisecond or more, and a mixture may repeat a small one very often
_EPOCH_BLOCKS = 1 << 14  # planned in about a millisecond


@dataclass(frozen=True, eq=False)
class Touches:
    """Blocks that the ranks need, step by step and rank by rank; each block of a batch once, in ascending order.

    blocks       number of each block, counted over all members
    batches      index of the first touch of each batch
    num_samples  samples of these batches
    """

    blocks: IntArray
    batches: IntArray
    num_samples: int

    @cached_property
    def before(self) -> IntArray:
        """Index of each block's touch before; -1 for its first."""
        order = np.argsort(self.blocks, kind="stable")
        before = np.full(len(order), -1, np.int64)
        follows = ~begins_run(self.blocks[order])
        before[order[follows]] = order[:-1][follows[1:]]
        return before

    @cached_property
    def distinct(self) -> IntArray:
        """The touched blocks, ascending."""
        return distinct(self.blocks)


def touches_of(plan: Plan, epoch: int) -> Touches:
    """Returns the touches of an epoch, or of its first batches if there are more than MAX_TOUCHES.

    Raises what Index raises: the packing needs counts.
    """
    parts, num_touches = list[Touches](), 0
    for part in _parts(plan, epoch):
        parts.append(part)
        num_touches += len(part.blocks)
        if num_touches >= MAX_TOUCHES:
            break
    return joined(parts)


def joined(parts: Sequence[Touches]) -> Touches:
    """Returns touches one after the other."""
    firsts = starts_of(np.array([len(part.blocks) for part in parts], np.int64))
    return Touches(
        np.concatenate([np.zeros(0, np.int64), *(part.blocks for part in parts)]),
        np.concatenate([np.zeros(0, np.int64), *(first + part.batches for first, part in zip(firsts, parts, strict=False))]),
        sum(part.num_samples for part in parts),
    )


def _parts(plan: Plan, epoch: int) -> Iterator[Touches]:
    """Yields the touches of some batches at a time; ends early after planning very many epochs of members."""
    num_blocks = starts_of(np.array([member.snapshot.num_blocks for member in plan.members]))
    batch_size, stop = plan.spec.batch_size, plan.schedule.num_steps * plan.spec.samples_per_step
    size, at, cost = max(1, int(_CHUNK_SPANS / plan.step_spans)) * batch_size, 0, 0.0
    while at < stop and cost < _MAX_EPOCHS:
        samples = np.arange(at, min(at + size, stop))
        of_members = plan.by_member(epoch, plan.schedule.positions_of(samples))
        if len(of_members) > _MAX_EPOCHS and size > batch_size:
            size = size // batch_size // 2 * batch_size
            continue
        keys = []
        for number, member_epoch, lines, positions in of_members:
            packing, order = plan.members[number].epoch(member_epoch)
            lines_of, blocks = packing.blocks(*order.samples(positions))
            keys.append(samples[lines[lines_of]] // batch_size * num_blocks[-1] + num_blocks[number] + blocks)
            cost += 1 + plan.members[number].snapshot.num_blocks / _EPOCH_BLOCKS if plan.mixture else 0
        batches, blocks = np.divmod(distinct(np.concatenate(keys)), num_blocks[-1])
        yield Touches(blocks, np.flatnonzero(begins_run(batches)), len(samples))
        at += len(samples)
