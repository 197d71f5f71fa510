"""The account: of each epoch, which samples were trained on once, which never, and which more than once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.audit.intervals import clip, covered, intervals, join, size, without
from penstock.audit.rank import RankHistory, Stretch
from penstock.audit.reading import IntArray
from penstock.audit.slicing import Slicing

_IN_FLIGHT_STEPS = 16  # by which ranks of a run that is killed may differ; a GPU is a few steps behind its loop


@dataclass(frozen=True, slots=True)
class Gap:
    """Steps, half-open, of which these ranks have no record, though the run went on behind them."""

    epoch: int
    steps: tuple[int, int]
    ranks: list[int]
    stretch: Stretch

    @property
    def positions(self) -> IntArray:
        """The samples that they are."""
        run = intervals([self.steps])
        return covered(self.stretch.slicing.positions(dict.fromkeys(self.ranks, run)))


@dataclass(frozen=True, slots=True)
class Epoch:
    """What became of an epoch's samples. Intervals are of positions, sorted and disjoint.

    due          samples that were due: all but those that were skipped, dropped, or not reached when the run ended
    missing      those of them that were not trained on
    twice        samples that were trained on more than once
    num_ahead    samples that only some ranks had taken when the run ended
    is_finished  the run came to its end, or left it for another epoch or order
    steps_done   where all ranks came, in steps of the last stretch
    gaps         whose records of what is missing are not there
    stretches    how the run went through the epoch
    """

    epoch: int
    num_sequences: int
    num_skipped: int
    num_dropped: int
    num_ahead: int
    is_finished: bool
    steps_done: int
    due: IntArray
    missing: IntArray
    twice: IntArray
    gaps: list[Gap]
    stretches: list[Stretch]

    @property
    def num_due(self) -> int:
        """Samples that were due."""
        return size(self.due)

    @property
    def is_proven(self) -> bool:
        """Whether each sample that was due was trained on exactly once."""
        return not len(self.missing) and not len(self.twice)


def account_for(leader: RankHistory, ranks: Sequence[RankHistory], *, is_left: bool) -> Iterator[Epoch]:
    """The account of each epoch that a run began, of the histories of all its ranks in one order of samples.

    `is_left`: from the last of them it went on in another order.
    """
    last = leader.stretches[-1]
    later = [s for h in ranks for s in h.stretches if s.started.key == last.started.key and s.epoch > last.epoch]
    course = leader.stretches + list({stretch.epoch: stretch for stretch in later}.values())
    by_epoch: dict[int, list[Stretch]] = {}
    for stretch in course:
        by_epoch.setdefault(stretch.epoch, []).append(stretch)
    runs = _runs(ranks)
    for epoch, stretches in sorted(by_epoch.items()):
        own = {stretch.slicing: runs.get((epoch, stretch.slicing), {}) for stretch in stretches}
        yield _account(epoch, stretches, own, ranks if stretches[-1] is course[-1] and not is_left else None)


def _account(
    epoch: int, stretches: list[Stretch], runs: dict[Slicing, dict[int, IntArray]], ranks: Sequence[RankHistory] | None
) -> Epoch:
    """The account of an epoch of which so many steps were trained. `ranks` tell how far the run came, where it is the last."""
    last = stretches[-1]
    num_steps = last.slicing.num_steps
    done = _pace(last, ranks) if ranks else num_steps
    is_finished = not ranks or done >= num_steps or _has_ended(last, ranks)
    done = max(num_steps, last.first_step) if is_finished else done
    end = last.slicing.position(done)
    skipped = covered(join([clip(intervals(s.slicing.skipped), s.start, min(s.stop, end)) for s in stretches]))
    due = without(intervals([(0, end)]), skipped)
    rest = intervals([(end, last.slicing.num_sequences)] if is_finished else [])
    given = join([_given(slicing, runs[slicing], stretches) for slicing in runs])
    missing, twice = without(due, given), covered(given, 2)
    return Epoch(
        epoch=epoch,
        num_sequences=last.slicing.num_sequences,
        num_skipped=size(skipped),
        num_dropped=size(without(rest, intervals(last.slicing.skipped))),
        num_ahead=0 if is_finished or len(twice) else size(clip(given, end, last.slicing.num_sequences)),
        is_finished=is_finished,
        steps_done=done,
        due=due,
        missing=missing,
        twice=twice,
        gaps=list(_gaps(epoch, stretches, runs, end)) if len(missing) else [],
        stretches=stretches,
    )


def _has_ended(last: Stretch, ranks: Sequence[RankHistory]) -> bool:
    """Whether some rank went through the epoch to its end."""
    return any(s.has_end for h in ranks for s in h.stretches if (s.epoch, s.started.key) == (last.epoch, last.started.key))


def _pace(last: Stretch, ranks: Sequence[RankHistory]) -> int:
    """How far the run came: as the slowest rank, if they differ by no more than ranks do when a run is killed.

    Else as the fastest: then records of the others are missing. Ranks of which there is nothing do not count.
    """
    in_flight = max(_IN_FLIGHT_STEPS, 4 * last.begin.num_workers)
    present = [history for history in ranks if history.rank < last.slicing.world_size]
    took_part = [h for h in present if any(s.started.key == last.started.key for s in h.stretches[-1:])]
    fastest = max((_front(last, history, 1) for history in took_part), default=last.first_step)
    slowest = min(_front(last, history, last.begin.num_workers) for history in present)
    return fastest if fastest - slowest > in_flight else min(slowest, fastest)


def _front(last: Stretch, history: RankHistory, num_workers: int) -> int:
    """The step behind those of a rank; with several workers of its loader, the next step of the one that came least far."""
    runs = join([s.runs for s in history.stretches if (s.epoch, s.slicing) == (last.epoch, last.slicing)])
    if num_workers < 2:
        return max(last.first_step, int(runs[:, 1].max(initial=0)))
    next_steps = {step % num_workers: step for step in range(last.first_step, last.first_step + num_workers)}
    for start, stop in runs.tolist():
        for step in range(max(start, stop - num_workers), stop):
            next_steps[step % num_workers] = max(next_steps[step % num_workers], step + num_workers)
    return min(next_steps.values())


def _runs(ranks: Sequence[RankHistory]) -> dict[tuple[int, Slicing], dict[int, IntArray]]:
    """All that each rank trained on in each epoch and under each slicing; what it trained on again comes again."""
    found: dict[tuple[int, Slicing], dict[int, list[IntArray]]] = {}
    for history in ranks:
        for stretch in history.stretches:
            if len(stretch.runs) and history.rank < stretch.slicing.world_size:
                found.setdefault((stretch.epoch, stretch.slicing), {}).setdefault(history.rank, []).append(stretch.runs)
    return {key: {rank: join(runs) for rank, runs in of_ranks.items()} for key, of_ranks in found.items()}


def _given(slicing: Slicing, runs: dict[int, IntArray], stretches: Sequence[Stretch]) -> IntArray:
    """The positions that were given under one slicing, where it was what counts; those given again are there again."""
    layers, times = [], 1
    while layer := {rank: found for rank, run in runs.items() if len(found := covered(run, times))}:
        layers.append(slicing.positions(layer))
        times += 1
    given = join(layers)
    counts = covered(intervals((s.start, s.stop) for s in stretches if s.slicing == slicing))
    return join([clip(given, start, stop) for start, stop in counts.tolist()])


def _gaps(epoch: int, stretches: Sequence[Stretch], runs: dict[Slicing, dict[int, IntArray]], end: int) -> Iterator[Gap]:
    for stretch in stretches:
        slicing = stretch.slicing
        steps = (stretch.first_step, min(slicing.num_steps_before(min(stretch.stop, end)), slicing.num_steps))
        ranks_of: dict[tuple[int, int], list[int]] = {}
        for rank in range(slicing.world_size):
            gaps = without(intervals([steps]), runs[slicing].get(rank, intervals([])))
            for start, stop in gaps.tolist():
                ranks_of.setdefault((start, stop), []).append(rank)
        yield from (Gap(epoch, gap, ranks, stretch) for gap, ranks in sorted(ranks_of.items()))
