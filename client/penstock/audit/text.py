"""The report in words, for people. Ranges are given as people count: both ends included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise

import numpy as np

from penstock.audit.account import Epoch, Gap
from penstock.audit.history import Leg, Thrown
from penstock.audit.intervals import NONE, covered, join, runs_of, size, without
from penstock.audit.positions import positions_of
from penstock.audit.reading import Damage, IntArray
from penstock.audit.record import Changed, Start
from penstock.audit.report import Apart, Order, Report
from penstock.slicing import Slicing
from penstock.spec import Spec
from penstock.text import counted

_ALWAYS_NAMED = ("snapshot", "seed", "shuffle", "packing")
_MAX_RANGES = 8
_MAX_LINES = 20


def lines_of(report: Report) -> Iterator[str]:
    """The report, line by line; the first is the verdict."""
    yield _verdict(report)
    for order in report.orders:
        yield ""
        yield f"{order.dataset}, {', '.join(_named(dict(order.key)))}"
        yield from _some(_start(start) for start in order.leader.starts)
        yield from (_epoch(epoch) for epoch in order.epochs)
        yield from _some(_thrown(thrown, order.epochs) for thrown in order.leader.thrown)
        yield from _left_out(order.epochs)
        yield from _problems(order, report.orders)
    if report.damages:
        yield ""
        yield from _some(map(_damage, report.damages))


def _verdict(report: Report) -> str:
    epochs = [epoch for order in report.orders for epoch in order.epochs]
    if report.is_proven:
        num = sum(epoch.num_due for epoch in epochs)
        verdict = f"PROVEN: each sample that was due, {num:,} in {counted(len(epochs), 'epoch')}, was"
        unrecorded = _unrecorded([(0, 0), *((epoch.epoch, epoch.epoch + 1) for epoch in epochs)])
        nothing = f". Of {unrecorded} nothing is recorded" if unrecorded else ""
        if not report.by_workers:
            repeated = sum(epoch.num_repeated for epoch in epochs)
            but_for = f", but for {repeated:,} that drop_last=false repeats" if repeated else ""
            return f"{verdict} trained on exactly once{but_for}{nothing}"
        return (
            f"{verdict} handed to the loader exactly once{nothing}. Where the loop left an epoch early, the last batches, as "
            f"many as the workers fetch ahead, may not have reached it"
        )
    reasons = {
        "{} not trained on": sum(size(epoch.missing) for epoch in epochs),
        "{} trained on more than once": sum(size(epoch.twice) for epoch in epochs),
    }
    found = [text.format(counted(count, "sample")) for text, count in reasons.items() if count]
    if apart := sum(len(order.apart) for order in report.orders):
        found.append(f"{counted(apart, 'rank')} resumed elsewhere than the others")
    if passed := sum(len(order.passed) for order in report.orders):
        found.append(f"nothing is recorded of {counted(passed, 'epoch')} that a start resumed behind")
    if changed := sum(len(order.changed) for order in report.orders):
        found.append(f"{counted(changed, 'batch', 'batches')} changed")
    if lines := sum(d.last - d.first + 1 for d in report.damages if not d.is_torn):
        found.append(f"{counted(lines, 'line')} cannot be read, and may say anything")
    if report.num_lost:
        found.append(
            f"of {counted(report.num_lost, 'iteration')} nothing is recorded, though of later ones of the same process: the "
            f"ledger could not be written, was deleted, or is not among these"
        )
    if report.num_differing:
        found.append(f"{counted(report.num_differing, 'batch', 'batches')} not as before when asked for again")
    return f"NOT PROVEN: {', '.join(found) or 'no batch is recorded'}"


def _named(key: dict[str, object]) -> Iterator[str]:
    """Yield the parameters that identify an order within its dataset: some always, the others if not the default."""
    usual = asdict(Spec(split="all"))
    for name in (*_ALWAYS_NAMED, *(name for name in key if name in usual and name not in _ALWAYS_NAMED)):
        if name in _ALWAYS_NAMED or key[name] not in (None, usual[name]):
            yield f"{name}={key[name]}"


def _start(start: Start) -> str:
    slicing, begin = start.slicing, start.begin
    how = "resumed" if begin.num_loads else "began"
    behind = f" after the first {slicing.offset:,} samples" if slicing.offset else ""
    return (
        f"  start {start.number + 1}, {begin.time:%Y-%m-%d %H:%M:%S}, {how} at epoch {begin.epoch}, step {begin.step:,}{behind}"
        f", on {counted(slicing.world_size, 'rank')} with batches of {slicing.batch_size:,}"
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


def _thrown(thrown: Thrown, epochs: Iterable[Epoch]) -> str:
    first, stop = thrown.steps
    were = "was" if stop - first == 1 else "were"
    steps = f"  epoch {thrown.epoch}, {_range('step', first, stop)} of start {thrown.started.number + 1} {were}"
    resumed = "no later start went on from them"
    if thrown.resumed:
        resumed = f"start {thrown.resumed.number + 1} resumed from a checkpoint before them"
    end = thrown.slicing.position(stop)
    again = any(e.epoch == thrown.epoch and end <= e.legs[-1].slicing.position(e.steps_done) for e in epochs)
    if again:
        return f"{steps} trained twice: {resumed}; only the second time counts"
    return f"{steps} thrown away: {resumed}"


def _apart(apart: Apart) -> str:
    own, first = apart.start, apart.leader
    (epoch, step), (first_epoch, first_step) = ((start.begin.epoch, start.begin.step) for start in (own, first))
    if (epoch, step) == (first_epoch, first_step) and own.slicing != first.slicing:
        differing = f"{_slices(own.slicing)}, the others {_slices(first.slicing)}"
        return f"  APART rank {apart.rank} had {differing}: all ranks take the same"
    return (
        f"  APART rank {apart.rank} went on at epoch {epoch}, step {step:,}, where the others went on at epoch {first_epoch}, "
        f"step {first_step:,}: they loaded different states, or in each of these two starts a rank was killed before its first "
        f"batch"
    )


def _slices(slicing: Slicing) -> str:
    return f"batches of {slicing.batch_size:,} on {counted(slicing.world_size, 'rank')} after {slicing.offset:,} samples"


def _left_out(epochs: list[Epoch]) -> Iterator[str]:
    if left_out := _unrecorded([(epoch.epoch, epoch.epoch + 1) for epoch in epochs]):
        yield f"  no batch of {left_out} is recorded"


def _unrecorded(epochs: list[tuple[int, int]]) -> str:
    """Those that lie between these ranges, half-open, by name."""
    between = [(stop, first) for (_, stop), (first, _) in pairwise(sorted(epochs)) if stop < first]
    shown = [f"{first}" if stop - first == 1 else f"{first}-{stop - 1}" for first, stop in between[:_MAX_RANGES]]
    is_one = sum(stop - first for first, stop in between) == 1
    return f"epoch{'' if is_one else 's'} {', '.join([*shown, *['...'][: len(between) - len(shown)]])}" if shown else ""


def _problems(order: Order, orders: Sequence[Order]) -> Iterator[str]:
    yield from _some(map(_apart, order.apart))
    for over in order.passed:
        yield (
            f"  MISSING epoch {over.epoch}: start {over.resumed.number + 1} loaded a state in which some of it was consumed, "
            f"and nothing of it is recorded"
        )
    for epoch in order.epochs:
        yield from _some(map(_gap, epoch.gaps))
        rest = without(epoch.missing, join([gap.positions for gap in epoch.gaps]))
        if len(rest):
            yield (
                f"  MISSING epoch {epoch.epoch}, {_positions(rest)}: no pass in these ledgers covers them. Are all "
                f"files of the run here, from its first start on?"
            )
        if len(epoch.twice):
            steps = ", ".join(_steps(epoch.legs, epoch.twice))
            yield f"  TWICE   epoch {epoch.epoch}, {_positions(epoch.twice)}: {steps}"
    if order.absent and any(len(epoch.missing) for epoch in order.epochs):
        strayed = _strayed(order, orders)
        yield from _some(
            f"  MISSING rank {rank}, which had {others}: all ranks take the same" for rank, others in strayed.items()
        )
        if absent := [rank for rank in order.absent if rank not in strayed]:
            yield f"  MISSING the ledgers of {_ranks(absent)}: name the files of all ranks"
    if order.left_by and len(order.epochs[-1].missing):
        yield _left(order.epochs[-1].epoch, order.left_by)
    anew = [start for start in order.leader.starts[1:] if not start.resumes]
    if anew and any(len(epoch.twice) for epoch in order.epochs):
        yield (
            f"  Start {anew[0].number + 1} loaded no state, so what was trained on before it counts, too. If its weights "
            f"were new as well, or those from before its first step: --assume-fresh-weights"
        )
    yield from _some(map(_changed, order.changed))


def _strayed(order: Order, orders: Sequence[Order]) -> dict[int, str]:
    """Return, for absent ranks that followed another order (for example another seed), how that order differs.

    If ranks of this order followed the other one, too, it was another run: it does not count.
    """
    found, here = dict[int, str](), {history.rank for history in order.ranks}
    for other in orders:
        if other.dataset == order.dataset and here.isdisjoint(history.rank for history in other.ranks):
            own = dict(order.key)
            differing = ", ".join(f"{name}={value}, not {own.get(name)}" for name, value in other.key if value != own.get(name))
            found |= dict.fromkeys((history.rank for history in other.ranks), differing)
    return {rank: found[rank] for rank in order.absent if rank in found}


def _gap(gap: Gap) -> str:
    steps = f"{_range('step', *gap.steps)} of start {gap.leg.started.number + 1}"
    return f"  MISSING epoch {gap.epoch}, {steps}, {_ranks(gap.ranks)}: {_positions(gap.positions)}"


def _left(epoch: int, start: Start) -> str:
    is_anew = not start.resumes and start.begin.epoch <= epoch
    return f"  LEFT    epoch {epoch} for another order of this dataset: {_start(start).strip()}" + (
        ". If its weights were new: --assume-fresh-weights" if is_anew else ""
    )


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


def _steps(legs: Iterable[Leg], found: IntArray) -> Iterator[str]:
    """Of each start, the steps that it trained among which these samples are."""
    runs: dict[tuple[int, Slicing], IntArray] = {}
    for leg in legs:
        key = (leg.started.number, leg.slicing)
        runs[key] = join([runs.get(key, NONE), leg.runs])
    for (number, slicing), steps in runs.items():
        given = positions_of(slicing, dict.fromkeys(range(slicing.world_size), covered(steps)))
        inside = covered(join([found, given]), 2)
        if len(inside):
            (first, _), (last, _) = (slicing.step_of(position) for position in (inside[0, 0], inside[-1, 1] - 1))
            yield f"{_range('step', first, last + 1)} of start {number + 1}"


def _positions(found: IntArray) -> str:
    ranges = found[:_MAX_RANGES].tolist()
    shown = ", ".join(f"{start:,}-{stop - 1:,}" if stop - start > 1 else f"{start:,}" for start, stop in ranges)
    more = f" and {len(found) - _MAX_RANGES:,} more ranges" if len(found) > _MAX_RANGES else ""
    return f"{counted(size(found), 'sample')} at positions {shown}{more}"


def _ranks(ranks: list[int]) -> str:
    runs = runs_of(np.array(ranks, np.int64)).tolist()
    shown = ", ".join(str(first) if stop - first == 1 else f"{first}-{stop - 1}" for first, stop in runs[:_MAX_RANGES])
    more = ", ..." if len(runs) > _MAX_RANGES else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _range(what: str, first: int, stop: int) -> str:
    return f"{what} {first:,}" if stop - first == 1 else f"{what}s {first:,}-{stop - 1:,}"


def _some(lines: Iterable[str]) -> Iterator[str]:
    """The first and the last of many lines."""
    found = list(lines)
    if len(found) <= _MAX_LINES:
        yield from found
        return
    yield from found[: _MAX_LINES // 2]
    yield f"  ... {len(found) - _MAX_LINES:,} more lines, see --json"
    yield from found[-_MAX_LINES // 2 :]
