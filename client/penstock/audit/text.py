"""The report in words, for people. Ranges are given as people count: both ends included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise

import numpy as np

from penstock.audit.account import Epoch, Gap, Leg
from penstock.audit.intervals import covered, join, positions_of, runs_of, size, without
from penstock.audit.lineage import Start
from penstock.audit.reading import Damage, IntArray
from penstock.audit.report import Apart, Changed, Discarded, Order, Report
from penstock.spec import Spec
from penstock.text import counted

_ALWAYS_NAMED = ("snapshot", "seed", "shuffle", "packing")
_MAX_RANGES = 8
_MAX_LINES = 20


def lines_of(report: Report) -> Iterator[str]:
    """Yield the lines of the report; the first is the verdict."""
    yield _verdict(report)
    for order in report.orders:
        yield ""
        yield f"{order.dataset}, {', '.join(_named(dict(order.key)))}"
        yield from _first_and_last(_start(start) for start in order.starts)
        yield from (_epoch(epoch) for epoch in order.epochs)
        yield from _first_and_last(_discarded(each, order.epochs) for each in order.discarded)
        if unrecorded := _unrecorded(epoch.epoch for epoch in order.epochs):
            yield f"  no batch of {unrecorded} is recorded"
        yield from _problems(order)
    if report.damages:
        yield ""
        yield from _first_and_last(map(_damage, report.damages))


def _verdict(report: Report) -> str:
    epochs = [epoch for order in report.orders for epoch in order.epochs]
    if report.is_proven:
        num = sum(epoch.num_due for epoch in epochs)
        verdict = f"PROVEN: each sample that was due, {num:,} in {counted(len(epochs), 'epoch')}, was"
        unrecorded = _unrecorded([-1, *(epoch.epoch for epoch in epochs)])
        nothing = f". Nothing is recorded of {unrecorded}" if unrecorded else ""
        if not report.by_workers:
            repeated = sum(epoch.num_repeated for epoch in epochs)
            but_for = f", except {repeated:,} that drop_last=false repeats" if repeated else ""
            return f"{verdict} trained on exactly once{but_for}{nothing}"
        return (
            f"{verdict} handed to the loader exactly once{nothing}. If the loop left an epoch early, the batches that the "
            f"workers had fetched ahead may not have reached it"
        )
    counts = [
        (sum(size(epoch.missing) for epoch in epochs), "{} not trained on", "sample"),
        (sum(size(epoch.twice) for epoch in epochs), "{} trained on more than once", "sample"),
        (sum(len(order.apart) for order in report.orders), "{} resumed elsewhere than the others", "rank"),
        (sum(len(order.passed) for order in report.orders), "{} without a record, although a start resumed after it", "epoch"),
        (sum(order.orphan is not None for order in report.orders), "{} resumed from a start without a record", "start"),
        (sum(len(order.changed) for order in report.orders), "{} changed", "batch"),
        (sum(d.last - d.first + 1 for d in report.damages if not d.is_torn), "{} cannot be read", "line"),
        (report.num_lost, "{} could not be written", "line"),
        (report.num_differing, "{} not as before when requested again", "batch"),
    ]
    plurals = {"batch": "batches"}
    reasons = [text.format(counted(count, noun, plurals.get(noun, ""))) for count, text, noun in counts if count]
    return f"NOT PROVEN: {', '.join(reasons) or 'no batch is recorded'}"


def _named(key: dict[str, object]) -> Iterator[str]:
    """Yield the parameters that identify an order within its dataset: some always, the others if not the default."""
    usual = asdict(Spec(split="all"))
    for name in (*_ALWAYS_NAMED, *(name for name in key if name in usual and name not in _ALWAYS_NAMED)):
        if name in _ALWAYS_NAMED or key[name] not in (None, usual[name]):
            yield f"{name}={key[name]}"


def _start(start: Start) -> str:
    begin = start.begin
    how = "resumed" if start.place else "began"
    after = f" after the first {begin.spec.offset:,} samples" if begin.spec.offset else ""
    return (
        f"  start {start.number}, {begin.time:%Y-%m-%d %H:%M:%S}, {how} at epoch {begin.epoch}, step {begin.step:,}{after}"
        f", on {counted(begin.spec.world_size, 'rank')} with batches of {begin.spec.batch_size:,}"
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
        text += f"; it is not finished: all ranks reached step {epoch.steps_done:,} of {epoch.legs[-1].slicing.num_steps:,}"
    if epoch.num_ahead:
        text += f", some ranks took {counted(epoch.num_ahead, 'more sample')}"
    return text


def _discarded(discarded: Discarded, epochs: Iterable[Epoch]) -> str:
    first, stop = discarded.steps
    steps = f"  epoch {discarded.epoch}, {_range('step', first, stop)} of start {discarded.start.number}"
    if not discarded.resumed:
        return f"{steps} discarded: no later start went on from them"
    reason = f"start {discarded.resumed.number} resumed from a checkpoint before them"
    end = discarded.slicing.position(stop)
    if any(each.epoch == discarded.epoch and end <= each.legs[-1].slicing.position(each.steps_done) for each in epochs):
        return f"{steps} trained twice: {reason}; only the second time counts"
    return f"{steps} discarded: {reason}"


def _unrecorded(epochs: Iterable[int]) -> str:
    """Name the epochs between these; "" if there are none."""
    between = [(before + 1, after) for before, after in pairwise(sorted(set(epochs))) if after > before + 1]
    shown = [f"{first}" if stop - first == 1 else f"{first}-{stop - 1}" for first, stop in between[:_MAX_RANGES]]
    plural = "" if sum(stop - first for first, stop in between) == 1 else "s"
    return f"epoch{plural} {', '.join([*shown, *['...'][: len(between) - len(shown)]])}" if shown else ""


def _problems(order: Order) -> Iterator[str]:
    if order.orphan:
        begin = order.orphan.begin
        yield (
            f"  MISSING the start with the id {begin.parent}: start {order.orphan.number} resumed from its state, in epoch "
            f"{begin.parent_epoch} after {begin.parent_samples:,} samples. Name all files of the run"
        )
    yield from _first_and_last(_apart(apart) for apart in order.apart)
    for passed in order.passed:
        yield (
            f"  MISSING epoch {passed.epoch}: start {passed.resumed.number} loaded a state in which some of it was consumed, "
            f"and nothing of it is recorded"
        )
    for epoch in order.epochs:
        yield from _first_and_last(map(_gap, epoch.gaps))
        rest = without(epoch.missing, join([gap.positions for gap in epoch.gaps]))
        if len(rest):
            yield f"  MISSING epoch {epoch.epoch}, {_positions(rest)}: no start in these ledgers covers them"
        if len(epoch.twice):
            steps = ", ".join(_steps(epoch.legs, epoch.twice))
            yield f"  TWICE   epoch {epoch.epoch}, {_positions(epoch.twice)}: {steps}"
    if order.absent and any(len(epoch.missing) for epoch in order.epochs):
        yield f"  MISSING the ledgers of {_ranks(order.absent)}: name the files of all ranks"
    if order.left_by and order.epochs and len(order.epochs[-1].missing):
        yield f"  LEFT    epoch {order.epochs[-1].epoch} for another order of this dataset: {_start(order.left_by).strip()}"
    stateless = [start for start in order.starts[1:] if not start.place and any(len(epoch.twice) for epoch in order.epochs)]
    if order.left_by and not order.left_by.place and any(len(epoch.missing) for epoch in order.epochs):
        stateless.append(order.left_by)
    if stateless:
        yield (
            f"  Start {stateless[0].number} loaded no state, so it is assumed to have kept the weights, and what was trained "
            f"before it counts, too. If its weights were new: --assume-fresh-weights"
        )
    yield from _first_and_last(map(_changed, order.changed))


def _apart(apart: Apart) -> str:
    own, last = apart.start.begin, apart.last.begin
    theirs = {"epoch": last.epoch, "step": last.step, **last.spec.to_dict()}
    differing = [
        f"{name}={value}, not {theirs[name]}"
        for name, value in {"epoch": own.epoch, "step": own.step, **own.spec.to_dict()}.items()
        if value != theirs[name]
    ]
    same = "it begins at the same place, from another state, or a rank was killed before its first batch"
    return (
        f"  APART   rank {apart.rank} took no part in start {apart.last.number}, but in start {apart.start.number}: "
        f"{', '.join(differing) or same}"
    )


def _gap(gap: Gap) -> str:
    steps = f"{_range('step', *gap.steps)} of start {gap.leg.start.number}"
    return f"  MISSING epoch {gap.epoch}, {steps}, {_ranks(gap.ranks)}: {_positions(gap.positions)}"


def _changed(changed: Changed) -> str:
    return (
        f"  CHANGED epoch {changed.epoch}, step {changed.step:,} of rank {changed.rank} had the digests "
        f"{' and '.join(changed.digests)}: the data was not the same"
    )


def _damage(damage: Damage) -> str:
    lines = _range("line", damage.first, damage.last + 1)
    if damage.is_torn:
        return f"{damage.path}, {lines} was cut off, as by a full disk, or a process or machine that went down"
    return f"{damage.path}, {lines} cannot be read: the file was damaged or edited"


def _steps(legs: Sequence[Leg], positions: IntArray) -> Iterator[str]:
    """Yield, for each leg, the range of its steps that hold some of these positions."""
    for leg in legs:
        steps = covered(join([*leg.runs.values()]))
        trained = positions_of(leg.slicing, dict.fromkeys(range(leg.slicing.world_size), steps))
        inside = covered(join([positions, trained]), 2)
        if len(inside):
            (first, _), (last, _) = (leg.slicing.step_of(position) for position in (inside[0, 0], inside[-1, 1] - 1))
            yield f"{_range('step', first, last + 1)} of start {leg.start.number}"


def _positions(positions: IntArray) -> str:
    ranges = positions[:_MAX_RANGES].tolist()
    shown = ", ".join(f"{start:,}-{stop - 1:,}" if stop - start > 1 else f"{start:,}" for start, stop in ranges)
    more = f" and {len(positions) - _MAX_RANGES:,} more ranges" if len(positions) > _MAX_RANGES else ""
    return f"{counted(size(positions), 'sample')} at positions {shown}{more}"


def _ranks(ranks: list[int]) -> str:
    runs = runs_of(np.array(ranks, np.int64)).tolist()
    shown = ", ".join(str(first) if stop - first == 1 else f"{first}-{stop - 1}" for first, stop in runs[:_MAX_RANGES])
    more = ", ..." if len(runs) > _MAX_RANGES else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _range(noun: str, first: int, stop: int) -> str:
    return f"{noun} {first:,}" if stop - first == 1 else f"{noun}s {first:,}-{stop - 1:,}"


def _first_and_last(lines: Iterable[str]) -> Iterator[str]:
    """Yield the first and the last of many lines."""
    listed = list(lines)
    if len(listed) <= _MAX_LINES:
        yield from listed
        return
    yield from listed[: _MAX_LINES // 2]
    yield f"  ... {len(listed) - _MAX_LINES:,} more lines, see --json"
    yield from listed[-_MAX_LINES // 2 :]
