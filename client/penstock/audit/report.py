"""Audit report: what the ledgers of a run prove, as data and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from penstock.audit.account import Epoch, account_for, legs_of
from penstock.audit.intervals import NONE, covered, join, size, without
from penstock.audit.lineage import Lineage, RankRecord, Start, lineage_of, record_of
from penstock.audit.reading import Damage, IntArray, Part, rank_of, read_ledger
from penstock.ledger.begin import Begin
from penstock.slicing import Slicing
from penstock.state import OF_MIXTURES, goes_on, order_of

_MAX_LISTED = 1000  # intervals of positions; a separate field gives their total number

OrderKey = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class Apart:
    """A rank that resumed from another state than the last start: no checkpoint covers both in one run."""

    rank: int
    start: Start
    last: Start


@dataclass(frozen=True, slots=True)
class Discarded:
    """Steps [start, stop) whose trained weights were discarded, and the start that resumed before them."""

    epoch: int
    steps: tuple[int, int]
    start: Start
    resumed: Start | None


@dataclass(frozen=True, slots=True)
class Changed:
    """A batch that was recorded with different digests."""

    epoch: int
    rank: int
    step: int
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """Audit result of one order of samples.

    ranks    ranks whose ledgers are there; `absent` took part, but have no ledger
    apart    ranks that did not resume from the state of the last start
    orphan   the oldest start of the lineage, if it loaded the state of a start that is not in the ledgers
    """

    key: OrderKey
    starts: list[Start]
    ranks: list[int]
    absent: list[int]
    apart: list[Apart]
    orphan: Start | None
    epochs: list[Epoch]
    discarded: list[Discarded]
    changed: list[Changed]

    @property
    def is_proven(self) -> bool:
        """Whether each due sample was trained on exactly once per epoch, with the same content each time."""
        return all(epoch.is_proven for epoch in self.epochs) and not (self.changed or self.apart or self.orphan)


@dataclass(frozen=True, slots=True)
class Report:
    """Audit result of a run's ledgers. `num_batches` also counts batches that were trained on twice.

    num_lost       lines that could not be written
    num_differing  checked batches that a server now returns with other content, see compare
    """

    paths: list[Path]
    num_batches: int
    num_lost: int
    orders: list[Order]
    damages: list[Damage]
    num_differing: int = 0

    @property
    def is_proven(self) -> bool:
        """Whether all orders are proven and no record is lost. A torn line, as of a killed process, does not count."""
        is_whole = not self.num_lost and not self.num_differing and all(damage.is_torn for damage in self.damages)
        return bool(self.num_batches) and is_whole and all(order.is_proven for order in self.orders)

    @property
    def by_workers(self) -> bool:
        """Whether loader workers recorded some steps: those passed to the loader, not those that reached the loop."""
        return any(leg.begin.num_workers for order in self.orders for epoch in order.epochs for leg in epoch.legs)


def audit(paths: Sequence[Path], *, assume_fresh_weights: bool = False) -> Report:
    """Audit the ledgers at these paths, of all ranks and starts. Memory holds the digests of one rank at a time.

    With `assume_fresh_weights`, a start without a loaded state discards all records before it.

    Raises LedgerError: a file cannot be read at all.
    """
    by_rank: dict[int, list[Path]] = {}
    for path in paths:
        by_rank.setdefault(rank_of(path), []).append(path)
    # By dataset and split: each has a lineage.
    records: dict[tuple[str, str | None], dict[int, RankRecord]] = {}
    damages, changed = list[Damage](), dict[OrderKey, list[Changed]]()
    num_batches = num_lost = 0
    for _, files in sorted(by_rank.items()):
        parts: dict[Begin, Part] = {}
        for path in files:
            reading = read_ledger(path)
            damages += reading.damages
            num_lost += reading.num_lost
            for part in reading.parts:
                known = parts.get(part.begin)
                if known is None or len(part.steps) > len(known.steps):  # a copy of a file has the same begin lines
                    parts[part.begin] = part
        groups: dict[tuple[str, str | None, int], list[Part]] = {}
        for begin, part in parts.items():
            num_batches += len(part.steps)
            groups.setdefault((begin.dataset, begin.spec.split, begin.rank), []).append(part)
        for (dataset, split, rank), group in groups.items():
            of_ranks = records.setdefault((dataset, split), {})
            record = {**of_ranks.get(rank, {}), **record_of(group)}  # the files of several ranks may be joined into one
            of_ranks[rank] = dict(sorted(record.items(), key=lambda item: item[1].time))
            for key, found in _changed(rank, group):
                changed.setdefault(key, []).extend(found)
    orders = [
        order
        for of_ranks in records.values()
        for order in _orders(lineage_of(of_ranks, assume_fresh_weights=assume_fresh_weights), sorted(of_ranks), changed)
    ]
    return Report(list(paths), num_batches, num_lost, orders, damages)


def _key_of(begin: Begin) -> OrderKey:
    """Return the values that decide the order of an epoch's samples: equal keys mean one order."""
    return tuple({"dataset": begin.dataset, **order_of(begin.spec), "num_samples": begin.num_samples}.items())


def _changed(rank: int, parts: Sequence[Part]) -> Iterator[tuple[OrderKey, list[Changed]]]:
    by_address: dict[tuple[object, ...], list[Part]] = {}
    for part in parts:
        by_address.setdefault((part.begin.spec, part.begin.num_samples, part.begin.epoch), []).append(part)
    for same in by_address.values():
        begin = same[0].begin
        steps = np.concatenate([part.steps for part in same])
        digests = np.concatenate([part.digests for part in same])
        order = np.argsort(steps, kind="stable")
        steps, digests = steps[order], digests[order]
        differs = (steps[1:] == steps[:-1]) & (digests[1:] != digests[:-1])
        has_changed = np.isin(steps, steps[1:][differs])
        seen: dict[int, dict[str, None]] = {}
        for step, digest in zip(steps[has_changed].tolist(), digests[has_changed].tolist(), strict=True):
            seen.setdefault(step, {})[f"{digest:016x}"] = None
        yield _key_of(begin), [Changed(begin.epoch, rank, step, tuple(found)) for step, found in seen.items()]


def _orders(lineage: Lineage, ranks: list[int], changed: dict[OrderKey, list[Changed]]) -> Iterator[Order]:
    legs, aliases = legs_of(lineage), _aliases(lineage.kept)
    last = lineage.kept[-1]
    by_order: dict[OrderKey, list[Start]] = {}
    for start in lineage.starts:
        key = _key_of(start.begin)
        by_order.setdefault(aliases.get(key, key), []).append(start)
    for key, starts in by_order.items():
        own = [leg for leg in legs if leg.start in starts]
        oldest = lineage.kept[0]
        took_part = {rank for start in starts for rank in range(start.begin.spec.world_size)}
        yield Order(
            key=key,
            starts=starts,
            ranks=[rank for rank in ranks if any(rank in start.segments for start in starts)],
            absent=sorted(took_part - {*ranks}),
            apart=list(_apart(lineage, ranks)) if last in starts else [],
            orphan=oldest if oldest in starts and oldest.place and not oldest.parent else None,
            epochs=list(account_for(own, legs[-1] if legs else None, ranks)),
            discarded=[found for start in starts for found in _discarded(lineage, start)],
            changed=[found for raw, of_key in changed.items() if aliases.get(raw, raw) == key for found in of_key],
        )


def _aliases(kept: Sequence[Start]) -> dict[OrderKey, OrderKey]:
    """Return, for the orders of a lineage, the order that continued each: equal up to the sample where the mix changed."""
    aliases: dict[OrderKey, OrderKey] = {}
    for start, later in reversed([*pairwise(kept)]):
        key, its_key = _key_of(start.begin), _key_of(later.begin)
        then, now = dict(key), dict(its_key)
        fixed = then.keys() - {*OF_MIXTURES, "num_samples"}
        is_in_first = later.place is not None and later.place[0] == 0 and later.place[1] > 0
        if key != its_key and is_in_first and all(then[name] == now[name] for name in fixed):
            assert later.place
            if goes_on(then, now, later.place[1]):
                aliases[key] = aliases.get(its_key, its_key)
    return aliases


def _apart(lineage: Lineage, ranks: Sequence[int]) -> Iterator[Apart]:
    """Yield the ranks whose latest start the lowest rank took no part in. A rank that only recorded less is not apart."""
    last = lineage.kept[-1]
    for rank in ranks:
        own = [start for start in lineage.starts if rank in start.segments]
        latest = max(own, key=lambda start: start.segments[rank][0].begin.time)
        if rank < last.begin.spec.world_size and ranks[0] not in latest.segments:
            yield Apart(rank, latest, last)


def _discarded(lineage: Lineage, start: Start) -> Iterator[Discarded]:
    resumed = lineage.next_of(start)
    runs: dict[tuple[int, Slicing], IntArray] = {}
    for rank, segments in start.segments.items():
        for segment in segments:
            lost = without(segment.runs, lineage.kept_runs(start, rank, segment))
            key = segment.begin.epoch, segment.slicing
            runs[key] = join([runs.get(key, NONE), lost])
    for (epoch, _), lost in runs.items():
        yield from (Discarded(epoch, (first, stop), start, resumed) for first, stop in covered(lost).tolist())


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON has it. Positions are [start, stop) of the epoch, the first 1,000 ranges of each kind."""
    return {
        "proven": report.is_proven,
        "by_workers": report.by_workers,
        "batches": report.num_batches,
        "lost_lines": report.num_lost,
        "ledgers": [str(path) for path in report.paths],
        "damages": [asdict(damage) | {"path": str(damage.path)} for damage in report.damages],
        "orders": [_order_as_json(order) for order in report.orders],
    }


def _order_as_json(order: Order) -> dict[str, Any]:
    return {
        "proven": order.is_proven,
        **dict(order.key),
        "ranks": order.ranks,
        "absent_ranks": order.absent,
        "apart": [{"rank": apart.rank, "start": apart.start.number, "last_start": apart.last.number} for apart in order.apart],
        "unknown_parent": order.orphan.begin.parent if order.orphan else None,
        "starts": [_start_as_json(start) for start in order.starts],
        "discarded": [
            {
                "epoch": each.epoch,
                "first_step": each.steps[0],
                "last_step": each.steps[1] - 1,
                "start": each.start.number,
                "resumed_by": each.resumed.number if each.resumed else None,
            }
            for each in order.discarded
        ],
        "epochs": [_epoch_as_json(epoch) for epoch in order.epochs],
        "changed": [asdict(changed) for changed in order.changed],
    }


def _start_as_json(start: Start) -> dict[str, Any]:
    begin = start.begin
    return {
        "number": start.number,
        "run": begin.run,
        "id": begin.start,
        "parent": begin.parent or None,
        "time": begin.time.isoformat(),
        "epoch": begin.epoch,
        "step": begin.step,
        "offset": begin.spec.offset,
        "batch_size": begin.spec.batch_size,
        "world_size": begin.spec.world_size,
        "ranks": len(start.segments),
    }


def _epoch_as_json(epoch: Epoch) -> dict[str, Any]:
    counts = ("num_samples", "num_due", "num_skipped", "num_dropped", "num_repeated", "is_finished", "steps_done")
    return {
        "epoch": epoch.epoch,
        "proven": epoch.is_proven,
        **{name: getattr(epoch, name) for name in counts},
        "missing": _samples_as_json(epoch.missing),
        "twice": _samples_as_json(epoch.twice),
        "gaps": [
            {"start": gap.leg.start.number, "first_step": gap.steps[0], "last_step": gap.steps[1] - 1, "ranks": gap.ranks}
            for gap in epoch.gaps
        ],
    }


def _samples_as_json(positions: IntArray) -> dict[str, Any]:
    return {"samples": size(positions), "ranges": len(positions), "positions": positions[:_MAX_LISTED].tolist()}
