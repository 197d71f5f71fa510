"""What people see of the jobs: the JSON of /v1/jobs, and the verdict in one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from penstock.text import counted
from penstock_server.monitoring.buckets import bucket_of
from penstock_server.monitoring.jobs import WAITING_FRACTION, JobKey, JobRecord, RankRecord
from penstock_server.schemas.monitoring import DoingInfo, JobInfo, RankInfo, StragglerInfo, VerdictInfo

_FAR_ABOVE = 0.2  # of wait fraction above the median of the job's ranks: such a rank is a straggler
_REASONS = {  # of a wait, as a clause; {} is the shard, or a phrase for shards
    "connect": "it takes long to connect to the server",
    "queue": "the server has more requests than threads for them",
    "budget": "the server's budget of bytes in flight is used up",
    "index": "the server is counting tokens",
    "read": "the server is reading cached blocks from its disk",
    "decode": "the server is decoding {}",
    "tokenize": "the server is tokenizing {}",
    "make": "the server is assembling batches more slowly than the loop takes them",
    "network": "the first byte of a response takes long to arrive",
    "receive": "it receives responses slowly",
    "retry": "its requests failed, and it tried again",
    "client": "its own process is slow to make tensors",
}


def describe_job(key: JobKey, job: JobRecord, now: float, *, history: bool) -> JobInfo:
    """Describe a job for /v1/jobs."""
    running = {rank for rank, record in job.ranks.items() if record.is_running(now)}
    of_state = [job.ranks[rank] for rank in running] or list(job.ranks.values())
    front = max(_place(record, job) for record in of_state)
    last = min(_place(record, job) for record in of_state)
    steps_per_second = min((rate for record in of_state if (rate := record.rate("steps")) > 0), default=0.0)
    epoch = min(record.epoch for record in of_state)
    num_left = (epoch + 1) * job.num_steps - last - 1 if job.num_steps else None
    info: JobInfo = {
        "job": key.job,
        "dataset": key.dataset,
        "snapshot": str(job.spec["snapshot"]),
        "spec_digest": key.spec_digest,
        "spec": dict(job.spec),
        "world_size": int(job.spec["world_size"]),
        "epoch": epoch,
        "num_steps": job.num_steps,
        "state": "running" if running else "ended",
        "started_at": min(record.first_seen for record in job.ranks.values()),
        "last_seen_at": job.last_seen,
        "seconds_left": num_left / steps_per_second if running and num_left is not None and steps_per_second else None,
        "wait_fraction": _wait_fraction(of_state),
        "tokens_per_second": sum(record.rate("tokens") for record in of_state) if running else 0.0,
        "wait_seconds": _by_stage(of_state),
        "stragglers": list(_stragglers(job, of_state, front)) if running else [],
        "ranks": [
            _describe_rank(number, record, job, front, now, history=history) for number, record in sorted(job.ranks.items())
        ],
    }
    return info


def _describe_rank(number: int, record: RankRecord, job: JobRecord, front: int, now: float, *, history: bool) -> RankInfo:
    doing: DoingInfo | None = None
    if record.doing:
        doing = {"stage": record.doing.stage, "shard": record.doing.shard, "since": record.doing.since}
    info: RankInfo = {
        "rank": number,
        "epoch": record.epoch,
        "step": record.step,
        "lag": front - _place(record, job),
        "tokens_per_second": record.rate("tokens") if record.is_running(now) else 0.0,
        "wait_fraction": record.wait_fraction,
        "wait_seconds": record.recent_waits,
        "total_wait_seconds": sum(record.total_waits.values()),
        "total_wait_stages": record.total_waits,
        "total_compute_seconds": record.compute_seconds,
        "buffered_bytes": record.buffered_bytes,
        "retries": record.num_retries,
        "corrupted": record.num_corrupted,
        "last_seen_at": record.last_seen,
        "doing": doing,
        "waits_since": record.waits_since,
    }
    if history:
        until = bucket_of(now)
        pairs = zip(record.waits.until(until), record.computes.until(until), strict=True)
        info["history"] = [
            round(100 * waited / (waited + computed)) if waited + computed else None for waited, computed in pairs
        ]
    return info


def _place(record: RankRecord, job: JobRecord) -> int:
    """Return the steps from the start of epoch 0 to the last step that a rank's loop was given."""
    return record.epoch * (job.num_steps or 0) + record.step


def _by_stage(records: list[RankRecord]) -> dict[str, float]:
    stages = dict[str, float]()
    for record in records:
        for stage, seconds in record.recent_waits.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    return stages


def _wait_fraction(records: list[RankRecord]) -> float | None:
    fractions = [fraction for record in records if (fraction := record.wait_fraction) is not None]
    return sum(fractions) / len(fractions) if fractions else None


def _stragglers(job: JobRecord, running: list[RankRecord], front: int) -> Iterator[StragglerInfo]:
    """Yield the ranks that are more than a window behind the front rank, or wait far more than the others."""
    window = int(job.spec["window"]) // max(1, int(job.spec["batch_size"]) * int(job.spec["world_size"]))
    of_record = {id(record): number for number, record in job.ranks.items()}
    middle = median([record.wait_fraction or 0.0 for record in running])
    for record in sorted(running, key=lambda record: of_record[id(record)]):
        number, lag, waits = of_record[id(record)], front - _place(record, job), record.wait_fraction or 0.0
        if lag > max(1, window):
            text = f"Rank {number} is {counted(lag, 'step')} behind the front rank, more than a window."
        elif waits > middle + _FAR_ABOVE:
            text = f"Rank {number} waits {_percent(waits)} of its time; the median of the ranks is {_percent(middle)}."
        else:
            continue
        yield {"rank": number, "text": text}


def verdict(jobs: Mapping[JobKey, JobRecord], now: float) -> VerdictInfo:
    """Return one sentence about all jobs: who waits most, and for what."""
    running = [
        (record.wait_fraction or 0.0, number, record, key, job)
        for key, job in jobs.items()
        for number, record in job.ranks.items()
        if record.is_running(now)
    ]
    if not running:
        return {"state": "idle", "text": "No run is active."}
    waiting = [entry for entry in running if entry[0] > WAITING_FRACTION]
    if not waiting:
        share = _percent(_wait_fraction([record for _, _, record, _, _ in running]) or 0.0)
        if len(running) == 1:
            return {"state": "fed", "text": f"The only rank is fed; it waits {share} of its time."}
        return {"state": "fed", "text": f"All {len(running)} ranks are fed; they wait {share} of their time."}
    # Rounded: the sentence would name another rank with each poll if all wait alike.
    fraction, number, record, key, _ = max(waiting, key=lambda entry: (round(entry[0], 2), -entry[1]))
    others = f"{len(waiting)} of {len(running)} ranks wait; rank" if len(waiting) > 1 else "Rank"
    text = f"{others} {number} of {key.job} waits {_percent(fraction)} of its time: {_reason(record)}."
    return {"state": "waiting", "text": text}


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.{0 if fraction >= 0.1 else 1}f} %"


def _reason(record: RankRecord) -> str:
    """Return a clause that says why a rank waits: the stage that took most of its recent waits, and the shard."""
    waits = record.recent_waits
    stage = max(waits, key=lambda name: waits[name])
    shard = record.doing.shard if record.doing and record.doing.shard else record.shard
    return _REASONS[stage].format(shard or "row groups that are not cached")
