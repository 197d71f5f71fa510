"""Measures of the shuffle report, each with the value of an exact uniform shuffle of the same epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock_server.order.arrays import IntArray, distinct, find
from penstock_server.shuffle_report.confidence import Range, num_distinct, range_of_count, range_of_mean
from penstock_server.shuffle_report.sample import MemberEpoch, Sample

_QUANTILES = (0.01, 0.1, 0.5, 0.9)
_MAX_CELLS = 24  # stretches of the epoch, and parts of the source
_FEW_UNITS = 8  # shards, or blocks: with fewer, count smaller units

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """Number measured of an order, its expectation in a uniform shuffle, and the range of chance."""

    measured: float
    expected: float
    usual: Range

    @property
    def is_usual(self) -> bool:
        """Return whether the number is in the range of a uniform shuffle."""
        low, high = self.usual
        return low <= self.measured <= high


@dataclass(frozen=True, eq=False, slots=True)
class Spread:
    """Distribution of the samples of the source's parts over stretches; arrays of shape [parts, stretches].

    `kind` is the kind of a part: one or several blocks or shards, or a slice. `members` has the member of each part.
    """

    kind: str
    members: IntArray
    counted: Matrix
    expected: Matrix
    variance: Matrix  # of a uniform shuffle

    @property
    def unevenness(self) -> Measure:
        """Return the share of the samples that would have to move to make all stretches alike."""
        total = int(self.counted.sum())
        # Mean deviation of a normal distribution; for a small expectation, capped at the deviation of all or nothing.
        by_luck = float(np.minimum(np.sqrt(2 / np.pi * self.variance), 2 * self.expected).sum()) / 2 / total
        _, most = range_of_count(by_luck, total, 1 / total)
        measured = float(np.abs(self.counted - self.expected).sum()) / 2 / total
        return Measure(measured=measured, expected=by_luck, usual=(0.0, most))  # more even than by chance is fine


def neighbour_distances(sample: Sample) -> dict[float, Measure]:
    """Return quantiles of the distance between neighbours of the source in the served order, in samples."""

    def quantile(values: IntArray, share: float) -> float:
        return float(np.quantile(values, share, method="inverted_cdf"))

    distances, uniform = sample.pairs.distances, sample.pairs.uniform
    found = {}
    for share in _QUANTILES:
        low, high = range_of_mean(share, len(distances))
        usual = quantile(uniform, low) if low else 0.0, quantile(uniform, high)
        found[share] = Measure(measured=quantile(distances, share), expected=quantile(uniform, share), usual=usual)
    return found


def meeting_neighbours(sample: Sample) -> Measure:
    """Return the share of samples whose neighbour in the source is in the same global batch."""
    batches, num_others, num_all = sample.batches, 0.0, 0.0
    scale = sample.samples_per_step / batches.samples.shape[1]  # the sample has only the beginning of very large global batches
    for number, source in enumerate(sample.sources):
        together, num = (batches.sources == number).sum(axis=1) * scale, max(source.num_samples, 1)
        num_others += float((together * np.maximum(together - 1, 0)).sum()) / num
        num_all += float(together.sum()) * (num - 1) / num  # the last sample has no next neighbour
    expected, meet = min(num_others / max(num_all, 1), 1.0), sample.pairs.meet
    _, most = range_of_mean(expected, len(meet))
    return Measure(measured=float(meet.mean()), expected=expected, usual=(0.0, most))  # fewer than by chance is fine


def consecutive_distances(sample: Sample) -> tuple[IntArray, IntArray]:
    """Return the distance in the source of consecutive samples, and the size of that source; shape [pairs] each.

    In a mixture, consecutive samples are those of one dataset.
    """
    runs = sample.runs
    sizes = np.array([source.num_samples for source in sample.sources])
    trail = (np.arange(len(runs.samples))[:, None] * len(sizes) + runs.sources).reshape(-1)
    by_trail = np.argsort(trail, kind="stable")
    follow = np.diff(trail[by_trail]) == 0
    first, second = by_trail[:-1][follow], by_trail[1:][follow]
    places = runs.places.reshape(-1)
    return np.abs(places[first] - places[second]), sizes[runs.sources.reshape(-1)[first]]


def consecutive_distance(distances: IntArray, sizes: IntArray) -> Measure:
    """Return the mean of consecutive_distances, as a share of the source."""
    expected = float(((sizes + 1) / (3 * sizes)).mean())
    measured = float((distances / sizes).mean())
    return Measure(measured=measured, expected=expected, usual=range_of_mean(expected, len(distances)))


def distinct_per_batch(sample: Sample, unit: str) -> tuple[Measure, int]:
    """Return the mean number of distinct blocks, or shards, in a global batch, and their total; a packed pool is one block."""
    batches, edges = sample.batches, [_unit_edges(sample, source, unit) for source in sample.sources]
    num_batches, size = batches.samples.shape
    measured = expected = 0.0
    for number, own in enumerate(edges):
        sizes, by_count = np.diff(own), dict[int, float]()
        for batch in np.flatnonzero((batches.sources == number).any(axis=1)).tolist():
            drawn = batches.places[batch, batches.sources[batch] == number]
            measured += len(distinct(find(own, drawn)))
            if len(drawn) not in by_count:
                by_count[len(drawn)] = num_distinct(sizes, len(drawn))
            expected += by_count[len(drawn)]
    measured, expected = measured / num_batches, expected / num_batches
    usual = range_of_count(expected, num_batches * size, 1 / num_batches)
    return Measure(measured=measured, expected=expected, usual=usual), _num_units(sample, edges)


def spread_over_time(sample: Sample) -> Spread:
    """Measure how parts of the source spread over equal stretches of the epoch, against their shares of the source."""
    num_stretches = _num_cells(sample)
    stretches = sample.scattered.samples * num_stretches // sample.num_samples
    kind, edges = _parts(sample)
    members, counted = _counted(sample, edges, stretches, num_stretches)
    expected, variance = np.zeros((2, *counted.shape))
    for number, (source, own) in enumerate(zip(sample.sources, edges, strict=True)):
        totals = np.bincount(stretches[sample.scattered.sources == number], minlength=num_stretches)
        shares = np.diff(own)[:, None] / source.num_samples
        left = np.maximum(source.num_samples - totals, 0) / max(source.num_samples - 1, 1)  # sampling is without replacement
        expected[members == source.member] += totals * shares
        variance[members == source.member] += totals * shares * (1 - shares) * left
    return Spread(kind, members, counted, expected, variance)


def spread_over_ranks(sample: Sample) -> Spread:
    """Measure how parts of the source spread over ranks, or groups of ranks, against their shares of all served samples."""
    world_size = sample.plan.spec.world_size
    num_groups = min(world_size, _num_cells(sample))
    ranks = sample.scattered.samples // sample.plan.spec.batch_size % world_size
    kind, edges = _parts(sample)
    members, counted = _counted(sample, edges, ranks * num_groups // world_size, num_groups)
    expected, variance = np.zeros((2, *counted.shape))
    for member in np.unique(members).tolist():
        rows = members == member
        parts, groups, total = counted[rows].sum(axis=1, keepdims=True), counted[rows].sum(axis=0), counted[rows].sum()
        expected[rows] = parts * groups / max(total, 1)
        variance[rows] = expected[rows] * (total - parts) * (total - groups) / max(total * (total - 1), 1)
    return Spread(kind, members, counted, expected, variance)


def _counted(sample: Sample, edges: list[IntArray], stretches: IntArray, num_stretches: int) -> tuple[IntArray, Matrix]:
    """Return the member of each part, and the number of its scattered samples in each stretch."""
    num_parts = {source.member: len(own) - 1 for source, own in zip(sample.sources, edges, strict=True)}
    members = np.repeat(list(num_parts), list(num_parts.values()))
    counted = np.zeros((len(members), num_stretches))
    for number, (source, own) in enumerate(zip(sample.sources, edges, strict=True)):
        mine, rows = sample.scattered.sources == number, np.flatnonzero(members == source.member)
        np.add.at(counted, (rows[find(own, sample.scattered.places[mine])], stretches[mine]), 1)
    return members, counted


def _num_cells(sample: Sample) -> int:
    """Return the number of stretches, and about that of parts, to count samples in; fewer for few samples."""
    return int(np.clip(math.sqrt(len(sample.scattered.samples) / 16), 2, _MAX_CELLS))


def _parts(sample: Sample) -> tuple[str, list[IntArray]]:
    """Return the kind of the source's parts; and the place in each source where each part starts, then the end."""
    kind, edges = "slices", [np.linspace(0, s.num_samples, _MAX_CELLS + 1).astype(np.int64) for s in sample.sources]
    for unit in ("blocks", "shards"):
        of_unit = [_unit_edges(sample, source, unit) for source in sample.sources]
        if _num_units(sample, of_unit) >= _FEW_UNITS:
            kind, edges = unit, of_unit
    served = np.bincount(sample.scattered.sources, minlength=len(sample.sources))
    cuts: dict[int, IntArray] = {}  # the same in all epochs of a member
    for source, own in zip(sample.sources, edges, strict=True):
        if source.member not in cuts:
            mine = [s.member == source.member for s in sample.sources]
            num_parts = max(2, round(_num_cells(sample) * served[mine].sum() / served.sum()))
            filled = np.flatnonzero(np.append(np.diff(own) > 0, True))
            if len(filled) - 1 > num_parts:
                wanted = np.searchsorted(own, np.linspace(0, source.num_samples, num_parts + 1))
                filled = distinct(wanted.clip(filled[0], filled[-1]))
            cuts[source.member] = filled
    return kind, [own[cuts[source.member]] for source, own in zip(sample.sources, edges, strict=True)]


def _unit_edges(sample: Sample, source: MemberEpoch, unit: str) -> IntArray:
    """Return the places in a source where its blocks, or shards, start, then the end."""
    if unit == "blocks":
        return source.starts
    member = sample.plan.members[source.member]
    first_pool = member.snapshot.first_block_of_shard
    if member.order_key.packing == "best_fit":
        first_pool = np.searchsorted(member.snapshot.pools.starts, first_pool)
    return source.starts[first_pool]


def _num_units(sample: Sample, edges: list[IntArray]) -> int:
    """Return the number of units, with these edges, that hold a sample."""
    by_member = {source.member: int((np.diff(own) > 0).sum()) for source, own in zip(sample.sources, edges, strict=True)}
    return sum(by_member.values())
