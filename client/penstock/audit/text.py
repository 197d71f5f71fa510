"""The report in words, for people. Ranges are given as people count: both ends included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penstock.audit.account import Epoch, Gap
from penstock.audit.intervals import covered, join, positions_of, size, without
from penstock.audit.lineage import Segment, Start
from penstock.audit.reading import Damage, IntArray
from penstock.audit.report import Apart, Changed, Discarded, Order, Report
from penstock.text import counted

_MAX_RANGES = 8
_MAX_LINES = 20


def lines_of(report: Report) -> Iterator[str]:
    """Yield the lines of the report; the first is the verdict."""
    yield _verdict(report)
    for order in report.orders:
        yield ""
        yield ", ".join(f"{name}={value}" for name, value in order.key if value is not None)
        yield from _shortened(map(_start, order.starts))
        yield from map(_epoch, order.epochs)
        yield from _shortened(map(_discarded, order.discarded))
        yield from _problems(order)
        stateless = [start for start in order.starts if start.number > 1 and not start.place]
        if stateless and not report.is_proven:
            yield (
                f"  Start {stateless[0].number} loaded no state, so it is assumed to have kept the weights, and what was "
                f"trained before it counts, too. If its weights were new: --assume-fresh-weights"
            )
    if report.damages:
        yield ""
        yield from _shortened(map(_damage, report.damages))


def _verdict(report: Report) -> str:
    epochs = report.epochs
    if report.is_proven:
        num_due = sum(epoch.num_due for epoch in epochs)
        verdict = f"PROVEN: each sample that was due, {num_due:,} in {counted(len(epochs), 'epoch')}, was"
        if not report.by_workers:
            return f"{verdict} trained on exactly once"
        return (
            f"{verdict} handed to the loader exactly once. If the loop left an epoch early, the batches that the workers had "
            f"fetched ahead may not have reached it"
        )
    counts = {
        "samples not trained on": sum(size(epoch.missing) for epoch in epochs),
        "samples trained on more than once": sum(size(epoch.twice) for epoch in epochs),
        "ranks that resumed elsewhere than the others": sum(len(order.apart) for order in report.orders),
        "starts resumed from a start without a record": sum(order.orphan is not None for order in report.orders),
        "batches that changed": sum(len(order.changed) for order in report.orders),
        "lines that cannot be read": sum(each.last - each.first + 1 for each in report.damages if not each.is_torn),
        "lines that could not be written": report.num_lost,
        "batches not as before when requested again": report.num_differing,
    }
    reasons = [f"{what}: {count:,}" for what, count in counts.items() if count]
    return f"NOT PROVEN: {', '.join(reasons) or 'no batch is recorded'}"


def _start(start: Start) -> str:
    begin = start.begin
    return (
        f"  start {start.number}, {begin.time:%Y-%m-%d %H:%M:%S}, {'resumed' if start.place else 'began'} at epoch "
        f"{begin.epoch}, step {begin.step:,} after the first {begin.spec.offset:,} samples, on "
        f"{counted(begin.spec.world_size, 'rank')} with batches of {begin.spec.batch_size:,}"
    )


def _epoch(epoch: Epoch) -> str:
    if epoch.is_proven:
        text = f"  epoch {epoch.epoch}: {epoch.num_due:,} of {epoch.num_samples:,} samples, each once"
    else:
        missing, twice = size(epoch.missing), size(epoch.twice)
        once = size(without(epoch.due, epoch.twice)) - missing
        text = f"  epoch {epoch.epoch}: of {epoch.num_samples:,} samples, {once:,} once, {missing:,} never, "
        text += f"{twice:,} more than once"
    if epoch.num_skipped:
        text += f"; {epoch.num_skipped:,} skipped"
    if epoch.num_dropped:
        text += f"; {epoch.num_dropped:,} dropped at the end"
    if epoch.num_repeated:
        text += f"; {epoch.num_repeated:,} from the epoch's start once more, to fill the last step (drop_last=false)"
    if not epoch.is_finished:
        text += f"; it is not finished: all ranks reached step {epoch.steps_done:,} of {epoch.segments[-1].slicing.num_steps:,}"
    return text


def _discarded(discarded: Discarded) -> str:
    steps = f"  epoch {discarded.epoch}, {_range('step', discarded.first_step, discarded.last_step)} of start {discarded.start}"
    if not discarded.resumed_by:
        return f"{steps} discarded: no later start went on from them"
    return f"{steps} discarded: start {discarded.resumed_by} resumed from a checkpoint before them"


def _problems(order: Order) -> Iterator[str]:
    if order.orphan:
        begin = order.orphan.begin
        yield (
            f"  MISSING the start with the id {begin.parent}: start {order.orphan.number} resumed from its state, in epoch "
            f"{begin.parent_epoch} after {begin.parent_samples:,} samples. Name all files of the run"
        )
    yield from _shortened(map(_apart, order.apart))
    for epoch in order.epochs:
        yield from _shortened(map(_gap, epoch.gaps))
        rest = without(epoch.missing, join([gap.positions for gap in epoch.gaps]))
        if len(rest):
            yield f"  MISSING epoch {epoch.epoch}, {_positions(rest)}: no start in these ledgers covers them"
        if len(epoch.twice):
            steps = ", ".join(_steps(epoch.segments, epoch.twice))
            yield f"  TWICE   epoch {epoch.epoch}, {_positions(epoch.twice)}: {steps}"
    if order.absent and any(len(epoch.missing) for epoch in order.epochs):
        yield f"  MISSING the ledgers of {_ranks(order.absent)}: name the files of all ranks"
    yield from _shortened(map(_changed, order.changed))


def _apart(apart: Apart) -> str:
    return (
        f"  APART   rank {apart.rank} took no part in start {apart.last_start}, but in start {apart.start}: it loaded "
        f"another state, has other parameters, or was killed before its first batch"
    )


def _gap(gap: Gap) -> str:
    steps = f"{_range('step', gap.steps[0], gap.steps[-1])} of start {gap.segment.start.number}"
    return f"  MISSING epoch {gap.segment.epoch}, {steps}, {_ranks(gap.ranks)}: {_positions(gap.positions)}"


def _changed(changed: Changed) -> str:
    return (
        f"  CHANGED epoch {changed.epoch}, step {changed.step:,} of rank {changed.rank} had the digests "
        f"{' and '.join(changed.digests)}: the data was not the same"
    )


def _damage(damage: Damage) -> str:
    lines = f"{damage.path}, {_range('line', damage.first, damage.last)}"
    if damage.is_torn:
        return f"{lines} was cut off, as by a full disk, or a process or machine that went down"
    return f"{lines} cannot be read: the file was damaged or edited"


def _steps(segments: Sequence[Segment], positions: IntArray) -> Iterator[str]:
    """Yield, for each segment, the range of its steps that hold some of these positions."""
    for segment in segments:
        slicing, steps = segment.slicing, covered(join([*segment.kept.values()]))
        trained = positions_of(slicing, dict.fromkeys(range(slicing.world_size), steps))
        inside = covered(join([positions, trained]), 2)
        if len(inside):
            first, last = (slicing.step_of(position)[0] for position in (inside[0, 0], inside[-1, 1] - 1))
            yield f"{_range('step', first, last)} of start {segment.start.number}"


def _positions(positions: IntArray) -> str:
    shown = ", ".join(f"{start:,}-{stop - 1:,}" for start, stop in positions[:_MAX_RANGES].tolist())
    more = ", ..." if len(positions) > _MAX_RANGES else ""
    return f"{counted(size(positions), 'sample')} at positions {shown}{more}"


def _ranks(ranks: list[int]) -> str:
    more = ", ..." if len(ranks) > _MAX_RANGES else ""
    return f"rank {', '.join(map(str, ranks[:_MAX_RANGES]))}{more}"


def _range(noun: str, first: int, last: int) -> str:
    return f"{noun} {first:,}" if first == last else f"{noun}s {first:,}-{last:,}"


def _shortened(lines: Iterable[str]) -> Iterator[str]:
    listed = list(lines)
    yield from listed[:_MAX_LINES]
    if len(listed) > _MAX_LINES:
        yield f"  ... {len(listed) - _MAX_LINES:,} more lines, see --json"
