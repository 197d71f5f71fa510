"""States of jobs and of the server, and errors."""

from __future__ import annotations

from typing import NotRequired

from penstock_server.schemas.common import Epoch, Fingerprint, Name, Parameters, Rank, Schema


class StragglerInfo(Schema):
    """A rank that is far behind the others, or waits far more than they do."""

    rank: Rank
    text: str
    """What sets it apart, in one sentence."""


class DoingInfo(Schema):
    """What a rank's request does now."""

    stage: str
    """The stage, such as `tokenize`; see `wait_seconds`."""
    shard: str | None
    """The Parquet file that the server reads for it; null in other stages."""
    since: float
    """Since when the rank has requested this range, in seconds since 1970."""


class RankInfo(Schema):
    """A rank of a job, by its own reports."""

    rank: Rank
    epoch: Epoch
    step: int
    """The step of the last batch that its loop was given; -1 before the first."""
    lag: int
    """Steps behind the front rank."""
    tokens_per_second: float
    """Tokens that its loop takes, without padding."""
    wait_fraction: float | None
    """Fraction of its recent time that its loop waited for batches, 0 to 1; null before the first report of a batch."""
    wait_seconds: dict[str, float]
    """Recent waits by stage, in seconds that fade: compare them with one another. The stages are connect, queue, budget, index,
    read, decode, tokenize, make, network, receive, retry and client."""
    total_wait_seconds: float
    """Seconds that its loop has waited. Those since its last report are an estimate, by the size of its buffer."""
    total_wait_stages: dict[str, float]
    """The same by stage."""
    total_compute_seconds: float
    """Seconds that its loop has worked with batches."""
    buffered_bytes: int
    """Bytes that were ready for its loop at the last report."""
    retries: int
    """Failed attempts."""
    corrupted: int
    """Failed attempts whose response was damaged on the way."""
    last_seen_at: float
    """Time of its last report, in seconds since 1970."""
    doing: DoingInfo | None
    """What its request does now; null between requests."""
    waits_since: float | None
    """Since when it has waited for more than 5 % of its time; null if it does not."""
    history: NotRequired[list[int | None]]
    """Percentage of its time that it waited, for each bucket of `server.history`; null without a report."""


class JobInfo(Schema):
    """A run that pulls batches of one dataset with one spec."""

    job: str
    """The name of the run: `job` of RemoteDataset, PENSTOCK_JOB, or script, user, host and start."""
    dataset: Name
    snapshot: Fingerprint
    spec_digest: str
    """The digest of the spec, as in frames."""
    spec: Parameters
    world_size: int
    """Ranks of the run. Those that use other servers, or are behind an HTTP cache, are not in `ranks`."""
    epoch: Epoch
    """Epoch of the slowest rank."""
    num_steps: int | None
    """Steps of an epoch; null before the spec is planned."""
    state: str
    """`running` or `ended`. A job that ended stays in the list for an hour."""
    started_at: float
    """Time of the first report, in seconds since 1970."""
    last_seen_at: float
    """Time of the last report, in seconds since 1970."""
    seconds_left: float | None
    """Seconds until the slowest rank ends the epoch, at its recent pace."""
    wait_fraction: float | None
    """Mean of the ranks' wait fractions."""
    tokens_per_second: float
    """Sum over the ranks."""
    wait_seconds: dict[str, float]
    """Recent waits of all ranks by stage, in seconds that fade."""
    stragglers: list[StragglerInfo]
    """Ranks that are more than a window behind the front rank, or wait far more than the median."""
    ranks: list[RankInfo]
    """The ranks that report to this server."""


class VerdictInfo(Schema):
    """How the ranks are doing."""

    state: str
    """`fed`, `waiting`, or `idle` without a run."""
    text: str
    """The answer in one sentence."""


class HistoryInfo(Schema):
    """The last hour in buckets, oldest first; null in those before the start of the server.

    The lists are empty if the caller may not see all datasets.
    """

    seconds: float
    """Length of a bucket."""
    end: float
    """End of the last bucket, which is not over yet, in seconds since 1970."""
    tokens: list[float | None]
    """Tokens in the batches made, without padding."""
    bytes: list[float | None]
    """Bytes of response bodies."""
    batches: list[float | None]
    """Batches made."""
    refusals: list[float | None]
    """Requests refused because the budget of bytes in flight was used up."""
    hits: list[float | None]
    """Requested blocks that were cached."""
    misses: list[float | None]
    """Requested blocks that were not cached."""
    throttled: list[float | None]
    """Requests that a source of shards throttled."""
    failed: list[float | None]
    """Requests that failed at a source of shards."""
    cache_used_bytes: list[float | None]
    """Bytes of the cached blocks at the end of the bucket."""


class ServerInfo(Schema):
    """The server: all of its processes together. Rates are of about the last minute.

    Rates, bytes in flight, and what the cache holds are null if the caller may not see all datasets.
    """

    version: str
    """The version of the server."""
    time: float
    """The server's clock, in seconds since 1970."""
    started_at: float
    """Start of the server, in seconds since 1970."""
    processes: int
    """Processes that serve."""
    tokens_per_second: float | None
    """Tokens in batches made, without padding."""
    bytes_per_second: float | None
    """Bytes of response bodies."""
    batches_per_second: float | None
    """Batches made."""
    refusals_per_second: float | None
    """Requests refused because the budget of bytes in flight was used up."""
    in_flight_bytes: int | None
    """Bytes of responses that clients have not read yet."""
    in_flight_budget_bytes: int
    """Most bytes that such responses may take."""
    cache_used_bytes: int | None
    """Bytes of the cached blocks."""
    cache_budget_bytes: int
    """Most bytes that they may take."""
    cache_hit_fraction: float | None
    """Fraction of the requested blocks that were cached; null without requests."""
    source_requests_throttled: int | None
    """Requests that an object store, the hub or a web server throttled in the last minute; they are repeated."""
    source_requests_failed: int | None
    """Requests that failed there in the last minute; they are repeated."""
    history: NotRequired[HistoryInfo]
    """The last hour."""


class JobsInfo(Schema):
    """The runs that pull from this server, as far as the caller may see their datasets."""

    caller: str
    """The name of the request's token; empty if the server has no tokens."""
    verdict: VerdictInfo
    """Whether any rank waits, and for what."""
    server: ServerInfo
    """All processes of this server together."""
    jobs: list[JobInfo]
    """The latest first."""


class HealthInfo(Schema):
    """A process that is alive. Without the token that the server needs, the response has the status alone."""

    status: str
    """Always `ok`."""
    version: NotRequired[str]
    """The version of the server."""
    wire: NotRequired[int]
    """The version of the frame format."""
    time: NotRequired[float]
    """The server's clock, in seconds since 1970."""


class ReadyInfo(Schema):
    """A server that is ready. Without the token that the server needs, the response has the status alone."""

    status: str
    """Always `ready`."""
    datasets: NotRequired[int]
    """Number of datasets served."""
    refused: NotRequired[int]
    """Number of datasets that cannot be served."""


class ProblemInfo(Schema):
    """An error as problem+json (RFC 9457)."""

    type: str
    """The kind of problem as a stable name."""
    title: str
    """The kind of problem in words."""
    status: int
    """The HTTP status."""
    detail: str
    """What happened, why, and what to do."""
    instance: str
    """The path of the request."""
    request_id: str
    """The id of the request, as in the header `X-Request-ID` and in the server's log."""
    done: NotRequired[int]
    """Blocks done, while the server is counting or reading."""
    total: NotRequired[int]
    """Blocks to do, while the server is counting or reading."""
    seconds_left: NotRequired[int | None]
    """Estimated seconds left, while the server is counting or reading; null before the first block is done."""
