"""The report: what the ledgers of a run prove, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.audit.account import Epoch, Gap, account_for
from penstock.audit.course import Course, course_of, cuts_of, follow, reaches
from penstock.audit.history import Iteration, Place, Start, StartKey
from penstock.audit.intervals import size
from penstock.audit.rank import Changed, OrderKey, RankHistory, RankRecord, Thrown, history_of, order_of, record_of
from penstock.audit.reading import Damage, IntArray, Part, read_ledger, read_ranks

_MOST_LISTED = 1000  # intervals of positions in JSON; how many there are is told besides


@dataclass(frozen=True, slots=True)
class Apart:
    """A rank that went on from another state than the leader: no checkpoint makes what both trained on one run."""

    rank: int
    start: Start
    leader: Start


@dataclass(frozen=True, slots=True)
class Order:
    """What became of one order of samples: of one run, unless the ledgers are of several.

    leader   the rank whose ledgers say how the run went
    absent   ranks that took part, and of which there is no ledger
    apart    ranks that did not go on from the leader's states
    left_by  the start that went on from the last epoch in another order of the dataset
    """

    key: OrderKey
    ranks: list[RankHistory]
    leader: RankHistory
    absent: list[int]
    apart: list[Apart]
    left_by: Start | None
    epochs: list[Epoch]
    changed: list[Changed]

    @property
    def dataset(self) -> str:
        """Its name on the server."""
        return self.leader.starts[0].begin.dataset

    @property
    def is_proven(self) -> bool:
        """Whether each sample that was due was trained on exactly once an epoch, and was the same whenever it was seen."""
        return all(epoch.is_proven for epoch in self.epochs) and not self.changed and not self.apart


@dataclass(frozen=True, slots=True)
class Report:
    """What the ledgers of a run say. `num_batches` counts those that were trained on twice as well."""

    paths: list[Path]
    num_batches: int
    orders: list[Order]
    damages: list[Damage]

    @property
    def is_proven(self) -> bool:
        """Whether all orders are, and no line is lost that might say otherwise; a torn one is what a killed process leaves."""
        return bool(self.num_batches) and all(o.is_proven for o in self.orders) and all(d.is_torn for d in self.damages)

    @property
    def by_workers(self) -> bool:
        """Whether loader workers noted some of what counts: what they handed to the loader, not what reached the loop."""
        histories = [history for order in self.orders for history in order.ranks]
        return any(leg.begin.num_workers for history in histories for leg in history.legs)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON has it. Positions are [start, stop) of the epoch, the first 1,000 ranges of each kind."""
        return {
            "proven": self.is_proven,
            "by_workers": self.by_workers,
            "batches": self.num_batches,
            "ledgers": [str(path) for path in self.paths],
            "damages": [asdict(damage) | {"path": str(damage.path)} for damage in self.damages],
            "orders": [_order(order) for order in self.orders],
        }


def audit(paths: Sequence[Path], *, trust_starts: bool = False) -> Report:
    """What the ledgers at these paths prove, all ranks' and all starts'. In memory is one rank at a time.

    With `trust_starts`, a start that loaded no state throws away what was recorded after its first step, as one that did.
    Raises LedgerError: a file cannot be read at all.
    """
    damages: list[Damage] = []
    records: dict[OrderKey, list[RankRecord]] = {}
    num_batches = 0
    for files in _by_rank(paths):
        parts: dict[tuple[OrderKey, int], list[Part]] = {}
        for path in files:
            reading = read_ledger(path)
            damages += reading.damages
            num_batches += sum(len(part.steps) for part in reading.parts)
            for part in reading.parts:
                parts.setdefault((order_of(part.begin), part.begin.rank), []).append(part)
        for (key, rank), found in parts.items():
            records.setdefault(key, []).append(record_of(rank, found, trust_starts=trust_starts))
    return Report(list(paths), num_batches, [_make_order(key, records) for key in records], damages)


def _by_rank(paths: Sequence[Path]) -> list[list[Path]]:
    """The files in groups that have no rank in common."""
    ranks = {path: read_ranks(path) for path in paths}
    if any(len(found) > 1 for found in ranks.values()):
        return [list(paths)]
    groups: dict[tuple[int, ...], list[Path]] = {}
    for path, own in ranks.items():
        groups.setdefault(tuple(own), []).append(path)
    return [groups[own] for own in sorted(groups)]


def _make_order(key: OrderKey, orders: Mapping[OrderKey, Sequence[RankRecord]]) -> Order:
    records = sorted(orders[key], key=lambda record: record.rank)
    reach = reaches([record.iterations for record in records])
    first = _leader(records)
    course = course_of(first.iterations, reach)
    leader = history_of(first, course)
    cuts = cuts_of(course)
    courses = [course if record is first else _own_course(record, course, cuts, first, reach) for record in records]
    histories = [leader if record is first else history_of(record, own) for record, own in zip(records, courses, strict=True)]
    apart = [_apart(record, own, first, course) for record, own in zip(records, courses, strict=True)]
    left_by = _left_by(course, records, [orders[other] for other in orders if other != key and _is_of_same_data(other, key)])
    took_part = {rank for start in leader.starts for rank in range(start.slicing.world_size)}
    return Order(
        key=key,
        ranks=histories,
        leader=leader,
        absent=sorted(took_part - {record.rank for record in records}),
        apart=[found for found in apart if found],
        left_by=left_by,
        epochs=list(account_for(leader, histories, is_left=left_by is not None)),
        changed=[changed for record in records for changed in record.changed],
    )


def _leader(records: Sequence[RankRecord]) -> RankRecord:
    """Who says how the run went: rank 0, which takes part whatever the world size.

    Or a rank with all of its starts and more, of which it was killed before its first batch. Their clocks tell nothing: ranks
    are on machines of their own.
    """
    first, *others = records
    for record in others:
        if Counter(start.key for start in record.starts) > Counter(start.key for start in first.starts):
            first = record
    return first


def _own_course(
    record: RankRecord,
    course: Course,
    cuts: Mapping[int, Sequence[Iteration]],
    leader: RankRecord,
    reach: Mapping[StartKey, Place],
) -> Course:
    on_course = follow(record.iterations, course, cuts, leader.iterations)
    return course_of(record.iterations, reach) if on_course is None else on_course


def _apart(record: RankRecord, course: Course, leader: RankRecord, leads: Course) -> Apart | None:
    """Whether each of the two has a start in its course that the other has not at all, though both should."""
    mine, theirs = ({start.key for start in each.starts} for each in (record, leader))
    own = [kept.iteration.start for kept in course if kept.iteration.start.key not in theirs]
    others = [kept.iteration.start for kept in leads if kept.iteration.start.key not in mine]
    others = [start for start in others if record.rank < start.slicing.world_size]
    return Apart(record.rank, own[0], others[0]) if own and others else None


def _is_of_same_data(one: OrderKey, other: OrderKey) -> bool:
    return all(dict(one)[name] == dict(other)[name] for name in ("dataset", "split"))


def _left_by(course: Course, records: Sequence[RankRecord], others: Sequence[Sequence[RankRecord]]) -> Start | None:
    """The start that went on in another order with weights that the last epoch of this one had trained."""
    epoch = course[-1].iteration.begin.epoch
    if not any(len(kept.runs) for kept in course if kept.iteration.begin.epoch == epoch):
        return None
    last_times = {record.rank: max(iteration.last_time for iteration in record.iterations) for record in records}
    for other in others:
        reach = reaches([record.iterations for record in other])
        for record in other:
            if record.rank in last_times and (start := _went_on(record, last_times[record.rank], epoch, reach)):
                return start
    return None


def _went_on(record: RankRecord, time: datetime, epoch: int, reach: Mapping[StartKey, Place]) -> Start | None:
    """The first start of a rank that goes on after a time with what was trained on before it in an epoch of another order.

    One with a state from before this epoch, or with one that its own order had come to, has thrown that away.
    """
    firsts: dict[int, Iteration] = {}
    came: Place = (0, 0)
    for iteration in record.iterations:
        start = iteration.start
        first = firsts.setdefault(start.number, iteration)
        is_back = start.resumes and first.time > time and (first.begin.epoch <= epoch or first.place <= came)
        if len(iteration.runs) and iteration.time > time and not is_back:
            return start
        if first is iteration:
            came = max(came, reach[start.key])
    return None


def _order(order: Order) -> dict[str, Any]:
    num_ranks = Counter(key for history in order.ranks for key in {start.key for start in history.starts})
    return {
        "proven": order.is_proven,
        **dict(order.key),
        "ranks": [history.rank for history in order.ranks],
        "absent_ranks": order.absent,
        "apart": [
            {"rank": a.rank, "epoch": a.start.begin.epoch, "step": a.start.begin.step}
            | {"leader_epoch": a.leader.begin.epoch, "leader_step": a.leader.begin.step}
            for a in order.apart
        ],
        "starts": [
            {
                "time": start.begin.time.isoformat(),
                "resumed": start.begin.num_loads > 0,
                "epoch": start.begin.epoch,
                "step": start.begin.step,
                "offset": start.slicing.offset,
                "batch_size": start.slicing.batch_size,
                "world_size": start.slicing.world_size,
                "ranks": num_ranks[start.key],
            }
            for start in order.leader.starts
        ],
        "thrown_away": [_thrown(thrown) for thrown in order.leader.thrown],
        "epochs": [_epoch(epoch) for epoch in order.epochs],
        "changed": [asdict(changed) for changed in order.changed],
    }


def _thrown(thrown: Thrown) -> dict[str, Any]:
    first, stop = thrown.steps
    return {"epoch": thrown.epoch, "first_step": first, "last_step": stop - 1, "start": thrown.started.number + 1} | (
        {"resumed_by": thrown.resumed.number + 1} if thrown.resumed else {}
    )


def _epoch(epoch: Epoch) -> dict[str, Any]:
    counts = ("num_sequences", "num_due", "num_skipped", "num_dropped", "num_ahead", "is_finished", "steps_done")
    return {
        "epoch": epoch.epoch,
        "proven": epoch.is_proven,
        **{name: getattr(epoch, name) for name in counts},
        "missing": _samples(epoch.missing),
        "twice": _samples(epoch.twice),
        "gaps": [_gap(gap) for gap in epoch.gaps],
    }


def _samples(positions: IntArray) -> dict[str, Any]:
    return {"samples": size(positions), "ranges": len(positions), "positions": positions[:_MOST_LISTED].tolist()}


def _gap(gap: Gap) -> Mapping[str, Any]:
    first, stop = gap.steps
    slicing = gap.leg.slicing
    return {
        "first_step": first,
        "last_step": stop - 1,
        "ranks": gap.ranks,
        "world_size": slicing.world_size,
        "batch_size": slicing.batch_size,
        "offset": slicing.offset,
    }
