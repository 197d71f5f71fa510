"""Audit report: what the ledgers of a run prove, as data and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from penstock.audit.account import Epoch, account_for
from penstock.audit.intervals import NONE, covered, join, size, without
from penstock.audit.lineage import Lineage, Segment, Start, lineage_of, segments_of
from penstock.audit.reading import Damage, IntArray, Section, ranks_of, read_ledger
from penstock.ledger.begin import Begin
from penstock.state import OF_MIXTURES, goes_on, order_of

_MAX_LISTED = 1000  # intervals of positions; a separate field gives their total number

OrderId = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class Apart:
    """A rank that resumed from another state than the last start: no checkpoint covers both in one run."""

    rank: int
    start: int
    last_start: int


@dataclass(frozen=True, slots=True)
class Discarded:
    """Steps whose trained weights were discarded, of a start; and the start that resumed before them."""

    epoch: int
    first_step: int
    last_step: int
    start: int
    resumed_by: int | None


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

    key      the parameters that decide the order
    ranks    ranks whose ledgers are there; `absent` took part, but have no ledger
    apart    ranks that did not resume from the state of the last start
    orphan   the oldest start of the lineage, if it loaded the state of a start that is not in the ledgers
    """

    key: OrderId
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
    def epochs(self) -> list[Epoch]:
        """Epochs of all orders."""
        return [epoch for order in self.orders for epoch in order.epochs]

    @property
    def by_workers(self) -> bool:
        """Whether loader workers recorded some steps: those passed to the loader, not those that reached the loop."""
        return any(segment.begin.num_workers for epoch in self.epochs for segment in epoch.segments)


def audit(paths: Sequence[Path], *, assume_fresh_weights: bool = False) -> Report:
    """Audit the ledgers at these paths, of all ranks and starts.

    Memory holds the digests of one rank at a time, or of the ranks whose ledgers were joined into one file.
    With `assume_fresh_weights`, a start without a loaded state discards all records before it.

    Raises LedgerError: a file cannot be read at all.
    """
    segments: dict[tuple[str, str | None], list[Segment]] = {}  # by dataset and split: each has a lineage
    damages, changed = list[Damage](), dict[OrderId, list[Changed]]()
    num_batches = num_lost = 0
    for files in _groups(paths):
        sections: dict[Begin, Section] = {}
        for path in files:
            reading = read_ledger(path)
            damages += reading.damages
            num_lost += reading.num_lost
            for section in reading.sections:
                known = sections.get(section.begin)
                if known is None or len(section.steps) > len(known.steps):  # a copy of a file has the same begin lines
                    sections[section.begin] = section
        num_batches += sum(len(section.steps) for section in sections.values())
        for one in segments_of(sections.values()):
            segments.setdefault((one.begin.dataset, one.begin.spec.split), []).append(one)
        for key, found in _changed(sections.values()):
            changed.setdefault(key, []).extend(found)
    lineages = (lineage_of(of_data, assume_fresh_weights=assume_fresh_weights) for of_data in segments.values())
    orders = [order for lineage in lineages for order in _orders(lineage, changed)]
    return Report(list(paths), num_batches, num_lost, orders, damages)


def _groups(paths: Sequence[Path]) -> list[list[Path]]:
    """Group the files so that each rank is in one group: a file may repeat the records of others. Ranks ascend."""
    groups: list[tuple[set[int], list[Path]]] = []
    for path in paths:
        ranks, files = ranks_of(path), list[Path]()
        same = [group for group in groups if group[0] & ranks]
        groups = [group for group in groups if not group[0] & ranks]
        for of_group, others in same:
            ranks, files = ranks | of_group, files + others
        groups.append((ranks, [*files, path]))
    return [files for _, files in sorted(groups, key=lambda group: min(group[0], default=0))]


def _id_of(begin: Begin) -> OrderId:
    """Return the values that decide the order of an epoch's samples: equal ids mean one order."""
    return tuple({"dataset": begin.dataset, **order_of(begin.spec), "num_samples": begin.num_samples}.items())


def _changed(sections: Iterable[Section]) -> Iterator[tuple[OrderId, list[Changed]]]:
    by_address: dict[tuple[object, ...], list[Section]] = {}
    for section in sections:
        begin = section.begin
        by_address.setdefault((begin.dataset, begin.spec, begin.num_samples, begin.rank, begin.epoch), []).append(section)
    for same in by_address.values():
        begin = same[0].begin
        steps = np.concatenate([section.steps for section in same])
        digests = np.concatenate([section.digests for section in same])
        order = np.argsort(steps, kind="stable")
        steps, digests = steps[order], digests[order]
        differs = (steps[1:] == steps[:-1]) & (digests[1:] != digests[:-1])
        has_changed = np.isin(steps, steps[1:][differs])
        seen: dict[int, dict[str, None]] = {}
        for step, digest in zip(steps[has_changed].tolist(), digests[has_changed].tolist(), strict=True):
            seen.setdefault(step, {})[f"{digest:016x}"] = None
        yield _id_of(begin), [Changed(begin.epoch, begin.rank, step, tuple(found)) for step, found in seen.items()]


def _orders(lineage: Lineage, changed: dict[OrderId, list[Changed]]) -> Iterator[Order]:
    aliases, oldest = _aliases(lineage.kept), lineage.kept[0]
    last = lineage.segments[-1] if lineage.segments else None
    ranks = sorted({rank for start in lineage.starts for rank in start.times})
    by_order: dict[OrderId, list[Start]] = {}
    for start in lineage.starts:
        key = _id_of(start.begin)
        by_order.setdefault(aliases.get(key, key), []).append(start)
    for key, starts in by_order.items():
        took_part = {rank for start in starts for rank in range(start.begin.spec.world_size)}
        yield Order(
            key=key,
            starts=starts,
            ranks=[rank for rank in ranks if any(rank in start.times for start in starts)],
            absent=sorted(took_part - {*ranks}),
            apart=list(_apart(lineage, ranks)) if lineage.kept[-1] in starts else [],
            orphan=oldest if oldest in starts and oldest.place and not oldest.parent else None,
            epochs=list(account_for([one for one in lineage.segments if one.start in starts], last, ranks)),
            discarded=[found for start in starts for found in _discarded(lineage, start)],
            changed=[found for raw, of_key in changed.items() if aliases.get(raw, raw) == key for found in of_key],
        )


def _aliases(kept: Sequence[Start]) -> dict[OrderId, OrderId]:
    """Return, for the orders of a lineage, the order that continued each: equal up to the sample where the mix changed."""
    aliases: dict[OrderId, OrderId] = {}
    for start, later in reversed([*pairwise(kept)]):
        key, later_key = _id_of(start.begin), _id_of(later.begin)
        then, now = dict(key), dict(later_key)
        epoch, position = later.place or (0, 0)
        fixed = then.keys() - {*OF_MIXTURES, "num_samples"}
        is_same = all(then[name] == now[name] for name in fixed)
        if key != later_key and epoch == 0 < position and is_same and goes_on(then, now, position):
            aliases[key] = aliases.get(later_key, later_key)
    return aliases


def _apart(lineage: Lineage, ranks: Sequence[int]) -> Iterator[Apart]:
    """Yield the ranks whose latest start the lowest rank took no part in. A rank that only recorded less is not apart."""
    last = lineage.kept[-1]
    for rank in ranks:
        latest = max((start for start in lineage.starts if rank in start.times), key=lambda start: start.times[rank])
        if rank < last.begin.spec.world_size and ranks[0] not in latest.times:
            yield Apart(rank, latest.number, last.number)


def _discarded(lineage: Lineage, start: Start) -> Iterator[Discarded]:
    resumed = lineage.next_of(start)
    for segment in start.segments.values():
        lost = [without(steps, segment.kept.get(rank, NONE)) for rank, steps in segment.steps.items()]
        for first, stop in covered(join(lost)).tolist():
            yield Discarded(segment.epoch, first, stop - 1, start.number, resumed.number if resumed else None)


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON has it. Positions are [start, stop) of the epoch, the first 1,000 ranges of each kind."""
    return {
        "proven": report.is_proven,
        "by_workers": report.by_workers,
        "batches": report.num_batches,
        "lost_lines": report.num_lost,
        "ledgers": [str(path) for path in report.paths],
        "damages": [asdict(damage) | {"path": str(damage.path)} for damage in report.damages],
        "orders": [
            {
                "proven": order.is_proven,
                **dict(order.key),
                "ranks": order.ranks,
                "absent_ranks": order.absent,
                "apart": [asdict(apart) for apart in order.apart],
                "unknown_parent": order.orphan.begin.parent if order.orphan else None,
                "starts": [_start_as_json(start) for start in order.starts],
                "discarded": [asdict(discarded) for discarded in order.discarded],
                "epochs": [_epoch_as_json(epoch) for epoch in order.epochs],
                "changed": [asdict(changed) for changed in order.changed],
            }
            for order in report.orders
        ],
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
        "ranks": len(start.times),
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
            {
                "start": gap.segment.start.number,
                "first_step": gap.steps[0],
                "last_step": gap.steps[-1],
                "ranks": gap.ranks,
            }
            for gap in epoch.gaps
        ],
    }


def _samples_as_json(positions: IntArray) -> dict[str, Any]:
    return {"samples": size(positions), "ranges": len(positions), "positions": positions[:_MAX_LISTED].tolist()}
