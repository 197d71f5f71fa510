"""Lineage of a run: its starts, which one resumed from which, and the steps of each that its last weights were trained on.

Each start has an id, and a state holds the id of the start that saved it. So the ledgers tell which start resumed from which:

    start 1             0 ............ 60 ............ 90 ... 100
    start 2, of start 1                60 ..... 80
    start 3, of start 1                                90 ............ 150

    kept       start 1 [0, 90), start 3 [90, 150)
    discarded  start 1 [90, 100), start 2 [60, 80)

A start without a state continues with the weights that are there, after all steps of the start before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import numpy as np

from penstock.audit.intervals import NONE, clip, join, runs_of
from penstock.audit.reading import IntArray, Part
from penstock.ledger.begin import Begin
from penstock.slicing import Slicing

Place = tuple[int, int]  # epoch, position


@dataclass(frozen=True, slots=True)
class Segment:
    """Recorded steps of one rank in an epoch of one start, under one slicing.

    begin    of the iteration with the earliest step
    firsts   of the workers that began at the start's state: the first step of each
    runs     steps as intervals, sorted; a repeated step begins another interval
    has_end  an iteration reached the epoch's end
    """

    begin: Begin
    slicing: Slicing
    firsts: dict[int, int]
    runs: IntArray
    has_end: bool


@dataclass(slots=True, eq=False)
class Start:
    """A start of a run, over all ranks that recorded it; `number` counts from 1.

    begin     of the first iteration of its lowest rank
    parent    the start whose state it loaded; without a state, the start before it; None without one
    places    by rank, the place of its state; empty without a state
    segments  by rank, in the order of their begins
    """

    number: int
    begin: Begin
    parent: Start | None = None
    places: dict[int, Place] = field(default_factory=dict)
    segments: dict[int, list[Segment]] = field(default_factory=dict)

    @property
    def place(self) -> Place | None:
        """The place of its state on its lowest rank; None without a state."""
        return next(iter(self.places.values()), None)


@dataclass(frozen=True, slots=True)
class Lineage:
    """Starts of one dataset and split.

    starts  all starts, in the order of the lowest rank
    kept    the last start and its ancestors, the oldest first
    """

    starts: list[Start]
    kept: list[Start]

    def next_of(self, start: Start) -> Start | None:
        """Return the kept start that resumed before steps of this one; None without one."""
        ancestor: Start | None = start
        while ancestor and ancestor not in self.kept:
            ancestor = ancestor.parent
        if ancestor is None:
            return None
        later = self.kept[self.kept.index(ancestor) + 1 :]
        return later[0] if later and later[0].place else None

    def kept_runs(self, start: Start, rank: int, segment: Segment) -> IntArray:
        """Return the steps of a segment that the last weights were trained on."""
        if start not in self.kept:
            return NONE
        runs = segment.runs
        for later in self.kept[self.kept.index(start) + 1 :]:
            if later.place is None:  # it kept all weights before it
                return runs
            runs = _cut(runs, segment, later, rank)
        return runs


def place_of(begin: Begin, slicing: Slicing) -> Place:
    """Return the place where an iteration begins."""
    return begin.epoch, slicing.position(begin.step)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one rank recorded of a start: its first iteration and its time, the place of its state, and its segments."""

    first: Begin
    time: datetime
    place: Place | None
    segments: list[Segment]


RankRecord = Mapping[str, Recorded]  # by id of the start, in the order of their begins


def record_of(parts: Sequence[Part]) -> RankRecord:
    """Return the starts of one rank: a few numbers each, so that many ranks fit into memory."""
    by_start: dict[str, list[Part]] = {}
    for part in sorted(parts, key=lambda part: part.time):
        by_start.setdefault(part.begin.start, []).append(part)
    record = {}
    for start, its_parts in by_start.items():
        places = [(part.begin.parent_epoch, part.begin.parent_samples) for part in its_parts if part.begin.parent]
        record[start] = Recorded(_first_of(its_parts), its_parts[0].time, min(places, default=None), list(_segments(its_parts)))
    return record


def lineage_of(records: Mapping[int, RankRecord], *, assume_fresh_weights: bool) -> Lineage:
    """Build the lineage from the records of all ranks.

    With `assume_fresh_weights`, a start without a state discards all records before it.
    """
    starts, by_id = list[Start](), dict[str, Start]()
    for rank, record in sorted(records.items()):
        shares_ids = bool(record.keys() & by_id.keys())
        for start_id, recorded in record.items():
            if start_id not in by_id and not shares_ids:
                _match(starts, by_id, rank, record, start_id)
            if start_id not in by_id:
                by_id[start_id] = Start(len(starts) + 1, recorded.first)
                starts.append(by_id[start_id])
            by_id[start_id].segments[rank] = recorded.segments
            if recorded.place:
                by_id[start_id].places[rank] = recorded.place
    lowest = min(records)
    before: Start | None = None
    for start in starts:
        if start.begin.parent:
            start.parent = by_id.get(start.begin.parent)
        elif not assume_fresh_weights and lowest in start.segments:
            start.parent = before
        before = start
    kept = [[start for start in starts if lowest in start.segments][-1]]
    while (parent := kept[-1].parent) and parent not in kept:
        kept.append(parent)
    return Lineage(starts, kept[::-1])


def _match(starts: Sequence[Start], by_id: dict[str, Start], rank: int, record: RankRecord, start_id: str) -> None:
    """Find the starts of lower ranks that this rank recorded under other ids, as ranks without torch.distributed do.

    They are the starts with the same parent, begin and spec, in their order. If their numbers differ, none is found.
    """

    def key(begin: Begin) -> tuple[object, ...]:
        parent = by_id.get(begin.parent)
        return parent.number if parent else begin.parent, begin.epoch, begin.step, begin.spec, begin.num_samples

    begins = {one: recorded.first for one, recorded in record.items() if one not in by_id}
    same = [one for one, begin in begins.items() if key(begin) == key(begins[start_id])]
    others = [start for start in starts if rank not in start.segments and key(start.begin) == key(begins[start_id])]
    if len(others) == len(same):
        by_id.update(zip(same, others, strict=True))


def _first_of(parts: Sequence[Part]) -> Begin:
    """Return the begin of the first iteration, in the loader worker with the earliest step."""
    first = parts[0].begin
    same = (part.begin for part in parts if (part.begin.epoch, part.begin.pass_name) == (first.epoch, first.pass_name))
    return min(same, key=lambda begin: begin.step) if first.num_workers else first


def _segments(parts: Sequence[Part]) -> Iterator[Segment]:
    """Yield the segments of a start of one rank."""
    by_slicing: dict[tuple[int, Slicing], list[Part]] = {}
    for part in parts:
        slicing = Slicing.of(part.begin.spec, part.begin.num_samples)
        by_slicing.setdefault((part.begin.epoch, slicing), []).append(part)
    for (_, slicing), group in by_slicing.items():
        begin = min((part.begin for part in group), key=lambda begin: begin.step)
        num_ended: dict[tuple[int, int], int] = {}
        for part in group:
            one = (part.begin.pass_name, part.begin.num_workers)
            num_ended[one] = num_ended.get(one, 0) + part.has_end
        yield Segment(
            begin=begin,
            slicing=slicing,
            firsts={
                part.begin.worker: part.begin.step for part in group if part.begin.num_workers and _is_at_state(part, slicing)
            },
            runs=runs_of(np.sort(np.concatenate([part.steps for part in group]))),
            has_end=any(number >= max(1, num_workers) for (_, num_workers), number in num_ended.items()),
        )


def _is_at_state(part: Part, slicing: Slicing) -> bool:
    begin = part.begin
    return bool(begin.parent) and place_of(begin, slicing) == (begin.parent_epoch, begin.parent_samples)


def _cut(runs: IntArray, segment: Segment, later: Start, rank: int) -> IntArray:
    """Return the steps that remain after a later start resumed."""
    assert later.place
    epoch, position = later.places.get(rank, later.place)
    if segment.begin.epoch != epoch:
        return runs if segment.begin.epoch < epoch else NONE
    lanes = [
        one for one in later.segments.get(rank, []) if one.slicing == segment.slicing and len(set(one.firsts.values())) > 1
    ]
    if not lanes:
        return clip(runs, 0, segment.slicing.num_steps_before(position))
    # Each loader worker resumed where it was: some had yielded steps after the first step of the slowest.
    [*_, resumed] = lanes
    first, stride = min(resumed.firsts.values()), resumed.begin.num_workers
    ahead = sorted(step + worker for worker, stop in resumed.firsts.items() for step in range(first, stop, stride))
    return join([clip(runs, 0, first), *(clip(runs, step, step + 1) for step in ahead)])
