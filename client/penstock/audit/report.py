"""Audit report: the facts that the ledgers of a run prove, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from penstock.audit.account import Epoch, account_for
from penstock.audit.alignment import align
from penstock.audit.history import RankHistory, history_of
from penstock.audit.lineage import Course, Reach, course_of, cuts_of, follow, reach_of, reaches
from penstock.audit.orders import OrderKey, Orders
from penstock.audit.reading import Damage, Part, read_begins, read_ledger, told_of
from penstock.audit.record import Changed, Iteration, Place, RankRecord, Start, record_of


@dataclass(frozen=True, slots=True)
class Apart:
    """A rank that resumed from a different state than the leader: no checkpoint covers both in one run."""

    rank: int
    start: Start
    leader: Start


@dataclass(frozen=True, slots=True)
class PassedOver:
    """An epoch without records, although a start loaded a state that had consumed a part of it."""

    epoch: int
    resumed: Start


@dataclass(frozen=True, slots=True)
class Order:
    """Audit result of one order of samples: one run, unless the ledgers belong to several.

    leader   the rank whose ledgers define the course of the run
    absent   ranks that took part, but have no ledger
    apart    ranks that did not continue from the leader's states
    passed   unrecorded epochs; a start resumed after them
    left_by  the start that continued from the last epoch in another order of the dataset
    """

    key: OrderKey
    ranks: list[RankHistory]
    leader: RankHistory
    absent: list[int]
    apart: list[Apart]
    passed: list[PassedOver]
    left_by: Start | None
    epochs: list[Epoch]
    changed: list[Changed]

    @property
    def dataset(self) -> str:
        """Name of the dataset on the server."""
        return self.leader.starts[0].begin.dataset

    @property
    def is_proven(self) -> bool:
        """Whether each due sample was trained on exactly once per epoch, with the same content each time."""
        return all(epoch.is_proven for epoch in self.epochs) and not self.changed and not self.apart and not self.passed


@dataclass(frozen=True, slots=True)
class Report:
    """Audit result of a run's ledgers. `num_batches` also counts batches that were trained on twice.

    num_lost       iterations without records, before others of their launch
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
        histories = [history for order in self.orders for history in order.ranks]
        return any(leg.begin.num_workers for history in histories for leg in history.legs)


def audit(paths: Sequence[Path], *, assume_fresh_weights: bool = False) -> Report:
    """Audit the ledgers at these paths, of all ranks and starts. Memory holds one rank at a time.

    With `assume_fresh_weights`, a start without a loaded state discards the records after its first step, as a start with a
    state does.

    Raises LedgerError: a file cannot be read at all.
    """
    damages: list[Damage] = []
    orders = Orders()
    ranks: dict[Path, set[int]] = {path: set() for path in paths}
    nbytes = _sizes(paths)
    for path in paths:
        for begin in read_begins(path, nbytes[path]):
            ranks[path].add(begin.rank)
            orders.add(begin)
    records: dict[OrderKey, list[RankRecord]] = {}
    num_batches = num_lost = 0
    for files in _by_rank(ranks):
        parts: dict[tuple[OrderKey, int], list[Part]] = {}
        recorded: dict[tuple[str, int], set[int]] = {}  # iterations of each launch
        for path in files:
            reading = read_ledger(path, nbytes[path])
            damages += reading.damages
            num_batches += sum(len(part.steps) for part in reading.parts)
            for part in reading.parts:
                recorded.setdefault((part.begin.launch, part.begin.rank), set()).add(part.begin.iteration)
                key, part.begin, part.stop = orders.of(part.begin)
                parts.setdefault((key, part.begin.rank), []).append(part)
        num_lost += sum(max(numbers) + 1 - len(numbers) for numbers in recorded.values())
        for (key, rank), found in parts.items():
            records.setdefault(key, []).append(record_of(rank, found, assume_fresh_weights=assume_fresh_weights))
    runs = {key: _Run.of(found) for key, found in records.items()}
    return Report(list(paths), num_batches, num_lost, [_make_order(key, runs) for key in runs], damages)


def _sizes(paths: Sequence[Path]) -> dict[Path, int]:
    """Return the size of each file in bytes. A run may append, and both reads must see the same bytes."""
    sizes = {}
    for path in paths:
        with told_of(path):
            sizes[path] = path.stat().st_size
    return sizes


def _by_rank(ranks: Mapping[Path, set[int]]) -> list[list[Path]]:
    """Group the files so that no two groups share a rank."""
    if any(len(found) > 1 for found in ranks.values()):
        return [list(ranks)]
    groups: dict[tuple[int, ...], list[Path]] = {}
    for path, own in ranks.items():
        groups.setdefault(tuple(own), []).append(path)
    return [groups[own] for own in sorted(groups)]


@dataclass(frozen=True, slots=True)
class _Run:
    """Records of all ranks in one order, the leader's among them; `reach` covers the leader's starts."""

    leader: RankRecord
    records: list[RankRecord]
    reach: Reach

    @classmethod
    def of(cls, records: Sequence[RankRecord]) -> _Run:
        """Build the run of these ranks."""
        in_order = sorted(records, key=lambda record: record.rank)
        first = _leader(in_order)
        aligned = [align(record, first) for record in in_order]
        leader = next(record for record in aligned if record.rank == first.rank)
        return cls(leader, aligned, reaches(leader, aligned))


def _make_order(key: OrderKey, runs: Mapping[OrderKey, _Run]) -> Order:
    run = runs[key]
    course = course_of(run.leader.iterations, run.reach)
    leader, cuts = history_of(run.leader, course), cuts_of(course)
    courses = [
        follow(record, cuts) if record.is_in_run else course_of(record.iterations, reach_of(record, run.reach))
        for record in run.records
    ]
    pairs = list(zip(run.records, courses, strict=True))
    histories = [leader if record is run.leader else history_of(record, own) for record, own in pairs]
    apart = [_apart(record, own, run.leader) for record, own in pairs]
    left_by = _left_by(course, run.records, [runs[other] for other in runs if other != key and _is_of_same_data(other, key)])
    took_part = {rank for start in leader.starts for rank in range(start.slicing.world_size)}
    return Order(
        key=key,
        ranks=histories,
        leader=leader,
        absent=sorted(took_part - {record.rank for record in run.records}),
        apart=[found for found in apart if found],
        passed=list(_passed_over(run.leader)),
        left_by=left_by,
        epochs=list(account_for(leader, histories, is_left=left_by is not None)),
        changed=[changed for record in run.records for changed in record.changed],
    )


def _leader(records: Sequence[RankRecord]) -> RankRecord:
    """Return the leader: rank 0, which takes part in any world size, or a rank with all its starts and more.

    Rank 0 was then killed before its first batch in the additional starts. Clocks do not help: ranks run on different machines.
    """
    first, *others = records
    for record in others:
        keys = iter([start.key for start in record.starts])
        if len(record.starts) > len(first.starts) and all(start.key in keys for start in first.starts):
            first = record
    return first


def _apart(record: RankRecord, course: Course, leader: RankRecord) -> Apart | None:
    """Return the pair of unmatched starts if both the rank's course and the leader have one; None otherwise."""
    known = {start.in_run for start in record.starts}
    own = [kept.iteration.start for kept in course if kept.iteration.start.in_run is None]
    others = [start for start in leader.starts if start.number not in known and record.rank < start.slicing.world_size]
    return Apart(record.rank, own[0], others[-1]) if own and others else None


def _passed_over(leader: RankRecord) -> Iterator[PassedOver]:
    """Yield unrecorded epochs that a start resumed after. Skips the first start: the ledgers may begin with it."""
    epochs: set[int] = set()
    starts: set[int] = set()
    for iteration in leader.iterations:
        start, epoch = iteration.start, iteration.start.begin.state_epoch
        epochs.add(iteration.begin.epoch)
        if starts and start.number not in starts and epoch is not None and epoch not in epochs:
            yield PassedOver(epoch, start)
        starts.add(start.number)


def _is_of_same_data(one: OrderKey, other: OrderKey) -> bool:
    return all(dict(one)[name] == dict(other)[name] for name in ("dataset", "split"))


def _left_by(course: Course, records: Sequence[RankRecord], others: Sequence[_Run]) -> Start | None:
    """Return the start that continued in another order with the weights of this order's last epoch."""
    epoch = course[-1].iteration.begin.epoch
    if not any(len(kept.runs) for kept in course if kept.iteration.begin.epoch == epoch):
        return None
    last_times = {record.rank: max(iteration.last_time for iteration in record.iterations) for record in records}
    for other in others:
        for record in other.records:
            reach = reach_of(record, other.reach)
            if record.rank in last_times and (start := _went_on(record, last_times[record.rank], epoch, reach)):
                return start
    return None


def _went_on(record: RankRecord, time: datetime, epoch: int, reach: Reach) -> Start | None:
    """Return a rank's first start after `time` that continues from the trained weights of another order's `epoch`.

    A start whose state is from before this epoch, or from its own order's past, has discarded those weights.
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
            came = max(came, reach[start.number])
    return None
