"""Account of each epoch: the samples trained on once, never, and more than once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.audit.history import Leg, RankHistory
from penstock.audit.intervals import clip, covered, intervals, join, size, without
from penstock.audit.positions import positions_of
from penstock.audit.reading import IntArray
from penstock.slicing import Slicing

# Tolerated difference between the ranks of a killed run, in steps: a GPU lags a few steps after its loop.
_IN_FLIGHT_STEPS = 16


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
        run = intervals([self.steps])
        return covered(positions_of(self.leg.slicing, dict.fromkeys(self.ranks, run)))


@dataclass(frozen=True, slots=True)
class Epoch:
    """Account of an epoch's samples. Intervals hold positions, sorted and disjoint.

    due          samples that were due: all except those skipped, dropped, or not reached when the run ended
    missing      due samples that were not trained on
    twice        samples that were trained on more than once
    num_repeated samples from the epoch's start that filled the last step under drop_last=false; they do not count as trained
                 on twice
    num_ahead    samples that only some ranks had taken when the run ended
    is_finished  the run came to the epoch's end, or left it for another epoch or order
    steps_done   step that all ranks reached, in steps of the last leg
    gaps         steps and ranks without records, for the missing samples
    legs         the run's course through the epoch
    """

    epoch: int
    num_samples: int
    num_skipped: int
    num_dropped: int
    num_repeated: int
    num_ahead: int
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


def account_for(leader: RankHistory, ranks: Sequence[RankHistory], *, is_left: bool) -> Iterator[Epoch]:
    """Yield the account of each epoch that a run began, from the histories of all ranks in one order of samples.

    `is_left`: the run continued from the last epoch in another order.
    """
    last = leader.legs[-1]
    later = [leg for h in ranks for leg in h.legs if leg.started.in_run == last.started.in_run and leg.epoch > last.epoch]
    course = leader.legs + list({leg.epoch: leg for leg in later}.values())
    by_epoch: dict[int, list[Leg]] = {}
    for leg in course:
        by_epoch.setdefault(leg.epoch, []).append(leg)
    runs = _runs(ranks)
    for epoch, legs in sorted(by_epoch.items()):
        own = {leg.slicing: runs.get((epoch, leg.slicing), {}) for leg in legs}
        yield _account(epoch, legs, own, ranks if legs[-1] is course[-1] and not is_left else None)


def _account(
    epoch: int, legs: list[Leg], runs: dict[Slicing, dict[int, IntArray]], ranks: Sequence[RankHistory] | None
) -> Epoch:
    """Account for one epoch. `ranks` show how far the run came in its last epoch; None for earlier epochs."""
    last = legs[-1]
    num_steps = last.slicing.num_steps
    done = _pace(last, ranks) if ranks else num_steps
    is_finished = not ranks or done >= num_steps or _has_ended(last, ranks)
    done = max(num_steps, last.first_step) if is_finished else done
    end = last.slicing.position(done)
    skipped = covered(join([clip(intervals(leg.slicing.skipped), leg.start, min(leg.stop, end)) for leg in legs]))
    due = without(intervals([(0, end)]), skipped)
    rest = intervals([(end, last.slicing.num_positions)] if is_finished else [])
    dropped = without(rest, intervals(last.slicing.skipped))
    given = join([_given(slicing, runs[slicing], legs) for slicing in runs])
    missing, twice = without(due, given), covered(join([covered(given, 2), *_again(legs)]))
    return Epoch(
        epoch=epoch,
        num_samples=last.slicing.num_positions,
        num_skipped=size(skipped) + size(rest) - size(dropped),
        num_dropped=size(dropped),
        num_repeated=sum(leg.slicing.num_repeated for leg in legs if leg.has_last_step) if is_finished else 0,
        num_ahead=0 if is_finished or len(twice) else size(clip(given, end, last.slicing.num_positions)),
        is_finished=is_finished,
        steps_done=done,
        due=due,
        missing=missing,
        twice=twice,
        gaps=list(_gaps(epoch, legs, runs, end)) if len(missing) else [],
        legs=legs,
    )


def _has_ended(last: Leg, ranks: Sequence[RankHistory]) -> bool:
    """Whether any rank reached the end of the epoch."""
    same = (leg for h in ranks for leg in h.legs if (leg.epoch, leg.started.in_run) == (last.epoch, last.started.in_run))
    return any(leg.has_end for leg in same)


def _pace(last: Leg, ranks: Sequence[RankHistory]) -> int:
    """Return the step that the run reached: the slowest rank's, if ranks differ no more than in a killed run.

    Otherwise the fastest rank's: the records of the others are incomplete. Ranks without records do not count.
    """
    in_flight = max(_IN_FLIGHT_STEPS, 4 * last.begin.num_workers)
    present = [history for history in ranks if history.rank < last.slicing.world_size]
    took_part = [h for h in present if any(leg.started.in_run == last.started.in_run for leg in h.legs[-1:])]
    fastest = max((_front(last, history, 1) for history in took_part), default=last.first_step)
    slowest = min(_front(last, history, last.begin.num_workers) for history in present)
    return fastest if fastest - slowest > in_flight else min(slowest, fastest)


def _front(last: Leg, history: RankHistory, num_workers: int) -> int:
    """Return the step after a rank's last; with several loader workers, the next step of the slowest worker."""
    runs = join([leg.runs for leg in history.legs if (leg.epoch, leg.slicing) == (last.epoch, last.slicing)])
    if num_workers < 2:
        return max(last.first_step, int(runs[:, 1].max(initial=0)))
    next_steps = {step % num_workers: step for step in range(last.first_step, last.first_step + num_workers)}
    for start, stop in runs.tolist():
        for step in range(max(start, stop - num_workers), stop):
            next_steps[step % num_workers] = max(next_steps[step % num_workers], step + num_workers)
    return min(next_steps.values())


def _runs(ranks: Sequence[RankHistory]) -> dict[tuple[int, Slicing], dict[int, IntArray]]:
    """Collect the steps that each rank trained on, by epoch and slicing; repeated steps appear repeatedly."""
    found: dict[tuple[int, Slicing], dict[int, list[IntArray]]] = {}
    for history in ranks:
        for leg in history.legs:
            if len(leg.runs) and history.rank < leg.slicing.world_size:
                found.setdefault((leg.epoch, leg.slicing), {}).setdefault(history.rank, []).append(leg.runs)
    return {key: {rank: join(runs) for rank, runs in of_ranks.items()} for key, of_ranks in found.items()}


def _given(slicing: Slicing, runs: dict[int, IntArray], legs: Sequence[Leg]) -> IntArray:
    """Return the positions trained on under one slicing, within its legs; repeated positions appear repeatedly."""
    layers, times = [], 1
    while layer := {rank: found for rank, run in runs.items() if len(found := covered(run, times))}:
        layers.append(positions_of(slicing, layer))
        times += 1
    given = join(layers)
    counts = covered(intervals((leg.start, leg.stop) for leg in legs if leg.slicing == slicing))
    return join([clip(given, start, stop) for start, stop in counts.tolist()])


def _again(legs: Sequence[Leg]) -> Iterator[IntArray]:
    """Yield the positions of a leg that lie before an earlier leg's start: they had been trained on, recorded or not."""
    furthest: Leg | None = None
    for leg in legs:
        if furthest and leg.start < furthest.start and len(leg.runs):
            given = positions_of(leg.slicing, dict.fromkeys(range(leg.slicing.world_size), covered(leg.runs)))
            again = clip(given, leg.start, min(leg.stop, furthest.start))
            yield without(again, intervals(furthest.slicing.skipped))
        # A leg without a step or an end only loaded its state. A leg that stops before its start was discarded.
        counts = (len(leg.runs) or leg.has_end) and leg.start <= leg.stop
        if counts and (furthest is None or leg.start > furthest.start):
            furthest = leg


def _gaps(epoch: int, legs: Sequence[Leg], runs: dict[Slicing, dict[int, IntArray]], end: int) -> Iterator[Gap]:
    for leg in legs:
        slicing = leg.slicing
        steps = (leg.first_step, min(slicing.num_steps_before(min(leg.stop, end)), slicing.num_steps))
        ranks_of: dict[tuple[int, int], list[int]] = {}
        for rank, run in runs[slicing].items():
            for start, stop in without(intervals([steps]), run).tolist():
                ranks_of.setdefault((start, stop), []).append(rank)
        if steps[0] < steps[1] and (absent := [rank for rank in range(slicing.world_size) if rank not in runs[slicing]]):
            ranks_of.setdefault(steps, []).extend(absent)
        yield from (Gap(epoch, gap, sorted(ranks), leg) for gap, ranks in sorted(ranks_of.items()))
