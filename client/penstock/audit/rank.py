"""One rank: what its ledgers say, summed up in a few numbers for each iteration, so that many ranks fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.audit.course import Course
from penstock.audit.history import Changed, Iteration, Kept, RankRecord, Start
from penstock.audit.intervals import clip, covered, runs_of, without
from penstock.audit.reading import IntArray, Part
from penstock.ledger import Begin
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


def record_of(rank: int, parts: Sequence[Part], *, trust_starts: bool) -> RankRecord:
    """What a rank's files hold of one order, of all their parts.

    With `trust_starts` every start counts as one that loaded a state.
    """
    by_iteration: dict[tuple[object, ...], list[Part]] = {}
    for part in sorted(parts, key=lambda part: part.time):
        begin = part.begin
        name = (begin.launch, begin.num_loads, begin.loader_seed, begin.iteration, begin.epoch, begin.spec)
        by_iteration.setdefault(name, []).append(part)
    iterations: list[Iteration] = []
    starts: dict[tuple[str, int], Start] = {}
    for joined in by_iteration.values():
        begins = sorted((part.begin for part in joined), key=lambda begin: begin.step)
        begin, last_step = begins[0], begins[-1].step
        resumes = trust_starts or begin.num_loads > 0
        start = Start(len(starts), begin, last_step, Slicing.of(begin.spec, begin.num_sequences), resumes)
        iterations.append(_join(starts.setdefault((begin.launch, begin.num_loads), start), begin, joined))
    return RankRecord(rank, iterations, list(_changed(rank, parts)))


def history_of(record: RankRecord, course: Course) -> RankHistory:
    """What became of it, with what of it led to where the run is."""
    thrown = list(_thrown(record, course))
    return RankHistory(record.rank, record.starts, [_leg(kept) for kept in course], thrown)


def _join(start: Start, begin: Begin, parts: Sequence[Part]) -> Iteration:
    slicing, stop = Slicing.of(begin.spec, begin.num_sequences), min(part.stop for part in parts)
    runs = runs_of(np.sort(np.concatenate([part.steps for part in parts])))
    is_own = stop >= slicing.num_positions
    return Iteration(
        start=start,
        begin=begin,
        slicing=slicing,
        first_steps={part.begin.worker: part.begin.step for part in parts},
        runs=runs,
        own_runs=runs if is_own else clip(runs, 0, slicing.num_steps_within(stop)),
        has_end=is_own and all(part.has_end for part in parts),
        time=min(part.time for part in parts),
        last_time=max(part.last_time for part in parts),
    )


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


def _changed(rank: int, parts: Sequence[Part]) -> Iterator[Changed]:
    by_address: dict[tuple[object, ...], list[Part]] = {}
    for part in parts:
        by_address.setdefault((part.begin.spec, part.begin.epoch), []).append(part)
    for same in by_address.values():
        steps = np.concatenate([part.steps for part in same])
        digests = np.concatenate([part.digests for part in same])
        order = np.argsort(steps, kind="stable")
        steps, digests = steps[order], digests[order]
        differs = (steps[1:] == steps[:-1]) & (digests[1:] != digests[:-1])
        has_changed = np.isin(steps, steps[1:][differs])
        seen: dict[int, dict[str, None]] = {}
        for step, digest in zip(steps[has_changed].tolist(), digests[has_changed].tolist(), strict=True):
            seen.setdefault(step, {})[f"{digest:016x}"] = None
        yield from (Changed(same[0].begin.epoch, rank, step, tuple(found)) for step, found in seen.items())
