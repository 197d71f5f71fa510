"""Schemas of the JSON that the server returns. The page /docs shows these docstrings.

The TypedDict is that of typing_extensions: pydantic accepts that of typing only from Python 3.12 on.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from penstock_server.batches.samples import Origin
from penstock_server.blocks.quarantine import BadGroup, Quarantined
from penstock_server.index.index import Prepared

described = with_config(ConfigDict(use_attribute_docstrings=True))  # a docstring below a field is its description

# Fields of several schemas.
Name = Annotated[str, Field(description="The name in URLs.")]
Fingerprint = Annotated[str, Field(description="The fingerprint of the data.")]
Epoch = Annotated[int, Field(description="The epoch.")]
Rank = Annotated[int, Field(description="The rank.")]
Step = Annotated[int, Field(description="The step in the epoch.")]
Line = Annotated[int, Field(description="The line of the batch.")]
NumTokens = Annotated[int, Field(description="Number of tokens.")]
NumShards = Annotated[int, Field(description="Number of Parquet files.")]
Text = Annotated[str, Field(description="The decoded text. Missing without a tokenizer.")]
Columns = Annotated[dict[str, Any], Field(description="Values of the passthrough columns.")]
OnBadRow = Annotated[str, Field(description="The effect on a batch that holds a bad row: `fail` or `replace`.")]
BadRowsMet = Annotated[int, Field(description="Bad rows met so far.")]
Parameters = Annotated[dict[str, bool | int | str | None], Field(description="Every parameter of the spec with its value.")]


@described
class _Schema(TypedDict):
    pass


class SplitInfo(_Schema):
    """Size of one split of a dataset."""

    rows: int
    """Rows that the filter keeps."""
    tokens: int
    """Tokens of these rows."""
    bad_rows: int
    """Those of these rows that cannot be used."""


class IndexInfo(_Schema):
    """Progress of the token counts."""

    blocks_done: int
    """Blocks counted so far."""
    blocks: int
    """Blocks to count."""
    seconds_left: int | None
    """Estimated seconds left while this server counts; null if it does not, as `penstock prepare` may count."""


class BadRowsInfo(_Schema):
    """Rows that cannot be used. The URL /quarantine lists them."""

    known: BadRowsMet
    on_bad_row: OnBadRow
    refusal: str | None
    """Why too many bad rows stop the dataset from being served; null if it is served."""
    unread_row_groups: int
    """Row groups that could not be read."""


class CacheInfo(_Schema):
    """The block cache on disk, shared by all datasets."""

    used_bytes: int
    """Bytes of the cached blocks."""
    budget_bytes: int
    """Bytes that the cache has room for now: less than `configured_bytes` if the disk is full."""
    configured_bytes: int
    """Bytes that the operator allows."""
    failure: str | None
    """Why the last block could not be stored; null if it was stored, or did not fit the budget."""


class SnapshotInfo(_Schema):
    """A snapshot that jobs can use."""

    snapshot: Fingerprint
    shards: NumShards
    rows: int
    """Number of rows."""


class DatasetInfo(_Schema):
    """A dataset at its latest snapshot."""

    name: Name
    rows: int
    """Rows in the shards."""
    rows_served: int | None
    """Rows that the filter keeps; null until they are counted."""
    tokens: int | None
    """Tokens of the rows served; null until they are counted."""
    row_tokens: dict[str, int] | None
    """Tokens of a usable row before truncation, or of the longer side of a preference pair: median, p90, p99 and longest. Null
    until they are counted."""
    prompt_tokens: dict[str, int] | None
    """Tokens of a row's prompt: median, p90, p99 and longest. Null if rows have no prompts."""
    response_tokens: dict[str, int] | None
    """Tokens after a row's prompt: median, p90, p99 and longest. Null if rows have no prompts."""
    split_rule: str
    """What decides the split of a row: `files` (the shards' names) or `hash` (a stable hash of the row)."""
    splits: dict[str, SplitInfo] | None
    """Size of train, validation and, if the dataset has one, test; null until they are counted."""
    shards: NumShards
    blocks: int
    """Number of blocks. A block is the unit of the cache: a row group, or a part of a very large one."""
    size_bytes: int
    """Bytes of the shards."""
    blocks_bytes: int
    """Bytes of all blocks in the cache; an estimate until they are counted."""
    index: IndexInfo
    """How many blocks are counted."""
    prepared: Prepared | None
    """What `penstock prepare --store` has written at its end; null until then. The server neither counts nor decodes then."""
    bad_rows: BadRowsInfo
    """Rows that cannot be used."""
    cache: CacheInfo
    """The block cache."""
    columns: list[str]
    """Columns that become tokens."""
    recipe: str
    """How the columns become tokens."""
    unused_columns: list[str]
    """Columns of masks or labels that the recipe does not use."""
    token_dtype: str
    """The dtype of token ids on the wire."""
    snapshot: str
    """The fingerprint of the shards and the recipe."""
    snapshots: NotRequired[list[SnapshotInfo]]
    """Snapshots that jobs can use, newest first. Only in the response for a single dataset."""
    refresh_error: NotRequired[str | None]
    """Why new data cannot be served; null without an error. Only in the response for a single dataset."""


class MixtureInfo(_Schema):
    """A mixture declared by a folder."""

    name: Name
    mix: str
    """Datasets and weights, as in the parameter `mix`."""
    stopping_strategy: str
    """When an epoch ends, as in the parameter `stopping_strategy`."""
    datasets: list[str]
    """The datasets in the mixture."""


class RefusedInfo(_Schema):
    """A dataset or mixture that cannot be served."""

    name: str
    """The name."""
    error: str
    """The reason, and what to do."""


class DatasetsInfo(_Schema):
    """Everything in the data folder."""

    datasets: list[DatasetInfo]
    """Datasets served."""
    mixtures: list[MixtureInfo]
    """Mixtures served."""
    refused: list[RefusedInfo]
    """Datasets and mixtures that cannot be served."""


class TensorInfo(_Schema):
    """A tensor of a batch on the wire."""

    name: str
    """The name in a frame."""
    dtype: str
    """A dtype of numpy, `utf8` or `binary`."""
    shape: list[int | None]
    """The dimensions; null for a width that differs between batches."""


class SpecInfo(_Schema):
    """A resolved spec."""

    snapshot: str
    """The fingerprint of the data; for a mixture, the fingerprints of its datasets, joined by `+`."""
    num_steps: int
    """Steps in an epoch, the same on every rank."""
    num_samples: int
    """Samples in an epoch, over all ranks."""
    vocab_size: int | None
    """Upper bound of the token ids, exclusive; null if it is unknown."""
    padding: float | None
    """Fraction of padding tokens; null with packing=rows, where it depends on the rows, and for most mixtures."""
    tensors: list[TensorInfo]
    """Tensors of a batch. The client derives attention masks and labels from them."""
    split_rules: dict[str, str]
    """What decides the splits of each dataset: `files` (the shards' names) or `hash` (a stable hash of the row)."""
    advice: list[str]
    """Warnings for the trainer to log."""
    spec: Parameters


class LengthsInfo(_Schema):
    """How many tokens rows have, before truncation."""

    starts: list[int]
    """Bin i has the lengths from starts[i] up to below starts[i + 1]; empty until the tokens are counted."""
    rows: dict[str, list[int]]
    """Usable rows in each bin, by whole `row`, and by `prompt` and `response` if rows have both."""


class ShareInfo(_Schema):
    """Samples that one dataset gives an epoch, over all ranks."""

    dataset: str
    """The name of the dataset."""
    samples: int
    """Its samples, those that `skip` leaves out and those before `offset` included."""
    share: float
    """Its fraction of all datasets' samples."""
    passes: float
    """How often all of its samples are shown; less than 1 shows a part of them."""


class SharesInfo(_Schema):
    """Samples of each dataset before a step of an epoch."""

    epoch: Epoch
    step: Step
    datasets: list[ShareInfo]
    """The datasets of the mixture, or the only one."""


class EstimateInfo(_Schema):
    """What an epoch of a spec holds and needs, over all ranks. Fields about tokens are null until the tokens are counted."""

    num_steps: int
    """Steps in an epoch."""
    num_samples: int
    """Samples in an epoch."""
    positions: int
    """Tokens that an epoch's batches have room for: each sample at full width."""
    tokens: int | None
    """Tokens in an epoch's batches without padding; null for preference pairs, too."""
    padding: float | None
    """Fraction of `positions` that is padding with pad=seq_len; other settings of `pad` make less."""
    cut_rows: float | None
    """Fraction of rows that are longer than a sample, and truncated."""
    cut_tokens: float | None
    """Fraction of tokens that truncation leaves out."""
    batch_bytes: int
    """Estimated bytes of a batch of one rank on the wire, each sample at full width."""
    cache_bytes: int
    """Estimated bytes of blocks that the cache must hold so that no block is made twice in an epoch: two windows, or all."""
    blocks_bytes: int
    """Estimated bytes of all blocks. A cache of this size makes each block once for all epochs."""
    cache_room_bytes: int
    """Bytes that the server's cache has room for now."""
    cache_advice: str | None
    """Why the cache is too small, and what to do; null if a window of blocks fits."""
    shares: list[ShareInfo]
    """Samples of each dataset in an epoch."""


class CachePointInfo(_Schema):
    """Reads of blocks with a cache of some size that is empty at the start of the epoch."""

    cache_bytes: int
    """The budget of the cache."""
    reads: int
    """Times that an epoch decodes a row group, or a block of a row group that is too large to keep."""
    repeated_reads: int
    """Those of `reads` that read again what the cache has lost."""
    source_bytes: int
    """Bytes that these reads take in the shards: of the columns, uncompressed."""
    hit_rate: float
    """Fraction of the blocks that batches need that are cached then."""
    later_reads: int | None
    """As `reads`, for the epoch after it; null if the epochs are too long to count."""
    later_source_bytes: int | None
    """As `source_bytes`, for the epoch after it."""
    is_exact: bool
    """Whether all batches of both epochs were counted; otherwise the reads of the first ones are scaled up."""


class PaceInfo(_Schema):
    """Rates of a job at a pace."""

    tokens_per_second: int
    """Tokens that all ranks train on in a second."""
    steps_per_second: float
    """Steps in a second."""
    batches_per_second: float
    """Batches of all ranks in a second. A request of the client has several."""
    batch_bytes: int
    """Estimated bytes of a batch on the wire."""
    bytes_per_second: float
    """Bytes that the server sends to all ranks in a second."""
    source_bytes_per_second: float
    """Bytes that the first epoch reads from the shards in a second, with the cache of this server."""


class PrepareInfo(_Schema):
    """Time to make all blocks before a run."""

    tokens: int
    """Tokens of all rows; estimated from the bytes of the blocks before they are counted."""
    tokens_per_second: float
    """Tokens that the server makes in a second."""
    seconds: float
    """Seconds that it takes."""
    is_measured: bool
    """Whether the rate was measured on some rows of this server; otherwise it is that of the URL."""


class PlanInfo(_Schema):
    """How large the cache must be for a run, from the order of an epoch."""

    dataset: Name
    snapshot: Fingerprint
    epoch: Epoch
    num_steps: int
    """Steps in an epoch."""
    num_samples: int
    """Samples in these steps, over all ranks."""
    positions: int
    """Tokens that an epoch's batches have room for: each sample at full width."""
    tokens: int | None
    """Tokens in an epoch's batches without padding; null until they are counted."""
    steps_of_tokens: int | None
    """Steps until the `tokens` of the URL are trained on. Before tokens are counted, padding counts, too."""
    epochs_of_tokens: float | None
    """Epochs until then."""
    num_blocks: int
    """Blocks that an epoch needs."""
    num_touches: int
    """Blocks that the batches of an epoch need, each counted once for each batch."""
    num_samples_planned: int
    """Samples whose blocks were counted: all, or those of the first batches of a very long epoch."""
    sizes: str
    """Whether the bytes of blocks are `counted`, or `estimated` from a few of them."""
    read_once_bytes: int
    """The smallest cache that reads no block twice in an epoch, to a hundredth."""
    read_ahead_bytes: int
    """The smallest cache that also has room for the next window, which the server reads ahead."""
    everything_bytes: int
    """Bytes of all blocks that an epoch needs. A cache of this size reads nothing in later epochs."""
    curve: list[CachePointInfo]
    """Reads for several sizes, ascending."""
    here: CachePointInfo
    """Reads with the cache of this server."""
    pace: PaceInfo | None
    """Rates at the pace of the URL; null without one."""
    prepare: PrepareInfo
    """Time to make all blocks before the run."""
    spec: Parameters


class TurnInfo(_Schema):
    """A turn of a row, or the part of it in a sample: a prompt, a response, or a message of a chat."""

    in_loss: bool
    """Whether its tokens have labels."""
    num_tokens: NumTokens
    text: NotRequired[Text]


class RowInfo(_Schema):
    """A row. A preference pair has the fields about tokens twice: `chosen_tokens`, `rejected_tokens` and so on."""

    row: int
    """The number of the row, counted over all shards."""
    shard: str
    """The name of the Parquet file."""
    row_group: int
    """The row group in the file."""
    row_in_group: int
    """The number of the row in its row group."""
    filtered_by: NotRequired[str]
    """The filter that leaves the row out. The fields below are missing then."""
    bad: NotRequired[str]
    """Why the row cannot be used. The fields below are missing then."""
    split: NotRequired[str]
    """The split: train, validation, test, or none for rows that only split=all has."""
    text: NotRequired[Text]
    turns: NotRequired[list[TurnInfo]]
    """The first 10,000 turns. Missing if the row has no turns."""
    num_tokens: NotRequired[NumTokens]
    num_loss_tokens: NotRequired[int]
    """Number of tokens with labels."""
    tokens: NotRequired[list[int]]
    """The first 1,048,576 token ids, not truncated to seq_len. The same limit holds for `text` and `turns`."""
    columns: NotRequired[Columns]


class OccurrenceInfo(_Schema):
    """A line of a batch that holds a row or a part of it."""

    epoch: Epoch
    step: Step
    rank: Rank
    index: Line


class RowScheduleInfo(_Schema):
    """When an epoch shows a row."""

    occurrences: list[OccurrenceInfo]
    """Occurrences in the order of steps, the first 1,000 at most. For a mixture, only those in the first 100 passes of the
    epoch through the dataset, or fewer."""


class QuarantineInfo(_Schema):
    """Bad rows and row groups of a dataset."""

    num_bad_rows: BadRowsMet
    complete: bool
    """Whether all rows were checked."""
    on_bad_row: OnBadRow
    rows: list[Quarantined]
    """The bad rows."""
    row_groups: list[BadGroup]
    """Row groups that could not be read."""


class SampleSources(_Schema):
    """Rows that make up one sample of a batch."""

    index: Line
    sources: list[Origin]
    """The rows, or parts of rows, in order."""


class ProvenanceInfo(_Schema):
    """Rows that make up a batch."""

    step: Step
    rank: Rank
    samples: list[SampleSources]
    """The lines of the batch."""


class SampleInfo(_Schema):
    """A sample of a batch, without padding.

    A preference pair has the fields about tokens twice: `chosen_input_ids`, `rejected_input_ids` and so on. A field is missing
    if the batch has no such tensor or column.
    """

    index: Line
    num_tokens: NumTokens
    source: str
    """The rows that make up the sample."""
    text: NotRequired[Text]
    prompt: NotRequired[str]
    """The decoded prompt, if the sample is one prompt and its response."""
    response: NotRequired[str]
    """The decoded response, if the sample is one prompt and its response."""
    pieces: NotRequired[list[TurnInfo]]
    """The rows and turns in the sample, if there are several."""
    input_ids: NotRequired[list[int]]
    """Token ids."""
    token_texts: NotRequired[list[str]]
    """The text of each token of `input_ids`, empty for all but the last token of a character. Only with format=tokens, and
    with a tokenizer. With task=seq2seq, `label_texts` has the same of `labels`."""
    labels: NotRequired[list[int]]
    """The label of each token; -100 for tokens without loss."""
    lengths: NotRequired[int]
    """Tokens before the padding."""
    prompt_lengths: NotRequired[int]
    """Tokens before the response."""
    label_lengths: NotRequired[int]
    """Tokens of the response, with task=seq2seq."""
    loss_mask: NotRequired[list[int]]
    """1 for tokens with loss."""
    document_starts: NotRequired[list[int]]
    """Positions where a document, or the padding, begins."""
    position_ids: NotRequired[list[int]]
    """The position of each token in its document."""
    columns: NotRequired[Columns]


class BatchInfo(_Schema):
    """A batch as text for people."""

    dataset: Name
    snapshot: Fingerprint
    epoch: Epoch
    rank: Rank
    step: Step
    digest: str
    """The digest of the payload, as in the frame."""
    nbytes: int
    """Bytes of the payload: tensors, and the filler between them."""
    replaced: int
    """Number of samples that replace bad rows."""
    tensors: list[list[str | list[int]]]
    """Name, dtype and shape of each tensor on the wire, without columns of text and bytes."""
    samples: list[SampleInfo]
    """The lines of the batch."""


class MeasureInfo(_Schema):
    """A measure of the order, and its range in an exact uniform shuffle."""

    value: float
    """The value in this order."""
    unit: str
    """The unit of `value`, `expected`, `low` and `high`."""
    expected: float
    """The mean value in an exact uniform shuffle."""
    low: float
    """A uniform shuffle is below this in less than one order of a million."""
    high: float
    """A uniform shuffle is above this in less than one order of a million."""
    is_uniform: bool
    """Whether `value` is in the range from `low` to `high`."""


class MeasuresInfo(_Schema):
    """Measures of an order."""

    neighbour_distance_p1: NotRequired[MeasureInfo]
    """Distance between two neighbours of the source in the order: 1 % of the pairs are at most this close. Missing, like
    the next three, if no dataset has two samples."""
    neighbour_distance_p10: NotRequired[MeasureInfo]
    """10 % of the pairs are at most this close."""
    neighbour_distance_median: NotRequired[MeasureInfo]
    """Half of the pairs are at most this close."""
    neighbour_distance_p90: NotRequired[MeasureInfo]
    """90 % of the pairs are at most this close."""
    neighbours_in_one_batch: MeasureInfo
    """Samples whose successor in the source is in the same global batch."""
    blocks_per_batch: MeasureInfo
    """Blocks that a global batch draws on, or pools of blocks with packing=best_fit. Rows of one block may be similar."""
    shards_per_batch: MeasureInfo
    """Shards that a global batch draws on."""
    unevenness_over_time: MeasureInfo
    """Samples to move until each stretch of the epoch shows the same share of every part of the source."""
    unevenness_over_ranks: NotRequired[MeasureInfo]
    """Samples to move until each rank sees the same share of every part of the source. Missing with one rank."""


class SampledInfo(_Schema):
    """How much of the epoch was measured."""

    samples: int
    """Samples looked up one by one, at most 16,384."""
    global_batches: int
    """Global batches looked up, with at most 16,384 samples together."""
    of_first: int
    """They are spread over this many samples from the epoch's start. It is less than `of_epoch` where more would need more
    than 128 plans: in a mixture that repeats small datasets, or with many windows to sort by length."""
    of_epoch: int
    """Samples of the epoch."""


class ScatterInfo(_Schema):
    """Positions of some samples of one dataset in the epoch and in the source, to plot one against the other."""

    dataset: str
    """The name of the dataset."""
    source_samples: int
    """Samples of the source."""
    numbers: list[int]
    """The number of each sample in the epoch."""
    places: list[int]
    """The number of the same sample in the source."""


class ShuffleReportInfo(_Schema):
    """How well the order of an epoch mixes the source."""

    dataset: Name
    snapshot: Fingerprint
    epoch: Epoch
    measures: MeasuresInfo
    """The measures by name."""
    sampled: SampledInfo
    """The number of samples looked up."""
    scatter: list[ScatterInfo]
    """At most 2,048 of these samples."""
    spec: Parameters


class StragglerInfo(_Schema):
    """A rank that is far behind the others, or waits far more than they do."""

    rank: Rank
    text: str
    """What sets it apart, in one sentence."""


class DoingInfo(_Schema):
    """What a rank's request does now."""

    stage: str
    """The stage, such as `tokenize`; see `wait_seconds`."""
    shard: str | None
    """The Parquet file that the server reads for it; null in other stages."""
    since: float
    """Since when the rank has requested this range, in seconds since 1970."""


class RankInfo(_Schema):
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


class JobInfo(_Schema):
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


class VerdictInfo(_Schema):
    """How the ranks are doing."""

    state: str
    """`fed`, `waiting`, or `idle` without a run."""
    text: str
    """The answer in one sentence."""


class HistoryInfo(_Schema):
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


class ServerInfo(_Schema):
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


class JobsInfo(_Schema):
    """The runs that pull from this server, as far as the caller may see their datasets."""

    caller: str
    """The name of the request's token; empty if the server has no tokens."""
    verdict: VerdictInfo
    """Whether any rank waits, and for what."""
    server: ServerInfo
    """All processes of this server together."""
    jobs: list[JobInfo]
    """The latest first."""


class HealthInfo(_Schema):
    """A process that is alive. Without the token that the server needs, the response has the status alone."""

    status: str
    """Always `ok`."""
    version: NotRequired[str]
    """The version of the server."""
    wire: NotRequired[int]
    """The version of the frame format."""
    time: NotRequired[float]
    """The server's clock, in seconds since 1970."""


class ReadyInfo(_Schema):
    """A server that is ready. Without the token that the server needs, the response has the status alone."""

    status: str
    """Always `ready`."""
    datasets: NotRequired[int]
    """Number of datasets served."""
    refused: NotRequired[int]
    """Number of datasets that cannot be served."""


class ProblemInfo(_Schema):
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
