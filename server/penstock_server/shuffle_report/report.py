"""Shuffle report: how well the order of an epoch mixes the source, beside an exact uniform shuffle of the same samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock_server.batches.plan import Plan
from penstock_server.order.arrays import IntArray, by_value, distinct, find
from penstock_server.schemas.estimates import ScatterInfo
from penstock_server.shuffle_report.confidence import Range, num_distinct, range_of_count, range_of_mean
from penstock_server.shuffle_report.sample import Drawn, Source, draw

_QUANTILES = {"p1": 0.01, "p10": 0.1, "median": 0.5, "p90": 0.9}
_MAX_CELLS = 24  # stretches of the epoch, and parts of a source
_MAX_POINTS = 2048  # of the scatter plot


Measure = tuple[str, dict[str, Any]]


def report(plan: Plan, epoch: int) -> dict[str, Any]:
    """Measure the order of an epoch.

    Raises:
        BadParameter: the epoch has no step.
        IndexNotReady, IndexFailed: the packing needs token counts.
    """
    drawn = draw(plan, epoch)
    measures = [
        *_neighbour_distances(drawn),
        _neighbours_per_batch(drawn),
        _distinct_per_batch("blocks_per_batch", drawn, [source.starts for source in drawn.sources]),
        _distinct_per_batch("shards_per_batch", drawn, [_shard_starts(plan, source) for source in drawn.sources]),
        *_unevenness(plan, drawn),
    ]
    return {
        "dataset": plan.dataset,
        "snapshot": plan.snapshot,
        "epoch": epoch,
        "measures": dict(measures),
        "sampled": {
            "samples": len(drawn.scattered.numbers),
            "global_batches": len(drawn.batches.numbers),
            "of_first": drawn.num_measured,
            "of_epoch": drawn.num_served,
        },
        "scatter": list(_scatter(plan, drawn)),
        "spec": plan.spec.to_dict(),
    }


def _scatter(plan: Plan, drawn: Drawn) -> Iterator[ScatterInfo]:
    """Yield evenly chosen samples by source, which is one epoch of one dataset."""
    numbers, sources, _, places = drawn.scattered
    chosen = np.linspace(0, len(numbers) - 1, min(len(numbers), _MAX_POINTS)).astype(np.int64)
    for number, mine in by_value(sources[chosen]):
        source = drawn.sources[number]
        yield {
            "dataset": plan.members[source.member].name,
            "source_samples": source.num_samples,
            "numbers": numbers[chosen[mine]].tolist(),
            "places": places[chosen[mine]].tolist(),
        }


def _measure(name: str, unit: str, value: float, expected: float, usual: Range) -> Measure:
    """Return a number measured of an order, with the range of an exact uniform shuffle, as JSON."""
    low, high = usual
    facts = {"value": value, "unit": unit, "expected": expected, "low": low, "high": high}
    return name, facts | {"is_uniform": low <= value <= high}


def _neighbour_distances(drawn: Drawn) -> Iterator[Measure]:
    """Yield quantiles of the distance between neighbours of the source in the order."""
    for name, share in _QUANTILES.items() if len(drawn.distances) else ():
        low, high = range_of_mean(share, len(drawn.distances))
        usual = _quantile(drawn.by_chance, low) if low else 0.0, _quantile(drawn.by_chance, high)
        value, expected = _quantile(drawn.distances, share), _quantile(drawn.by_chance, share)
        yield _measure(f"neighbour_distance_{name}", "samples", value, expected, usual)


def _neighbours_per_batch(drawn: Drawn) -> Measure:
    """Return the fraction of samples whose successor in the source is in the same global batch."""
    batches, total = drawn.batches, drawn.batches.numbers.size
    groups = _groups(drawn)
    places = batches.places.reshape(-1)
    order = np.lexsort((places, groups))
    adjacent = (np.diff(places[order]) == 1) & (np.diff(groups[order]) == 0)
    present, counts = np.unique(groups, return_counts=True)
    sizes = np.array([source.num_samples for source in drawn.sources])[present % len(drawn.sources)]
    expected = min(float((counts * (counts - 1) / sizes).sum()) / total, 1.0)
    _, high = range_of_mean(expected, total)
    # Fewer than by chance is fine.
    return _measure("neighbours_in_one_batch", "fraction of samples", float(adjacent.sum()) / total, expected, (0.0, high))


def _distinct_per_batch(name: str, drawn: Drawn, starts: list[IntArray]) -> Measure:
    """Return the mean number of distinct units in a global batch; a unit of a source begins at each of its `starts`."""
    batches = drawn.batches
    num_batches, size = batches.numbers.shape
    value = expected = 0.0
    groups, places = _groups(drawn), batches.places.reshape(-1)
    for number, mine in by_value(batches.sources.reshape(-1)):
        units = find(starts[number], places[mine])
        value += len(distinct(groups[mine] * len(starts[number]) + units))
        sizes = np.diff(starts[number])
        _, per_batch = np.unique(groups[mine], return_counts=True)
        for count, num_alike in zip(*np.unique(per_batch, return_counts=True), strict=True):
            expected += num_alike * num_distinct(sizes, int(count))
    value, expected = value / num_batches, float(expected) / num_batches
    usual = range_of_count(expected, num_batches * size, 1 / num_batches)
    return _measure(name, name.partition("_")[0], value, expected, usual)


def _groups(drawn: Drawn) -> IntArray:
    """Return a number for the batch and the source of each sample of the batches, shape [batches * samples]."""
    batches, num_sources = drawn.batches, len(drawn.sources)
    return (np.arange(len(batches.sources))[:, None] * num_sources + batches.sources).reshape(-1)


def _shard_starts(plan: Plan, source: Source) -> IntArray:
    """Return the place of the first sample of each shard, then the number of samples."""
    member = plan.members[source.member]
    first_pool = member.snapshot.first_block_of_shard
    if member.order_key.packing == "best_fit":
        first_pool = np.searchsorted(member.snapshot.pools.starts, first_pool)
    return source.starts[first_pool]


def _unevenness(plan: Plan, drawn: Drawn) -> Iterator[Measure]:
    """Yield the fractions of samples to move until each stretch of the epoch, and each rank, has its share of all parts."""
    num_cells, numbers, world_size = _num_cells(len(drawn.scattered.numbers)), drawn.scattered.numbers, plan.spec.world_size
    yield _unevenness_over("time", drawn, numbers * num_cells // drawn.num_measured)
    if world_size > 1:
        ranks = numbers // plan.spec.batch_size % world_size
        yield _unevenness_over("ranks", drawn, ranks * min(world_size, num_cells) // world_size)


def _unevenness_over(name: str, drawn: Drawn, cells: IntArray) -> Measure:
    """Compare the parts of each dataset that the cells show with their shares of all scattered samples."""
    samples, total = drawn.scattered, len(cells)
    members = np.array([source.member for source in drawn.sources])[samples.sources]
    sizes = np.array([source.num_samples for source in drawn.sources])[samples.sources]
    moved = by_chance = 0.0
    for _, mine in by_value(members):
        num_parts = _num_cells(len(mine))
        table = np.zeros((num_parts, cells.max() + 1))
        np.add.at(table, (samples.places[mine] * num_parts // sizes[mine], cells[mine]), 1)
        of_part, of_cell, count = table.sum(axis=1, keepdims=True), table.sum(axis=0), table.sum()
        expected = of_part * of_cell / count
        variance = expected * (count - of_part) * (count - of_cell) / max(count * (count - 1), 1)  # without replacement
        moved += float(np.abs(table - expected).sum()) / 2
        # Mean deviation of a normal distribution; with few samples at most that of all or nothing.
        by_chance += float(np.minimum(np.sqrt(2 / np.pi * variance), 2 * expected).sum()) / 2
    _, high = range_of_count(by_chance / total, total, 1 / total)
    # More even than by chance is fine.
    return _measure(f"unevenness_over_{name}", "fraction of samples", moved / total, by_chance / total, (0.0, high))


def _num_cells(num_samples: int) -> int:
    """Return the number of parts, or stretches, to count samples in; fewer for few samples."""
    return int(np.clip(math.sqrt(num_samples / 16), 2, _MAX_CELLS))


def _quantile(values: IntArray, share: float) -> float:
    return float(np.quantile(values, share, method="inverted_cdf"))
