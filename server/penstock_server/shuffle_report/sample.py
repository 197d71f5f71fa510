"""Samples of an epoch's served order, for the shuffle report. Only the plan and the index are read, no block.

A key of the spec draws the samples: one address always has one report.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock_server.batches.member import Member
from penstock_server.batches.plan import Plan
from penstock_server.order.arrays import IntArray, by_value, find, starts_of
from penstock_server.order.length_buckets import LengthOrder
from penstock_server.order.permutation import key, permute
from penstock_server.order.shuffle import EpochOrder
from penstock_server.problems import BadParameter

MAX_SAMPLES = 16_384  # looked up one by one, and again as many in global batches
_MAX_PLANS = 128  # epochs of datasets to plan, and windows to sort by length; each takes milliseconds


class Source(NamedTuple):
    """One epoch of one dataset of a plan. The place of a sample is its number in storage order.

    `starts[pool]` is the place of a pool's first sample; the last item is the number of samples.
    """

    member: int
    epoch: int
    order: EpochOrder | LengthOrder
    starts: IntArray

    @property
    def num_samples(self) -> int:
        """Number of samples of the epoch."""
        return int(self.starts[-1])


class Samples(NamedTuple):
    """Samples of an epoch and where they come from; arrays of one shape.

    Sample `numbers` of the epoch is at position `positions` in the order of source `sources`, and at place `places` there.
    """

    numbers: IntArray
    sources: IntArray
    positions: IntArray
    places: IntArray


class Drawn(NamedTuple):
    """Samples drawn from an epoch's first `num_measured` samples, of `num_served`.

    scattered    samples spread over them; shape [samples]
    batches      global batches spread over them; shape [batches, samples], only the beginning of very large batches
    distances    from a scattered sample to its successor in the source, in positions of the source's order; shape [pairs]
    by_chance    distances to successors drawn at random; shape [draws]
    """

    num_measured: int
    num_served: int
    sources: list[Source]
    scattered: Samples
    batches: Samples
    distances: IntArray
    by_chance: IntArray


def draw(plan: Plan, epoch: int) -> Drawn:
    """Draw samples and global batches of an epoch.

    Raises:
        BadParameter: the epoch has no step.
        IndexNotReady, IndexFailed: the packing needs token counts.
    """
    if plan.schedule.num_steps == 0:
        raise BadParameter(f"offset={plan.spec.offset:,} leaves no step of the epoch: there is no order to measure.")
    plan.check_epoch(epoch)
    # Without the samples that the last step repeats from the epoch's start.
    each_once = replace(plan.schedule, batch_size=1, world_size=1)
    num_served = num_measured = min(plan.schedule.num_steps * plan.spec.samples_per_step, each_once.num_steps)
    while num_measured > 1 and _num_plans(plan, epoch, num_measured) > _MAX_PLANS:
        num_measured //= 2

    draw_key = key(plan.spec.seed, epoch, "shuffle-report")
    batch = min(plan.spec.samples_per_step, MAX_SAMPLES, num_measured)
    singles = _spread(num_measured, MAX_SAMPLES, draw_key)
    firsts = _spread(num_measured // batch, MAX_SAMPLES // batch, draw_key) * batch
    sources, samples = _locate(plan, epoch, np.concatenate([singles, (firsts[:, None] + np.arange(batch)).reshape(-1)]))
    scattered = Samples(*(values[: len(singles)] for values in samples))
    batches = Samples(*(values[len(singles) :].reshape(-1, batch) for values in samples))
    return Drawn(num_measured, num_served, sources, scattered, batches, *_distances(sources, scattered))


def _num_plans(plan: Plan, epoch: int, num_samples: int) -> int:
    """Return the number of plans and sorted windows that an epoch's first samples need."""

    def num_plans(member: Member, num_shown: int) -> int:
        order = member.epoch(0)[1]
        per_epoch = order.window(order.num_samples - 1) + 1 if isinstance(order, LengthOrder) else 1
        return 1 + num_shown * per_epoch // order.num_samples

    if plan.mixture is None:
        return num_plans(plan.members[0], num_samples)
    start = epoch * plan.schedule.num_samples
    stop = start + min(plan.schedule.num_kept_before_offset + num_samples, plan.schedule.num_samples)
    shown = (plan.mixture.num_before(i, stop) - plan.mixture.num_before(i, start) for i in range(len(plan.members)))
    return sum(num_plans(*pair) for pair in zip(plan.members, shown, strict=True))


def _spread(size: int, most: int, draw_key: int) -> IntArray:
    """Return up to `most` different numbers below `size`, ascending: one at random from each equal stretch."""
    if size <= most:
        return np.arange(size)
    within = permute(np.arange(most), 1 << 32, draw_key) / 2**32
    return ((np.arange(most) + within) * size / most).astype(np.int64)


def _locate(plan: Plan, epoch: int, numbers: IntArray) -> tuple[list[Source], Samples]:
    """Return the samples of an epoch with these numbers, and their sources."""
    # The order does not depend on the batch size, so each sample is a batch.
    positions = replace(plan.schedule, batch_size=1, world_size=1).positions(numbers.tolist(), 0)[:, 0]
    positions //= plan.spec.repeat
    members, epochs = np.zeros_like(positions), np.full_like(positions, epoch)
    if plan.mixture is not None:
        members, in_stream = plan.mixture.locate(epoch * plan.schedule.num_samples + positions)
        epochs, positions = np.divmod(in_stream, np.array(plan.sizes)[members])
    kinds, sources = np.unique(np.stack([members, epochs]), axis=1, return_inverse=True)
    sources, places, planned = sources.reshape(-1), np.empty_like(positions), []
    for (member, number), (_, mine) in zip(kinds.T.tolist(), by_value(sources), strict=True):
        packing, order = plan.members[member].epoch(number)
        source = Source(member, number, order, starts_of(packing.samples_per_pool))
        pools, indices = order.samples(positions[mine])
        places[mine] = source.starts[pools] + indices
        planned.append(source)
    return planned, Samples(numbers, sources, positions, places)


def _distances(sources: list[Source], samples: Samples) -> tuple[IntArray, IntArray]:
    """Return `distances` and `by_chance` of Drawn."""
    measured, by_chance = [], []
    num_draws = -(-MAX_SAMPLES // len(samples.numbers))
    golden = 0.6180339887498949  # its multiples modulo 1 fill [0, 1) evenly
    evenly = ((np.arange(num_draws * len(samples.numbers)) + 0.5) * golden % 1).reshape(num_draws, -1)
    for number, mine in by_value(samples.sources):
        source = sources[number]
        mine = mine[samples.places[mine] + 1 < source.num_samples]
        successors = samples.places[mine] + 1
        pools = find(source.starts, successors)
        if isinstance(source.order, LengthOrder):  # another pool may be in another window, which would need sorting
            is_near = pools == find(source.starts, successors - 1)
            mine, successors, pools = mine[is_near], successors[is_near], pools[is_near]
        positions = samples.positions[mine]
        measured.append(np.abs(source.order.positions(pools, successors - source.starts[pools]) - positions))
        others = (evenly[:, mine] * (source.num_samples - 1)).astype(np.int64)
        others += others >= positions
        by_chance.append(np.abs(others - positions).reshape(-1))
    return np.concatenate(measured), np.concatenate(by_chance)
