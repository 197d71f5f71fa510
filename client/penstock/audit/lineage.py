"""Lineage of a run: its starts, the parent of each, and the steps that the run's last weights were trained on.

Each start has an id, and a state holds the id of the start that saved it. So the ledgers tell the parent of each start:

    start 1             0 ............ 60 ............ 90 ... 100
    start 2, of start 1                60 ..... 80
    start 3, of start 1                                90 ............ 150

    kept       start 1 [0, 90), start 3 [90, 150)
    discarded  start 1 [90, 100), start 2 [60, 80)

A start without a state continues with the weights that are there, after all steps of the start before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

import numpy as np

from penstock.audit.intervals import NONE, clip, intervals, intervals_of, join
from penstock.audit.reading import IntArray, Section
from penstock.ledger.begin import Begin
from penstock.slicing import Slicing

Place = tuple[int, int]  # epoch, position
_OPEN = 1 << 62  # past every epoch's end


@dataclass(slots=True, eq=False)
class Segment:
    """What a start recorded of an epoch under one slicing: of one rank, then of all. A few numbers a rank fit into memory.

    begin    of the iteration with the earliest step
    time     of the first iteration
    place    of the start's state, in the loader worker that was furthest behind; None without a state
    steps    by rank: intervals; a repeated step begins another interval
    kept     the same, of the steps that the last weights were trained on
    firsts   by rank: the first step of each loader worker that began at the start's state
    stop     a later start resumed at this position; far past the epoch's end without one, -1 if in an earlier epoch
    has_end  a rank reached the epoch's end, and no later start resumed before it
    """

    begin: Begin
    slicing: Slicing
    time: datetime
    place: Place | None
    has_end: bool
    firsts: dict[int, dict[int, int]] = field(default_factory=dict)
    steps: dict[int, IntArray] = field(default_factory=dict)
    kept: dict[int, IntArray] = field(default_factory=dict)
    stop: int = 0
    start: Start = field(init=False)

    @property
    def epoch(self) -> int:
        """Epoch of the steps."""
        return self.begin.epoch

    @property
    def first(self) -> int:
        """Position where the earliest iteration began."""
        return self.slicing.position(self.begin.step)

    @property
    def is_kept(self) -> bool:
        """Whether the last weights were trained on it; not if it only began an epoch."""
        # Loader workers may have kept steps of an epoch that a later start's place is before.
        return any(map(len, self.kept.values())) or (self.stop >= 0 and (self.first > 0 or self.has_end))

    def add(self, other: Segment) -> None:
        """Add what another rank recorded."""
        self.begin = min(self.begin, other.begin, key=lambda begin: begin.step)
        self.steps |= {rank: join([self.steps.get(rank, NONE), steps]) for rank, steps in other.steps.items()}
        self.firsts |= other.firsts
        self.has_end |= other.has_end


def segments_of(sections: Iterable[Section]) -> Iterator[Segment]:
    """Yield what each rank recorded of each epoch of each start, from the sections of its ledgers."""
    groups: dict[object, list[Section]] = {}
    for section in sorted(sections, key=lambda section: section.time):
        begin = section.begin
        slicing = Slicing.of(begin.spec, begin.num_samples)
        key = (begin.dataset, begin.spec.split, begin.rank, begin.start, begin.epoch, slicing)
        groups.setdefault(key, []).append(section)
    for group in groups.values():
        begins = [section.begin for section in group]
        slicing, rank = Slicing.of(begins[0].spec, begins[0].num_samples), begins[0].rank
        places = {begin: (begin.parent_epoch, begin.parent_samples) for begin in begins if begin.parent}
        num_ended = Counter[tuple[int, int]]()  # workers of a pass
        for section in group:
            num_ended[section.begin.pass_name, section.begin.num_workers] += section.has_end
        firsts = {
            begin.worker: begin.step
            for begin, place in places.items()
            if begin.num_workers and place == (begin.epoch, slicing.position(begin.step))
        }
        yield Segment(
            begin=min(begins, key=lambda begin: begin.step),
            slicing=slicing,
            time=group[0].time,
            place=min(places.values(), default=None),
            has_end=any(number >= max(1, num_workers) for (_, num_workers), number in num_ended.items()),
            firsts={rank: firsts},
            steps={rank: intervals_of(np.sort(np.concatenate([section.steps for section in group])))},
        )


@dataclass(slots=True, eq=False)
class Start:
    """A start of a run, over all ranks that recorded it; `number` counts from 1.

    begin     of its first iteration on its lowest rank
    parent    the start whose state it loaded; without a state, the start before it; None without one
    places    by rank, the place of its state; empty without a state
    times     by rank, the time of its first iteration
    segments  by epoch and slicing
    """

    number: int
    begin: Begin
    parent: Start | None = None
    places: dict[int, Place] = field(default_factory=dict)
    times: dict[int, datetime] = field(default_factory=dict)
    segments: dict[tuple[int, Slicing], Segment] = field(default_factory=dict)

    @property
    def place(self) -> Place | None:
        """The place of its state on its lowest rank; None without a state."""
        return next(iter(self.places.values()), None)

    def add(self, rank: int, one: Segment) -> None:
        """Add what a rank recorded of an epoch."""
        key = one.epoch, one.slicing
        if key in self.segments:
            self.segments[key].add(one)
        else:
            self.segments[key], one.start = one, self
        self.times.setdefault(rank, one.time)
        if one.place:
            self.places[rank] = min(one.place, self.places.get(rank, one.place))


@dataclass(frozen=True, slots=True)
class Lineage:
    """Starts of one dataset and split.

    starts    all starts, in the order of the lowest rank
    kept      the last start and its ancestors, the oldest first
    segments  those that the last weights were trained on, in the order of training
    """

    starts: list[Start]
    kept: list[Start]
    segments: list[Segment]

    def next_of(self, start: Start) -> Start | None:
        """Return the kept start that resumed before steps of this one; None without one."""
        ancestor: Start | None = start
        while ancestor and ancestor not in self.kept:
            ancestor = ancestor.parent
        later = self.kept[self.kept.index(ancestor) + 1 :] if ancestor else []
        return later[0] if later and later[0].place else None


def lineage_of(segments: Iterable[Segment], *, assume_fresh_weights: bool) -> Lineage:
    """Build the lineage from the segments of all ranks.

    With `assume_fresh_weights`, a start without a state discards all records before it.
    """
    by_rank: dict[int, dict[str, list[Segment]]] = {}
    for one in sorted(segments, key=lambda one: (one.begin.rank, one.time)):
        by_rank.setdefault(one.begin.rank, {}).setdefault(one.begin.start, []).append(one)
    starts, by_id = list[Start](), dict[str, Start]()
    for rank, of_rank in by_rank.items():
        shares_ids = bool(of_rank.keys() & by_id.keys())
        for start_id, group in of_rank.items():
            if start_id not in by_id and not shares_ids:
                _match(starts, by_id, rank, of_rank, start_id)
            if start_id not in by_id:
                by_id[start_id] = Start(len(starts) + 1, group[0].begin)
                starts.append(by_id[start_id])
            for one in group:
                by_id[start_id].add(rank, one)
    lowest = min(by_rank)
    before: Start | None = None
    for start in starts:
        if start.begin.parent:
            start.parent = by_id.get(start.begin.parent)
        elif not assume_fresh_weights and lowest in start.times:
            start.parent = before
        before = start
    kept = [[start for start in starts if lowest in start.times][-1]]
    while (parent := kept[-1].parent) and parent not in kept:
        kept.append(parent)
    return Lineage(starts, kept[::-1], _kept_segments(kept))


def _match(
    starts: Sequence[Start], by_id: dict[str, Start], rank: int, of_rank: Mapping[str, list[Segment]], start_id: str
) -> None:
    """Find the starts of lower ranks that this rank recorded under other ids, as ranks without torch.distributed do.

    They are the starts with the same parent, begin and spec, in their order. If their numbers differ, none is found.
    """

    def key(begin: Begin) -> tuple[object, ...]:
        parent = by_id.get(begin.parent)
        return parent.number if parent else begin.parent, begin.epoch, begin.step, begin.spec, begin.num_samples

    begins = {one: group[0].begin for one, group in of_rank.items() if one not in by_id}
    same = [one for one, begin in begins.items() if key(begin) == key(begins[start_id])]
    others = [start for start in starts if rank not in start.times and key(start.begin) == key(begins[start_id])]
    if len(others) == len(same):
        by_id.update(zip(same, others, strict=True))


def _kept_segments(kept: Sequence[Start]) -> list[Segment]:
    """Cut the segments of these starts, the latest first, where later ones resumed; return those with steps left."""
    segments = list[Segment]()
    later = list[Start]()  # starts that resumed from this one, or from one after it
    for start in kept:
        epoch, position = min((one.place for one in later if one.place), default=(_OPEN, 0))
        for segment in start.segments.values():
            segment.stop = position if segment.epoch == epoch else _OPEN if segment.epoch < epoch else -1
            segment.has_end &= segment.stop == _OPEN
            for rank, steps in segment.steps.items():
                for one in later:
                    steps = _cut(steps, segment, one, rank)
                segment.kept[rank] = steps
        segments = [*filter(lambda segment: segment.is_kept, start.segments.values()), *segments]
        later = [*later, start] if start.place else []  # a start without a state keeps all that was trained before it
    return [*_lost_segments(kept[::-1], {segment.epoch for segment in segments}), *segments]


def _lost_segments(kept: Sequence[Start], epochs: set[int]) -> Iterator[Segment]:
    """Yield segments without steps: of the unrecorded epochs that a state was in."""
    for start in kept:
        epoch, position = start.place or (0, 0)
        if start.parent and position and epoch not in epochs:
            epochs.add(epoch)
            begin = start.parent.begin
            begin = replace(begin, epoch=epoch, step=0, spec=replace(begin.spec, offset=0))
            slicing = Slicing.of(begin.spec, begin.num_samples)
            lost = Segment(begin, slicing, begin.time, place=None, has_end=True, stop=position)
            lost.start = start.parent
            yield lost


def _cut(steps: IntArray, segment: Segment, later: Start, rank: int) -> IntArray:
    """Return the steps that remain after a later start resumed."""

    def firsts(epoch: int) -> dict[int, int]:
        resumed = later.segments.get((epoch, segment.slicing))
        return resumed.firsts.get(rank, {}) if resumed else {}

    assert later.place
    epoch, position = later.places.get(rank, later.place)
    begun = firsts(segment.epoch)
    if not begun:
        if segment.epoch != epoch:
            return steps if segment.epoch < epoch else NONE
        return clip(steps, 0, segment.slicing.num_steps_before(position))
    # Each loader worker resumed at its own step: some had yielded steps after the first step of the slowest. Where the workers'
    # turn crosses the border of two epochs, some resumed before it and the others after it.
    num_steps, stride = segment.slicing.num_steps, later.segments[segment.epoch, segment.slicing].begin.num_workers
    some_ended = max(begun.values()) >= num_steps or firsts(segment.epoch + 1)
    stops = [0 if epoch < segment.epoch else num_steps if some_ended else min(begun.values())] * stride
    for worker, step in begun.items():
        if step < num_steps:
            stops[(step + worker) % stride] = step + worker
    first = min(stops)
    turns = (range(first + (number - first) % stride, stop, stride) for number, stop in enumerate(stops))
    ahead = intervals((at, at + 1) for turn in turns for at in turn)
    return join([clip(steps, 0, first), *(clip(steps, start, stop) for start, stop in ahead.tolist())])
