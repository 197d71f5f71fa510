"""Record of a rank: its starts and iterations, a few numbers each, so that many ranks fit into memory."""

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
    """One start of a rank: from the begin of a process, or from a loaded state, up to the next start.

    number     counts the rank's starts from 0
    begin      of its first iteration, in the worker with the earliest step; `last_step` is the latest worker's first step
    resumes    it loaded a state, or counts as if it did
    in_run     number of the matching start of the leader; None without a match
    """

    number: int
    begin: Begin
    last_step: int
    slicing: Slicing
    resumes: bool
    in_run: int | None = None

    @property
    def place(self) -> Place:
        """Place where the start begins."""
        return self.begin.epoch, self.slicing.position(self.begin.step)

    @property
    def key(self) -> StartKey:
        """Equal for ranks that start together, and for later starts from the same state."""
        return self.slicing, self.begin.epoch, self.begin.step, self.last_step, self.resumes


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of a rank over an epoch, by all workers of its loader.

    begin        of the worker with the earliest step
    first_steps  by worker: the step of its begin line
    runs         recorded steps as half-open intervals, sorted, shape [runs, 2]; a repeated step begins another interval
    own_runs     the part of `runs` before the run changed to another order of samples; mostly all
    time         its begin; `last_time` is when it last continued after another iteration; see Part
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
        """Place where the iteration begins."""
        return self.begin.epoch, self.slicing.position(self.begin.step)

    @property
    def reach(self) -> Place:
        """Place after its last recorded step in its run's order of samples."""
        runs = self.own_runs
        return self.begin.epoch, self.slicing.position(int(runs[-1, 1])) if len(runs) else self.place[1]

    def may_have_saved(self, resumed: Iteration) -> bool:
        """Whether this iteration may have saved the state that `resumed` loaded: it came there, between two steps."""
        place, last = resumed.place, max([resumed.begin.step - 1, *resumed.steps_of_others()])
        came_by = self.place <= place and (place[0], resumed.slicing.position(last + 1)) <= self.reach
        between = self.slicing.position(self.slicing.num_steps_before(place[1]))
        # Under another slicing a state is counted in samples; see penstock.state.state.
        counts = not any(resumed.first_steps.values()) or self.slicing.counts_like(resumed.slicing)
        return came_by and between == place[1] and counts

    def runs_kept(self, runs: IntArray, other: Iteration) -> IntArray:
        """Return the part of its runs that is kept after `other` resumes."""
        if self.begin.epoch != other.begin.epoch:
            return runs if self.begin.epoch < other.begin.epoch else NONE
        if self.slicing != other.slicing:
            return clip(runs, 0, self.slicing.num_steps_before(other.place[1]))
        if not len(runs) or runs[-1, 1] <= other.begin.step:
            return runs  # the usual case: of hundreds of starts only the next few begin before this end
        behind = [clip(runs, step, step + 1) for step in other.steps_of_others()]
        return join([clip(runs, 0, other.begin.step), *behind])

    def steps_of_others(self) -> list[int]:
        """Return steps after the first that workers ahead of the slowest had already done at the begin."""
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
    """Records of a rank in one order of samples, sorted by the iterations' begins."""

    rank: int
    iterations: list[Iteration]
    changed: list[Changed]

    @property
    def starts(self) -> list[Start]:
        """Starts of the rank, in order."""
        return list({iteration.start.number: iteration.start for iteration in self.iterations}.values())

    @property
    def is_in_run(self) -> bool:
        """Whether each of its starts is one of the leader's."""
        return all(start.in_run is not None for start in self.starts)


def record_of(rank: int, parts: Sequence[Part], *, assume_fresh_weights: bool) -> RankRecord:
    """Build a rank's record in one order, from the parts of all its files.

    With `assume_fresh_weights` each start counts as if it loaded a state.
    """
    by_iteration: dict[tuple[object, ...], list[Part]] = {}
    for part in sorted(parts, key=lambda part: part.time):
        begin = part.begin
        number = -1 if begin.num_workers else begin.iteration  # workers of one pass may have different numbers
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
    """Whether it continues from a saved state. It does not if set_epoch chose an epoch before the state's."""
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
