"""Account of each epoch: the samples trained on once, never, and more than once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from penstock.audit.intervals import clip, covered, intervals, join, positions_of, size, without
from penstock.audit.lineage import Lineage, Start, place_of
from penstock.audit.reading import IntArray
from penstock.ledger.begin import Begin
from penstock.slicing import Slicing

# Tolerated difference between the ranks of a killed run, in steps: a GPU lags a few steps after its loop.
_IN_FLIGHT_STEPS = 16
_OPEN = 1 << 62


@dataclass(slots=True, eq=False)
class Leg:
    """What a start trained of an epoch under one slicing, and the run kept.

    begin        of the iteration with the earliest step
    first, stop  positions [first, stop) of the epoch; `stop` may be far past the epoch's end
    runs         by rank: steps as intervals; a repeated step begins another interval
    has_end      a rank reached the epoch's end
    """

    start: Start
    begin: Begin
    slicing: Slicing
    first: int
    stop: int
    runs: dict[int, IntArray] = field(default_factory=dict)
    has_end: bool = False

    @property
    def epoch(self) -> int:
        """Epoch that the start trained on."""
        return self.begin.epoch


@dataclass(frozen=True, slots=True)
class Gap:
    """Steps [start, stop) without a record of these ranks, although the run continued after them."""

    epoch: int
    steps: tuple[int, int]
    ranks: list[int]
    leg: Leg

    @property
    def positions(self) -> IntArray:
        """Positions of the samples in these steps."""
        return covered(positions_of(self.leg.slicing, dict.fromkeys(self.ranks, intervals([self.steps]))))


@dataclass(frozen=True, slots=True)
class Epoch:
    """Account of an epoch's samples. Intervals hold positions, sorted and disjoint.

    due          samples that were due: all except those skipped, dropped, or not reached when the run ended
    missing      due samples that were not trained on
    twice        samples that were trained on more than once
    num_repeated samples from the epoch's start that filled the last step under drop_last=false; they do not count as trained
                 on twice
    is_finished  the run came to the epoch's end, or left it for another epoch or order
    steps_done   step that all ranks reached, in steps of the last leg
    gaps         steps and ranks without records, for the missing samples
    """

    epoch: int
    num_samples: int
    num_skipped: int
    num_dropped: int
    num_repeated: int
    is_finished: bool
    steps_done: int
    due: IntArray
    missing: IntArray
    twice: IntArray
    gaps: list[Gap]
    legs: list[Leg]

    @property
    def num_due(self) -> int:
        """Number of due samples."""
        return size(self.due)

    @property
    def is_proven(self) -> bool:
        """Whether each due sample was trained on exactly once."""
        return not len(self.missing) and not len(self.twice)


def legs_of(lineage: Lineage) -> list[Leg]:
    """Return the legs of a lineage in the order of training, without those that only began an epoch."""
    legs: list[Leg] = []
    stop = (_OPEN, 0)  # the place where a later start resumed
    for start in reversed(lineage.kept):
        found: dict[tuple[int, Slicing], Leg] = {}
        for rank, segments in sorted(start.segments.items()):
            for segment in segments:
                epoch, first = place_of(segment.begin, segment.slicing)
                if epoch > stop[0]:
                    continue
                until = stop[1] if epoch == stop[0] else _OPEN
                leg = found.setdefault((epoch, segment.slicing), Leg(start, segment.begin, segment.slicing, first, until))
                if first < leg.first:
                    leg.begin, leg.first = segment.begin, first
                leg.runs[rank] = lineage.kept_runs(start, rank, segment)
                leg.has_end = leg.has_end or (segment.has_end and until == _OPEN)
        legs = [*found.values(), *legs]
        stop = min(stop, start.place) if start.place else (_OPEN, 0)
    legs = [leg for leg in legs if leg.first or leg.has_end or any(map(len, leg.runs.values()))]
    return [*_lost_legs(lineage, {leg.epoch for leg in legs}), *legs]


def _lost_legs(lineage: Lineage, recorded: set[int]) -> Iterator[Leg]:
    """Yield legs without steps: of the unrecorded epochs that a state was in."""
    for start in lineage.kept:
        epoch, position = start.place or (0, 0)
        if start.parent and position and epoch not in recorded:
            recorded.add(epoch)
            begin = start.parent.begin
            begin = replace(begin, epoch=epoch, step=0, spec=replace(begin.spec, offset=0))
            slicing = Slicing.of(begin.spec, begin.num_samples)
            yield Leg(start.parent, begin, slicing, first=0, stop=position, has_end=True)


def account_for(legs: Sequence[Leg], last: Leg | None, present: Sequence[int]) -> Iterator[Epoch]:
    """Yield the account of each epoch in the legs of one order of samples.

    `last` is the last leg of the run, if it is one of them; `present` are the ranks whose ledgers are there.
    """
    by_epoch: dict[int, list[Leg]] = {}
    for leg in legs:
        by_epoch.setdefault(leg.epoch, []).append(leg)
    for epoch, of_epoch in sorted(by_epoch.items()):
        yield _account(epoch, of_epoch, present if of_epoch[-1] is last else None)


def _account(epoch: int, legs: list[Leg], present: Sequence[int] | None) -> Epoch:
    """Account for one epoch; `present` is None if the run continued after it."""
    last = legs[-1]
    num_steps = last.slicing.num_steps
    runs = _runs(legs)
    done = num_steps if present is None else _pace(last, runs[last.slicing], present)
    is_finished = present is None or done >= num_steps or last.has_end
    done = max(num_steps, last.begin.step) if is_finished else done
    end = last.slicing.position(done)
    skipped = covered(join([clip(intervals(leg.slicing.skipped), leg.first, min(leg.stop, end)) for leg in legs]))
    due = without(intervals([(0, end)]), skipped)
    rest = intervals([(end, last.slicing.num_samples)] if is_finished else [])
    dropped = without(rest, intervals(last.slicing.skipped))
    trained = join([_positions(slicing, of_ranks) for slicing, of_ranks in runs.items()])
    missing, twice = without(due, trained), covered(trained, 2)
    return Epoch(
        epoch=epoch,
        num_samples=last.slicing.num_samples,
        num_skipped=size(skipped) + size(rest) - size(dropped),
        num_dropped=size(dropped),
        num_repeated=sum(leg.slicing.num_repeated for leg in legs if _has_last_step(leg)) if is_finished else 0,
        is_finished=is_finished,
        steps_done=done,
        due=due,
        missing=missing,
        twice=twice,
        gaps=list(_gaps(epoch, legs, runs, end)) if len(missing) else [],
        legs=legs,
    )


def _has_last_step(leg: Leg) -> bool:
    return any(len(runs) and int(runs[-1, 1]) == leg.slicing.num_steps for runs in leg.runs.values())


def _runs(legs: Sequence[Leg]) -> dict[Slicing, dict[int, IntArray]]:
    """Collect the steps that each rank trained on, by slicing; repeated steps appear repeatedly."""
    parts: dict[Slicing, dict[int, list[IntArray]]] = {}
    for leg in legs:
        of_ranks = parts.setdefault(leg.slicing, {})
        for rank, runs in leg.runs.items():
            if len(runs):
                of_ranks.setdefault(rank, []).append(runs)
    return {slicing: {rank: join(runs) for rank, runs in of_ranks.items()} for slicing, of_ranks in parts.items()}


def _positions(slicing: Slicing, runs: dict[int, IntArray]) -> IntArray:
    """Return the positions of steps; those of repeated steps appear repeatedly."""
    layers, times = [], 1
    while layer := {rank: steps for rank, run in runs.items() if len(steps := covered(run, times))}:
        layers.append(positions_of(slicing, layer))
        times += 1
    return join(layers)


def _pace(last: Leg, runs: dict[int, IntArray], present: Sequence[int]) -> int:
    """Return the step that the run reached: the slowest rank's, if ranks differ no more than in a killed run.

    Otherwise the fastest rank's: the records of the others are incomplete. Ranks without records do not count.
    """
    num_workers = last.begin.num_workers
    in_flight = max(_IN_FLIGHT_STEPS, 4 * num_workers)
    fastest = max((_front(last, runs.get(rank), 1) for rank in last.runs), default=last.begin.step)
    slowest = min(_front(last, runs.get(rank), num_workers) for rank in present if rank < last.slicing.world_size)
    return fastest if fastest - slowest > in_flight else min(slowest, fastest)


def _front(last: Leg, runs: IntArray | None, num_workers: int) -> int:
    """Return the step after a rank's last; with several loader workers, the next step of the slowest worker."""
    first = last.begin.step
    if runs is None:
        return first
    if num_workers < 2:
        return max(first, int(runs[:, 1].max(initial=0)))
    next_steps = {step % num_workers: step for step in range(first, first + num_workers)}
    for start, stop in runs.tolist():
        for step in range(max(start, stop - num_workers), stop):
            next_steps[step % num_workers] = max(next_steps[step % num_workers], step + num_workers)
    return min(next_steps.values())


def _gaps(epoch: int, legs: Sequence[Leg], runs: dict[Slicing, dict[int, IntArray]], end: int) -> Iterator[Gap]:
    for leg in legs:
        slicing = leg.slicing
        steps = (leg.begin.step, min(slicing.num_steps_before(min(leg.stop, end)), slicing.num_steps))
        ranks_of: dict[tuple[int, int], list[int]] = {}
        for rank, run in runs[slicing].items():
            for start, stop in without(intervals([steps]), run).tolist():
                ranks_of.setdefault((start, stop), []).append(rank)
        if steps[0] < steps[1] and (absent := [rank for rank in range(slicing.world_size) if rank not in runs[slicing]]):
            ranks_of.setdefault(steps, []).extend(absent)
        yield from (Gap(epoch, gap, sorted(ranks), leg) for gap, ranks in sorted(ranks_of.items()))
