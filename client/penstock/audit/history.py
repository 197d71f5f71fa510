"""History of a rank: the part of its record on the run's course, and the part that was thrown away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.audit.intervals import covered, without
from penstock.audit.lineage import Course, Kept
from penstock.audit.reading import IntArray
from penstock.audit.record import RankRecord, Start
from penstock.ledger.begin import Begin
from penstock.slicing import Slicing

_OPEN = 1 << 62


@dataclass(frozen=True, slots=True)
class Leg:
    """One leg of a course: the kept part of a rank's iteration.

    start, stop  positions [start, stop) of the leg; `stop` may be far past the epoch's end
    runs         recorded steps as half-open intervals; a repeated step begins another interval
    has_end      the iteration reached the epoch's end
    """

    begin: Begin
    slicing: Slicing
    start: int
    stop: int
    runs: IntArray
    started: Start
    has_end: bool

    @property
    def epoch(self) -> int:
        """Epoch of the leg."""
        return self.begin.epoch

    @property
    def first_step(self) -> int:
        """Step at `start`."""
        return self.begin.step

    @property
    def has_last_step(self) -> bool:
        """Whether it recorded the last step of the epoch."""
        return len(self.runs) > 0 and int(self.runs[-1, 1]) == self.slicing.num_steps


@dataclass(frozen=True, slots=True)
class Thrown:
    """Steps [start, stop) of a rank whose trained weights were discarded, and the start that resumed before them."""

    epoch: int
    steps: tuple[int, int]
    slicing: Slicing
    started: Start
    resumed: Start | None


@dataclass(frozen=True, slots=True)
class RankHistory:
    """Fate of a rank's record. `legs` is its course in the order of training."""

    rank: int
    starts: list[Start]
    legs: list[Leg]
    thrown: list[Thrown]


def history_of(record: RankRecord, course: Course) -> RankHistory:
    """Split a rank's record into its course and the steps that were thrown away."""
    thrown = list(_thrown(record, course))
    return RankHistory(record.rank, record.starts, [_leg(kept) for kept in course], thrown)


def _leg(kept: Kept) -> Leg:
    iteration = kept.iteration
    epoch, position = iteration.place
    stop = kept.stop
    return Leg(
        begin=iteration.begin,
        slicing=iteration.slicing,
        start=position,
        stop=_OPEN if stop is None or stop[0] > epoch else stop[1] if stop[0] == epoch else position,
        runs=kept.runs,
        started=iteration.start,
        has_end=iteration.has_end and not kept.resumed,
    )


def _thrown(record: RankRecord, course: Course) -> Iterator[Thrown]:
    starts = record.starts
    kept_of = {id(kept.iteration): kept for kept in course}
    for iteration in record.iterations:
        kept = kept_of.get(id(iteration))
        runs = without(iteration.runs, kept.runs) if kept else covered(iteration.runs)
        if kept and kept.resumed:
            resumed: Start | None = kept.resumed[0].start
        else:
            resumed = next((start for start in starts if start.number > iteration.start.number and start.resumes), None)
        for run in runs.tolist():
            yield Thrown(iteration.begin.epoch, (run[0], run[1]), iteration.slicing, iteration.start, resumed)
