"""Account of each epoch: the samples trained on once, never, and more than once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.audit.intervals import NONE, clip, covered, intervals, join, positions_of, size, without
from penstock.audit.lineage import Segment
from penstock.audit.reading import IntArray
from penstock.slicing import Slicing

# Tolerated difference between the ranks of a killed run, in steps: a GPU lags a few steps after its loop.
_IN_FLIGHT_STEPS = 16


@dataclass(frozen=True, slots=True)
class Gap:
    """Steps of a segment without a record of these ranks, although the run continued after them."""

    segment: Segment
    steps: range
    ranks: list[int]

    @property
    def positions(self) -> IntArray:
        """Positions of the samples in these steps."""
        steps = intervals([(self.steps.start, self.steps.stop)])
        return positions_of(self.segment.slicing, dict.fromkeys(self.ranks, steps))


@dataclass(frozen=True, slots=True)
class Epoch:
    """Account of an epoch's samples. Intervals hold positions, sorted and disjoint.

    due          samples that were due: all except those skipped, dropped, or not reached when the run ended
    missing      due samples that were not trained on
    twice        samples that were trained on more than once
    num_repeated samples from the epoch's start that filled the last step under drop_last=false; they do not count as trained
                 on twice
    is_finished  the run came to the epoch's end, or left it for another epoch or order
    steps_done   step that all ranks reached, in steps of the last segment
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
    segments: list[Segment]

    @property
    def num_due(self) -> int:
        """Number of due samples."""
        return size(self.due)

    @property
    def is_proven(self) -> bool:
        """Whether each due sample was trained on exactly once."""
        return not len(self.missing) and not len(self.twice)


def account_for(segments: Sequence[Segment], last: Segment | None, present: Sequence[int]) -> Iterator[Epoch]:
    """Yield the account of each epoch in the segments of one order of samples.

    `last` is the last segment of the run, if it is one of them; `present` are the ranks whose ledgers are there.
    """
    by_epoch: dict[int, list[Segment]] = {}
    for segment in segments:
        by_epoch.setdefault(segment.epoch, []).append(segment)
    for _, of_epoch in sorted(by_epoch.items()):
        yield _account(of_epoch, present if of_epoch[-1] is last else None)


def _account(segments: list[Segment], present: Sequence[int] | None) -> Epoch:
    """Account for one epoch; `present`: the ranks with a ledger; None if the run continued after the epoch."""
    last, kept = segments[-1], dict[Slicing, dict[int, IntArray]]()
    for segment in segments:
        by_rank = kept.setdefault(segment.slicing, {})
        for rank, steps in segment.kept.items():
            if len(steps):
                by_rank[rank] = join([by_rank.get(rank, NONE), steps])
    num_steps = last.slicing.num_steps
    done = num_steps if present is None else _pace(last, kept[last.slicing], present)
    is_finished = present is None or done >= num_steps or last.has_end
    done = max(num_steps, last.begin.step) if is_finished else done
    end = last.slicing.position(done)
    skipped = covered(join([clip(intervals(one.slicing.skipped), one.first, min(one.stop, end)) for one in segments]))
    due = without(intervals([(0, end)]), skipped)
    rest = intervals([(end, last.slicing.num_samples)] if is_finished else [])
    dropped = without(rest, intervals(last.slicing.skipped))
    trained = join([_positions(slicing, by_rank) for slicing, by_rank in kept.items()])
    missing = without(due, trained)
    filled = [one for one in segments if any(len(s) and s[-1, 1] == one.slicing.num_steps for s in one.kept.values())]
    return Epoch(
        epoch=last.epoch,
        num_samples=last.slicing.num_samples,
        num_skipped=size(skipped) + size(rest) - size(dropped),
        num_dropped=size(dropped),
        num_repeated=sum(one.slicing.num_repeated for one in filled) if is_finished else 0,
        is_finished=is_finished,
        steps_done=done,
        due=due,
        missing=missing,
        twice=covered(trained, 2),
        gaps=list(_gaps(segments, kept, end)) if len(missing) else [],
        segments=segments,
    )


def _positions(slicing: Slicing, kept: dict[int, IntArray]) -> IntArray:
    """Return the positions of steps; those of repeated steps appear repeatedly."""
    layers, times = [], 1
    while layer := {rank: once for rank, steps in kept.items() if len(once := covered(steps, times))}:
        layers.append(positions_of(slicing, layer))
        times += 1
    return join(layers)


def _pace(last: Segment, kept: dict[int, IntArray], present: Sequence[int]) -> int:
    """Return the step that the run reached: the slowest rank's, if ranks differ no more than in a killed run.

    Otherwise the fastest rank's: the records of the others are incomplete. Ranks without records do not count.
    """
    num_workers = last.begin.num_workers
    in_flight = max(_IN_FLIGHT_STEPS, 4 * num_workers)
    fastest = max((_front(last, kept.get(rank, NONE), 1) for rank in last.kept), default=last.begin.step)
    slowest = min(_front(last, kept.get(rank, NONE), num_workers) for rank in present if rank < last.slicing.world_size)
    return fastest if fastest - slowest > in_flight else min(slowest, fastest)


def _front(last: Segment, steps: IntArray, num_workers: int) -> int:
    """Return the step after a rank's last; with several loader workers, the next step of the slowest worker."""
    first = last.begin.step
    if num_workers < 2:
        return max(first, int(steps[:, 1].max(initial=0)))
    next_steps = {step % num_workers: step for step in range(first, first + num_workers)}
    for start, stop in steps.tolist():
        for step in range(max(start, stop - num_workers), stop):
            next_steps[step % num_workers] = max(next_steps[step % num_workers], step + num_workers)
    return min(next_steps.values())


def _gaps(segments: Sequence[Segment], kept: dict[Slicing, dict[int, IntArray]], end: int) -> Iterator[Gap]:
    for segment in segments:
        slicing, by_rank = segment.slicing, kept[segment.slicing]
        stop = min(slicing.num_steps_before(min(segment.stop, end)), slicing.num_steps)
        expected = intervals([(segment.begin.step, stop)])
        ranks_of: dict[tuple[int, int], list[int]] = {}
        for rank in range(slicing.world_size):
            for first, last in without(expected, by_rank.get(rank, NONE)).tolist():
                ranks_of.setdefault((first, last), []).append(rank)
        yield from (Gap(segment, range(*steps), ranks) for steps, ranks in sorted(ranks_of.items()))
