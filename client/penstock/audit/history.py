"""The history of a rank: what of its record led to where the run is, and what was thrown away."""

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
    """One leg of a course: what an iteration of a rank gave, as far as it led to where the run is.

    start, stop  positions from which on and up to which it is what counts; `stop` may be far past the epoch's end
    runs         its steps that were recorded, half-open; a step that was recorded again is in a run of its own
    has_end      it went through the epoch to its end
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
        """The epoch that it is of."""
        return self.begin.epoch

    @property
    def first_step(self) -> int:
        """The step at `start`."""
        return self.begin.step

    @property
    def has_last_step(self) -> bool:
        """Whether it gave the last step of the epoch."""
        return len(self.runs) > 0 and int(self.runs[-1, 1]) == self.slicing.num_steps


@dataclass(frozen=True, slots=True)
class Thrown:
    """Steps of a rank, half-open, that trained weights which were thrown away, and the start that resumed before them."""

    epoch: int
    steps: tuple[int, int]
    slicing: Slicing
    started: Start
    resumed: Start | None


@dataclass(frozen=True, slots=True)
class RankHistory:
    """What became of what a rank recorded. `legs`, of its course, are in the order in which they were trained on."""

    rank: int
    starts: list[Start]
    legs: list[Leg]
    thrown: list[Thrown]


def history_of(record: RankRecord, course: Course) -> RankHistory:
    """What became of it, with what of it led to where the run is."""
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
