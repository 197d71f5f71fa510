"""Shuffle report: how well an epoch's order mixes the source, measured on the served order.

extent    the part of the epoch that is measured
sample    the samples of that part that are looked up, and their places in the source
measures  the numbers, each with that of an exact uniform shuffle
verdict   their meaning
picture   the report as a picture
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from penstock_server.batches.plan import Plan
from penstock_server.order.arrays import IntArray
from penstock_server.shuffle_report.extent import num_served
from penstock_server.shuffle_report.measures import (
    Measure,
    Spread,
    consecutive_distance,
    consecutive_distances,
    distinct_per_batch,
    meeting_neighbours,
    neighbour_distances,
    spread_over_ranks,
    spread_over_time,
)
from penstock_server.shuffle_report.sample import Sample, draw
from penstock_server.shuffle_report.verdict import Window, grade, number, percent, samples, verdict, windows_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Measure with a name, a unit and a sentence about it; `quantiles` has further measures, by share."""

    name: str
    unit: str
    says: str
    measure: Measure
    quantiles: dict[float, Measure] | None = None

    @property
    def measures(self) -> list[Measure]:
        """Return all its measures, beginning with that of the sentence."""
        return [self.measure, *(self.quantiles or {}).values()]

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON."""
        facts = {"says": self.says, "unit": self.unit, **_as_json(self.measure)}
        if self.quantiles:
            facts["quantiles"] = [{"share": share, **_as_json(measure)} for share, measure in self.quantiles.items()]
        return facts


def _as_json(measure: Measure) -> dict[str, Any]:
    return asdict(measure) | {"is_usual": measure.is_usual}


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Report:
    """Report on one epoch of a plan."""

    sample: Sample
    findings: tuple[Finding, ...]
    windows: tuple[Window, ...]
    over_time: Spread
    grade: str
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON."""
        sample = self.sample
        return {
            "dataset": sample.plan.dataset,
            "snapshot": sample.plan.snapshot,
            "epoch": sample.epoch,
            "grade": self.grade,
            "verdict": self.verdict,
            "measures": {finding.name: finding.to_dict() for finding in self.findings},
            "windows": [asdict(window) | {"says": window.says} for window in self.windows],
            "sample": {
                "samples": len(sample.scattered.samples),
                "neighbours": len(sample.pairs.meet),
                "global_batches": len(sample.batches.samples),
                "of_the_first": sample.num_samples,
                "of": num_served(sample.plan),
            },
            "spec": sample.plan.spec.to_dict(),
        }


def report(plan: Plan, epoch: int) -> Report:
    """Measure an epoch. No block is read.

    Raises BadParameter: the epoch has no step. Raises the errors of Index if the packing needs counts.
    """
    sample = draw(plan, epoch)
    apart, sizes = consecutive_distances(sample)
    over_time = spread_over_time(sample)
    findings = (
        *_of_neighbours(sample),
        *_of_consecutive(apart, sizes),
        _of_batches(sample, "blocks"),
        _of_batches(sample, "shards"),
        _of_spread("unevenness_over_time", f"each of {over_time.counted.shape[1]} equal stretches of the epoch", over_time),
        *([_of_spread("unevenness_over_ranks", "each rank", spread_over_ranks(sample))] if plan.spec.world_size > 1 else []),
    )
    measures = {finding.name: finding.measures for finding in findings}
    graded = grade(sample, measures, np.count_nonzero(apart == 1) / max(len(apart), 1))
    return Report(
        sample=sample,
        findings=findings,
        windows=windows_of(sample),
        over_time=over_time,
        grade=graded,
        verdict=verdict(sample, graded, measures),
    )


def _of_neighbours(sample: Sample) -> Iterator[Finding]:
    if not len(sample.pairs.meet):
        return  # no sample has a neighbour
    distances, meet = neighbour_distances(sample), meeting_neighbours(sample)
    median = distances[0.5]
    yield Finding(
        name="neighbour_distance",
        unit="samples",
        says=f"Half of the rows that are neighbours in the source are served within {samples(median.measured, sample)} of each "
        f"other; in a uniform shuffle within {samples(median.expected, sample)}.",
        measure=median,
        quantiles=distances,
    )
    yield Finding(
        name="neighbours_in_one_batch",
        unit="share of the samples",
        says=f"{percent(meet.measured)} of the samples have their neighbour in the source in the same global batch; in a "
        f"uniform shuffle {percent(meet.expected)}.",
        measure=meet,
    )


def _of_consecutive(distances: IntArray, sizes: IntArray) -> Iterator[Finding]:
    if not len(distances):
        return  # no two consecutive samples are of one dataset
    measure = consecutive_distance(distances, sizes)
    yield Finding(
        name="consecutive_distance",
        unit="share of the source",
        says=f"Two samples served one after the other lie {percent(measure.measured)} of the source apart, on average; "
        f"in a uniform shuffle {percent(measure.expected)}.",
        measure=measure,
    )


def _of_batches(sample: Sample, unit: str) -> Finding:
    measure, num_units = distinct_per_batch(sample, unit)
    size = sample.batches.samples.shape[1]
    part = "A global batch of" if size == sample.samples_per_step else "Of a global batch, a stretch of"
    what = "pools of blocks" if unit == "blocks" and sample.plan.spec.packing == "best_fit" else unit
    return Finding(
        name=f"{unit}_per_batch",
        unit=what,
        says=f"{part} {number(size)} samples draws on {number(measure.measured)} of {number(num_units)} {what}; in a uniform "
        f"shuffle on {number(measure.expected)}.",
        measure=measure,
    )


def _of_spread(name: str, stretches: str, spread: Spread) -> Finding:
    measure = spread.unevenness
    return Finding(
        name=name,
        unit="share of the samples",
        says=f"{percent(measure.measured)} of the samples would have to move for {stretches} to show the same share of all "
        f"{spread.kind}; in a uniform shuffle of as many samples {percent(measure.expected)}.",
        measure=measure,
    )
