"""Jobs: what the ranks of each run report, and the requests that they wait for, as one server process knows them.

The processes of a server exchange these records as plain values; see Monitor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from penstock.spec import Spec
from penstock.wire.report import STAGES, Report
from penstock_server.monitoring.buckets import BUCKET_SECONDS, NUM_BUCKETS, Buckets, Fading, bucket_of
from penstock_server.monitoring.stages import SharedWait, StageClock

KEPT_SECONDS = 3600.0  # a job that ended stays for this long
WAITING_FRACTION = 0.05  # of its time; above it, a rank counts as waiting
_MAX_RANKS = 20_000  # records of ranks; beyond it, new ones are not recorded
_LEAST = 1e-9  # of seconds and of a rate; a quotient by less may be infinite, which is no JSON
_MIN_SECONDS = 0.5  # of a loop, before its wait fraction means anything
_BLOCKS = "blocks"  # stage of a clock until `waited` divides it
_SAME_WAIT_SECONDS = 1.0  # a rank that requests a range again within this time has waited all along


Client = tuple[str, int]  # host and port of a connection
NONE_UNSENT: Mapping[Client, int] = MappingProxyType({})


class JobKey(NamedTuple):
    """Name of a run, a dataset that it pulls, and the digest of its spec."""

    job: str
    dataset: str
    spec_digest: str


class Doing(NamedTuple):
    """What a rank's request does now: a stage, the shard that it reads, and since when the rank requests its range.

    waited  seconds that its loop has probably waited since the last report: those of the request after its buffer was used up
    """

    stage: str
    shard: str | None
    since: float
    waited: float


class PendingBlock(Protocol):
    """A requested block: its future has the clock of the work on it, and the name of its shard."""

    clock: StageClock

    @property
    def shard(self) -> str:
        """Name of the shard."""

    def done(self) -> bool:
        """Return whether the block is loaded."""


@dataclass(slots=True)
class RankRecord:
    """What a rank of a job reported, in total and lately.

    num_workers      loader workers that report for it, each its own time; 1 without any
    epoch, step      those of the last batch that its loop was given; step -1: none yet
    longest_gap      longest recent time between two reports, in seconds
    wait_seconds     total by stage
    recent           fading sums: seconds by stage, waited and computed seconds, tokens, steps
    waits_since      time since when it waits for more than 5 % of its time; None: it does not
    shard            the last shard that it waited for
    doing            what its request does now, as it was packed
    requests         those under way in this process, oldest first
    last             the last one that ended; its host may not have acknowledged all of the response
    """

    first_seen: float
    last_seen: float
    num_workers: int = 1
    epoch: int = 0
    step: int = -1
    longest_gap: float = 0.0
    buffered_bytes: int = 0
    num_retries: int = 0
    num_corrupted: int = 0
    compute_seconds: float = 0.0
    wait_seconds: dict[str, float] = field(default_factory=dict)
    recent: Fading = field(default_factory=Fading)
    waits: Buckets = field(default_factory=Buckets)
    computes: Buckets = field(default_factory=Buckets)
    waits_since: float | None = None
    shard: str | None = None
    doing: Doing | None = None
    requests: list[RankRequest] = field(default_factory=list)
    last: RankRequest | None = None

    def add(self, report: Report) -> None:
        """Add a report that arrived now."""
        now, waited = time.time(), sum(report.wait_seconds.values())
        self.longest_gap = max(self.longest_gap / 2, now - self.last_seen)
        self.last_seen = now
        self.epoch, self.step, self.buffered_bytes = report.epoch, report.step, report.buffered_bytes
        self.num_workers = report.num_workers
        self.num_retries += report.num_retries
        self.num_corrupted += report.num_corrupted
        self.compute_seconds += report.compute_seconds
        for stage, seconds in report.wait_seconds.items():
            self.wait_seconds[stage] = self.wait_seconds.get(stage, 0.0) + seconds
        amounts = {
            "tokens": report.num_tokens,
            "steps": report.num_batches,
            "waited": waited,
            "computed": report.compute_seconds,
        }
        self.recent.add(now, {**amounts, **report.wait_seconds})
        if (self.wait_fraction or 0.0) <= WAITING_FRACTION:
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = now - waited - report.compute_seconds
        # A report may cover many buckets: a rank with a full buffer requests nothing for minutes.
        last = bucket_of(now)
        covered = range(max(bucket_of(now - waited - report.compute_seconds), last - NUM_BUCKETS + 1), last + 1)
        for bucket in covered:
            self.waits.add(bucket, waited / len(covered))
            self.computes.add(bucket, report.compute_seconds / len(covered))

    @property
    def recent_waits(self) -> dict[str, float]:
        """Recent seconds by stage, those of the present wait included; only their ratios mean anything."""
        recent = self._recent_now
        return {stage: recent[stage] for stage in STAGES if recent.get(stage, 0.0) > 0}

    @property
    def wait_fraction(self) -> float | None:
        """Fraction of its recent time that it waited, the present wait included; None if it has hardly begun."""
        recent = self._recent_now
        waited, computed = recent.get("waited", 0.0), recent.get("computed", 0.0)
        return waited / (waited + computed) if waited + computed > _MIN_SECONDS else None

    @property
    def total_waits(self) -> dict[str, float]:
        """Seconds that it waited by stage, the present wait included."""
        return _added(self.wait_seconds, {self.doing.stage: self.doing.waited}) if self.doing else self.wait_seconds

    @property
    def _recent_now(self) -> Mapping[str, float]:
        if not (self.doing and self.doing.waited):
            return self.recent.amounts
        past = self.recent.values(self.recent.at + self.doing.waited)
        return _added(past, {self.doing.stage: self.doing.waited, "waited": self.doing.waited})

    def rate(self, name: str) -> float:
        """Return the recent tokens or steps a second of its loop."""
        seconds = self.recent["waited"] + self.recent["computed"]
        rate = self.num_workers * self.recent[name] / seconds if seconds > _LEAST else 0.0
        return rate if rate > _LEAST else 0.0

    def is_running(self, now: float) -> bool:
        """Whether it may go on: it waits, or its last report is not much older than it was apart from the one before."""
        return self.doing is not None or now - self.last_seen < max(2 * BUCKET_SECONDS, 3 * self.longest_gap)

    def merged(self, other: RankRecord) -> RankRecord:
        """Return the record of two processes: each has a part of the reports."""
        first, last = sorted((self, other), key=lambda record: record.last_seen)
        recent, waits, computes = (
            _sum_of(getattr(first, name), getattr(last, name)) for name in ("recent", "waits", "computes")
        )
        since = [record.waits_since for record in (first, last) if record.waits_since is not None]
        return replace(
            last,
            first_seen=min(first.first_seen, last.first_seen),
            longest_gap=max(first.longest_gap, last.longest_gap),
            num_retries=first.num_retries + last.num_retries,
            num_corrupted=first.num_corrupted + last.num_corrupted,
            compute_seconds=first.compute_seconds + last.compute_seconds,
            wait_seconds=_added(first.wait_seconds, last.wait_seconds),
            recent=recent,
            waits=waits,
            computes=computes,
            waits_since=min(since) if last.waits_since is not None else None,
            doing=min((d for d in (first.doing, last.doing) if d), key=lambda doing: doing.since, default=None),
        )

    def pack(self, unsent: Mapping[Client, int]) -> list[Any]:
        """Return the record as plain values for another process. `unsent`: see Monitor.unsent."""
        requests = list(self.requests)
        if not requests and self.last and unsent.get(self.last.client):
            requests = [self.last]
        doing = min((request.doing() for request in requests), key=lambda doing: doing.since, default=None)
        packed = [self.recent.pack(), self.waits.pack(), self.computes.pack(), doing]
        return [*(getattr(self, name) for name in _PLAIN), *packed]

    @classmethod
    def unpack(cls, values: Sequence[Any]) -> RankRecord:
        """Return the record of another process."""
        plain, (recent, waits, computes, doing) = values[: len(_PLAIN)], values[len(_PLAIN) :]
        return cls(
            **dict(zip(_PLAIN, plain, strict=True)),
            recent=Fading(*recent),
            waits=Buckets(*waits),
            computes=Buckets(*computes),
            doing=Doing(*doing) if doing else None,
        )


_PLAIN = (
    "first_seen last_seen num_workers epoch step longest_gap buffered_bytes num_retries num_corrupted compute_seconds "
    "wait_seconds waits_since shard"
).split()


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}


def _sum_of(one: Any, other: Any) -> Any:
    if isinstance(one, Fading):
        now = max(one.at, other.at)
        return Fading(now, _added(one.values(now), other.values(now)))
    return one + other


@dataclass(slots=True)
class JobRecord:
    """A run on one dataset with one spec. Before the spec is planned, `num_steps` of an epoch and `step_nbytes` are not known.

    step_nbytes  bytes of a batch
    """

    spec: Mapping[str, Any]
    num_steps: int | None = None
    step_nbytes: float = 0.0
    ranks: dict[int, RankRecord] = field(default_factory=dict)

    @property
    def last_seen(self) -> float:
        """Time of the last report."""
        return max((rank.last_seen for rank in self.ranks.values()), default=0.0)


class RankRequest:
    """A request for the range of batches at `place`, an epoch and a first step: its stages."""

    def __init__(self, place: tuple[int, int], client: Client = ("", 0)) -> None:
        self.clock = StageClock("queue")
        self.client = client
        self._place, self._ended_at = place, 0.0
        self._asked_at = self._since = time.time()
        self._record: RankRecord | None = None
        self._buffer_until = 0.0
        self._pending: Sequence[PendingBlock] = ()

    def belongs_to(self, record: RankRecord, step_nbytes: float) -> None:
        """Show the request in the record of its rank until it ends; `step_nbytes` are those of a batch in its buffer."""
        if step_nbytes and (steps := record.recent["steps"]):
            self._buffer_until = time.time() + record.buffered_bytes / step_nbytes * record.recent["computed"] / steps
        last = record.last
        if last and self._place == last._place and self._since - last._ended_at < _SAME_WAIT_SECONDS:
            self._since = last._since
        self._record = record
        record.requests.append(self)

    def wait_for(self, pending: Sequence[PendingBlock]) -> SharedWait:
        """Begin to wait for blocks; end it with `waited`."""
        self._pending = pending
        if self._record and pending:
            self._record.shard = pending[0].shard
        self.clock.enter(_BLOCKS)
        return SharedWait(dict.fromkeys(block.clock for block in pending))

    def waited(self, wait: SharedWait, next_stage: str | None) -> None:
        """End the wait for blocks."""
        self._pending = ()
        self.clock.add(wait.stages(), next_stage)

    def doing(self) -> Doing:
        """Return what the request does now."""
        waited = max(0.0, time.time() - max(self._asked_at, self._buffer_until))
        for block in self._pending:
            if not block.done():
                return Doing(block.clock.stage or "queue", block.shard, self._since, waited)
        stage = self.clock.stage
        # With its blocks done, it waits for the event loop to go on.
        return Doing("queue" if stage == _BLOCKS else stage or "receive", None, self._since, waited)

    def end(self) -> None:
        """Note that the response is sent, or failed. Idempotent."""
        if self._record and self in self._record.requests:
            self._record.requests.remove(self)
            self._record.last, self._ended_at = self, time.time()
            self._pending = ()  # of a client that left; the record would keep the blocks in memory


class Jobs:
    """Records of the jobs of this process. For all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records = dict[JobKey, JobRecord]()
        self._num_ranks = 0

    def add(self, report: Report, dataset: str, spec: Spec, rank: int, request: RankRequest) -> JobRecord | None:
        """Add a rank's report, which came with a request. None if too many ranks are known."""
        key = JobKey(report.job, dataset, spec.digest)
        with self._lock:
            job = self._records.get(key)
            record = job.ranks.get(rank) if job else None
            if job is None or record is None:
                if self._num_ranks >= _MAX_RANKS:
                    return None
                now = time.time()
                job = self._records.setdefault(key, JobRecord(spec.to_dict()))
                record = job.ranks[rank] = RankRecord(now, now)
                self._num_ranks += 1
            record.add(report)
            request.belongs_to(record, job.step_nbytes)
            return job

    def pack(
        self, unsent: Mapping[Client, int] = NONE_UNSENT
    ) -> list[tuple[JobKey, Mapping[str, Any], int | None, dict[int, list[Any]]]]:
        """Return all records as plain values for another process. Drops jobs that ended long ago."""
        now = time.time()
        with self._lock:
            kept = {key: job for key, job in self._records.items() if now - job.last_seen < KEPT_SECONDS}
            self._records = kept
            self._num_ranks = sum(len(job.ranks) for job in kept.values())
            return [
                (key, job.spec, job.num_steps, {rank: record.pack(unsent) for rank, record in job.ranks.items()})
                for key, job in kept.items()
            ]

    def restore(self, packed: Iterable[Any]) -> None:
        """Take over the records of the process before this one."""
        with self._lock:
            self._records = merged([packed])
            for rank in (rank for job in self._records.values() for rank in job.ranks.values()):
                rank.doing = None
            self._num_ranks = sum(len(job.ranks) for job in self._records.values())


def merged(processes: Iterable[Iterable[Any]]) -> dict[JobKey, JobRecord]:
    """Return the records of several processes' `Jobs.pack`, merged."""
    jobs = dict[JobKey, JobRecord]()
    for key, spec, num_steps, number, record in _unpacked(processes):
        job = jobs.setdefault(key, JobRecord(spec))
        job.num_steps = num_steps or job.num_steps
        known = job.ranks.get(number)
        job.ranks[number] = known.merged(record) if known else record
    return jobs


def _unpacked(processes: Iterable[Iterable[Any]]) -> Iterator[tuple[JobKey, Mapping[str, Any], int | None, int, RankRecord]]:
    for packed in processes:
        for key, spec, num_steps, ranks in packed:
            for number, values in ranks.items():
                yield JobKey(*key), spec, num_steps, number, RankRecord.unpack(values)
