"""Sample of an epoch's served order, for the shuffle report, from the plan and the index; no block is read.

    samples --Schedule--> positions --Mixture, EpochOrder--> samples, and with them their places in the source
    a sample's neighbour in the source --EpochOrder, Mixture, Schedule, backwards--> when it is served

A separate key draws the samples: one address always has one report.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock_server.batches.plan import Plan
from penstock_server.order.arrays import IntArray, by_value, find, starts_of
from penstock_server.order.length_buckets import LengthOrder
from penstock_server.order.permutation import key, permute
from penstock_server.order.shuffle import EpochOrder
from penstock_server.problems import BadParameter
from penstock_server.shuffle_report.extent import MAX_SCATTERED, num_measured, num_scattered

_MAX_IN_RUNS, _MAX_RUNS, _MIN_RUN = 16_384, 64, 16
_NEVER = -(1 << 62)
_GOLDEN = 0.6180339887498949  # its multiples modulo 1 fill [0, 1) evenly


@dataclass(frozen=True, eq=False, slots=True)
class MemberEpoch:
    """Epoch of one member. Its samples have places, from 0 on, in storage order.

    `starts[pool]` is the place of a pool's first sample; the last item is the number of samples.
    """

    member: int
    epoch: int
    order: EpochOrder | LengthOrder
    starts: IntArray

    @property
    def num_samples(self) -> int:
        """Return the number of samples of the epoch."""
        return int(self.starts[-1])

    @property
    def num_pools(self) -> int:
        """Return the number of pools that hold a sample."""
        return int(np.count_nonzero(np.diff(self.starts)))


@dataclass(frozen=True, eq=False, slots=True)
class LookedAt:
    """Samples and their origin; arrays of shape [runs, samples of a run], with consecutive samples in each run.

    Sample `samples` of the epoch is position `positions` of it and position `own` of source number `sources`, and shows the
    sample at place `places` of that source.
    """

    samples: IntArray
    positions: IntArray
    sources: IntArray
    own: IntArray
    places: IntArray

    def reshaped(self, *shape: int) -> LookedAt:
        """Return the same samples in another shape."""
        every = (self.samples, self.positions, self.sources, self.own, self.places)
        return LookedAt(*(values.reshape(shape) for values in every))


@dataclass(frozen=True, eq=False, slots=True)
class Pairs:
    """Pairs of samples that are neighbours in the source.

    distances  distance, in samples, of the two in an endless run; shape [pairs]
    meet       whether one global batch shows both; shape [pairs]
    uniform    distances if the second is drawn from all positions but the first one's; at least as many
    """

    distances: IntArray
    meet: npt.NDArray[np.bool_]
    uniform: IntArray


@dataclass(frozen=True, eq=False, slots=True)
class Sample:
    """Sample of an epoch's first `num_samples` samples, or of all.

    scattered  some samples, or all; shape [samples]
    runs       some runs of one or several global batches; only the beginning of very large ones
    pairs      the scattered samples and their neighbours in the source
    """

    plan: Plan
    epoch: int
    num_samples: int
    sources: tuple[MemberEpoch, ...]
    scattered: LookedAt
    runs: LookedAt
    pairs: Pairs

    @property
    def samples_per_step(self) -> int:
        """Return the number of samples of a global batch."""
        return self.plan.spec.samples_per_step

    @property
    def batches(self) -> LookedAt:
        """Return the runs, split into global batches."""
        return self.runs.reshaped(-1, _batch(self.plan, self.num_samples))


def draw(plan: Plan, epoch: int) -> Sample:
    """Draw the sample of an epoch.

    Raises BadParameter: the epoch has no step. Raises the errors of Index if the packing needs counts.
    """
    if plan.schedule.num_steps == 0:
        raise BadParameter(f"there is no order to measure: offset={plan.spec.offset:,} leaves no step of the epoch.")
    plan.check_epoch(epoch)
    num_samples = num_measured(plan, epoch)
    look_up = _LookUp(plan, epoch)
    scattered = look_up.runs(1, num_scattered(plan), num_samples).reshaped(-1)
    batch = _batch(plan, num_samples)
    length = batch * min(-(-_MIN_RUN // batch), num_samples // batch)
    runs = look_up.runs(length, min(_MAX_RUNS, _MAX_IN_RUNS // length), num_samples)
    return Sample(plan, epoch, num_samples, tuple(look_up.sources), scattered, runs, look_up.pairs(scattered))


class _LookUp:
    """Look-up of samples in one epoch of a plan; it collects the sources that occur."""

    def __init__(self, plan: Plan, epoch: int) -> None:
        self._plan, self._epoch = plan, epoch
        self._key = key(plan.spec.seed, epoch, "shuffle-report")
        self._numbers: dict[tuple[int, int], int] = {}
        self.sources: list[MemberEpoch] = []

    def runs(self, length: int, most: int, num_samples: int) -> LookedAt:
        """Return up to `most` runs of `length` samples, spread over the first num_samples; starts are multiples of `length`."""
        room = num_samples // length
        count = min(most, room)
        drawn = permute(np.arange(count), 1 << 32, self._key) / 2**32
        numbers = np.arange(count) if count == room else ((np.arange(count) + drawn) * room / count).astype(np.int64)
        # The order does not depend on batch size and ranks: treat a run as a batch of a single rank.
        positions = replace(self._plan.schedule, batch_size=length, world_size=1).positions(numbers.tolist(), 0)
        samples = numbers[:, None] * length + np.arange(length)
        flat = positions.reshape(-1)
        return LookedAt(samples.reshape(-1), flat, *self._places(flat)).reshaped(*positions.shape)

    def pairs(self, served: LookedAt) -> Pairs:
        """Pair samples with the next ones in the source. The last sample of a source has no next one."""
        other = np.full_like(served.own, _NEVER)
        anywhere = np.full((-(-MAX_SCATTERED // len(other)), len(other)), _NEVER)
        even = (np.arange(anywhere.size) + 0.5).reshape(anywhere.shape) * _GOLDEN % 1
        for number, mine in by_value(served.sources):
            source = self.sources[number]
            size = source.num_samples
            mine = mine[served.places[mine] + 1 < size]
            pools = find(source.starts, served.places[mine] + 1)
            if isinstance(source.order, LengthOrder):  # another pool may be in another window, which would need sorting
                near = pools == find(source.starts, served.places[mine])
                mine, pools = mine[near], pools[near]
            beside = source.order.positions(pools, served.places[mine] + 1 - source.starts[pools])
            other[mine] = self._positions(source, beside)
            drawn = (even[:, mine] * (size - 1)).astype(np.int64)
            anywhere[:, mine] = self._positions(source, drawn + (drawn >= served.own[mine]))
        seen, known = other != _NEVER, anywhere != _NEVER
        meet = self._are_in(other[seen], served.samples[seen] // self._plan.spec.samples_per_step)
        return Pairs(np.abs(other - served.positions)[seen], meet, np.abs(anywhere - served.positions)[known])

    def _places(self, positions: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return the source, the position in its order and the place in it, of each position of the epoch."""
        sources, own = self._own(positions)
        places = np.empty_like(own)
        for number, mine in by_value(sources):
            source = self.sources[number]
            pools, indices = source.order.samples(own[mine])
            places[mine] = source.starts[pools] + indices
        return sources, own, places

    def _own(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Return the source of each position of the epoch, and the position in that source."""
        plan = self._plan
        if plan.mixture is None:
            return np.full_like(positions, self._source(0, self._epoch)), positions
        members, numbers = plan.mixture.locate(self._epoch * plan.schedule.num_positions + positions)
        epochs, own = np.divmod(numbers, np.array(plan.sizes)[members])
        kinds, of_kind = np.unique(np.stack([members, epochs]), axis=1, return_inverse=True)
        return np.array([self._source(*kind) for kind in kinds.T.tolist()])[of_kind.reshape(-1)], own

    def _source(self, member: int, epoch: int) -> int:
        if (member, epoch) not in self._numbers:
            packing, order = self._plan.members[member].epoch(epoch)
            self._numbers[member, epoch] = len(self.sources)
            self.sources.append(MemberEpoch(member, epoch, order, starts_of(packing.samples_per_pool)))
        return self._numbers[member, epoch]

    def _positions(self, source: MemberEpoch, own: IntArray) -> IntArray:
        """Invert _own. Positions of other epochs are outside this epoch; _NEVER if the mixture never shows the sample."""
        mixture = self._plan.mixture
        if mixture is None:
            return own
        first, begin = source.epoch * source.num_samples, self._epoch * self._plan.schedule.num_positions
        samples = (mixture.sample(source.member, first + number) for number in own.reshape(-1).tolist())
        return np.array([_NEVER if sample is None else sample - begin for sample in samples], np.int64).reshape(own.shape)

    def _are_in(self, positions: IntArray, steps: IntArray) -> npt.NDArray[np.bool_]:
        """Return whether the epoch shows each position in the given step."""
        schedule = self._plan.schedule
        inside = (positions >= 0) & (positions < schedule.num_positions)
        return np.array(
            [
                is_in and schedule.shows(position, step)
                for is_in, position, step in zip(inside.tolist(), positions.tolist(), steps.tolist(), strict=True)
            ],
            np.bool_,
        )


def _batch(plan: Plan, num_samples: int) -> int:
    """Return the number of samples to look up in a global batch."""
    return min(plan.spec.samples_per_step, _MAX_IN_RUNS, num_samples)
