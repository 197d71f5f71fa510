"""The record of a rank: its starts and iterations, summed up in a few numbers each, so that many ranks fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from penstock.audit.intervals import NONE, clip, join, runs_of
from penstock.audit.reading import IntArray, Part
from penstock.ledger.begin import Begin
from penstock.slicing import Slicing

Place = tuple[int, int]  # epoch and position
StartKey = tuple[Slicing, int, int, int, bool]


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a rank: from a process's begin, or from a state that was loaded into it, up to the next.

    number     from 0, of the rank's own
    begin      of its first iteration, of the worker that begins first; `last_step` is that at which the last one begins
    resumes    it loaded a state, or is taken for one that did
    in_run     the number of the leader's start that it is; None: of none
    """

    number: int
    begin: Begin
    last_step: int
    slicing: Slicing
    resumes: bool
    in_run: int | None = None

    @property
    def place(self) -> Place:
        """Where it begins."""
        return self.begin.epoch, self.slicing.position(self.begin.step)

    @property
    def key(self) -> StartKey:
        """Equal for the ranks that start together; a start from the same state has it again."""
        return self.slicing, self.begin.epoch, self.begin.step, self.last_step, self.resumes


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of a rank over an epoch, by all workers of its loader.

    begin        of the worker that begins first
    first_steps  of each worker, as its begin line has it
    runs         steps that were recorded, half-open, sorted, shape [runs, 2]; one that was recorded again begins a run anew
    own_runs     those of them up to where its run changed over to another order of samples; mostly all
    time         when it began, and `last_time` when it last went on after another; see Part
    """

    start: Start
    begin: Begin
    slicing: Slicing
    first_steps: dict[int, int]
    runs: IntArray
    own_runs: IntArray
    has_end: bool
    time: datetime
    last_time: datetime

    @property
    def place(self) -> Place:
        """Where it begins."""
        return self.begin.epoch, self.slicing.position(self.begin.step)

    @property
    def reach(self) -> Place:
        """Behind what it recorded, as far as that is of its run's order of samples."""
        runs = self.own_runs
        return self.begin.epoch, self.slicing.position(int(runs[-1, 1])) if len(runs) else self.place[1]

    def may_have_saved(self, resumed: Iteration) -> bool:
        """Whether the state with which another iteration resumes may be of this one: it was there, between two of its steps."""
        place, last = resumed.place, max([resumed.begin.step - 1, *resumed.steps_of_others()])
        came_by = self.place <= place and (place[0], resumed.slicing.position(last + 1)) <= self.reach
        between = self.slicing.position(self.slicing.num_steps_before(place[1]))
        # Under another slicing a state is counted in samples; see penstock.state.state.
        counts = not any(resumed.first_steps.values()) or self.slicing.counts_like(resumed.slicing)
        return came_by and between == place[1] and counts

    def runs_kept(self, runs: IntArray, other: Iteration) -> IntArray:
        """What of its runs is not thrown away where `other` resumes."""
        if self.begin.epoch != other.begin.epoch:
            return runs if self.begin.epoch < other.begin.epoch else NONE
        if self.slicing != other.slicing:
            return clip(runs, 0, self.slicing.num_steps_before(other.place[1]))
        if not len(runs) or runs[-1, 1] <= other.begin.step:
            return runs  # as mostly: of hundreds of starts only the next few begin before their end
        behind = [clip(runs, step, step + 1) for step in other.steps_of_others()]
        return join([clip(runs, 0, other.begin.step), *behind])

    def steps_of_others(self) -> list[int]:
        """The steps after its first that a worker which was ahead of another had done already when it began."""
        first, stride = self.begin.step, max(1, self.begin.num_workers)
        own = {worker: self.first_steps.get(worker, first) for worker in range(stride)}
        return sorted(step + worker for worker in own for step in range(first, own[worker], stride))


@dataclass(frozen=True, slots=True)
class Changed:
    """A batch that was recorded with different digests."""

    epoch: int
    rank: int
    step: int
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What a rank's ledgers hold of one order of samples, in the order in which the iterations began."""

    rank: int
    iterations: list[Iteration]
    changed: list[Changed]

    @property
    def starts(self) -> list[Start]:
        """Its starts, in their order."""
        return list({iteration.start.number: iteration.start for iteration in self.iterations}.values())

    @property
    def is_in_run(self) -> bool:
        """Whether each of its starts is one of the leader's."""
        return all(start.in_run is not None for start in self.starts)


def record_of(rank: int, parts: Sequence[Part], *, assume_fresh_weights: bool) -> RankRecord:
    """What a rank's files hold of one order, of all their parts.

    With `assume_fresh_weights` every start counts as one that loaded a state.
    """
    by_iteration: dict[tuple[object, ...], list[Part]] = {}
    for part in sorted(parts, key=lambda part: part.time):
        begin = part.begin
        number = -1 if begin.num_workers else begin.iteration  # of workers of one round not all need have the same
        name = (begin.launch, begin.num_loads, begin.round, number, begin.epoch, begin.spec)
        by_iteration.setdefault(name, []).append(part)
    iterations: list[Iteration] = []
    starts: dict[tuple[str, int], Start] = {}
    for joined in by_iteration.values():
        begins = sorted((part.begin for part in joined), key=lambda begin: begin.step)
        begin, last_step = begins[0], begins[-1].step
        resumes = assume_fresh_weights or _resumes(begin)
        start = Start(len(starts), begin, last_step, Slicing.of(begin.spec, begin.num_samples), resumes)
        iterations.append(_join(starts.setdefault((begin.launch, begin.num_loads), start), begin, joined))
    return RankRecord(rank, iterations, list(_changed(rank, parts)))


def _resumes(begin: Begin) -> bool:
    """Whether it goes on where a state was saved. One that set_epoch put into an epoch before that of its state does not."""
    went_back = not begin.num_workers and begin.state_epoch is not None and begin.state_epoch > begin.epoch
    return begin.num_loads > 0 and not went_back


def _join(start: Start, begin: Begin, parts: Sequence[Part]) -> Iteration:
    slicing, stop = Slicing.of(begin.spec, begin.num_samples), min(part.stop for part in parts)
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
