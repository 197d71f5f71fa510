"""Estimates: what an epoch holds, and what its order needs of the cache."""

from __future__ import annotations

from typing import NotRequired

from penstock_server.schemas.common import Epoch, Fingerprint, Name, Parameters, Schema, Step


class LengthsInfo(Schema):
    """How many tokens rows have, before truncation."""

    starts: list[int]
    """Bin i has the lengths from starts[i] up to below starts[i + 1]; empty until the tokens are counted."""
    rows: dict[str, list[int]]
    """Usable rows in each bin, by whole `row`, and by `prompt` and `response` if rows have both."""


class ShareInfo(Schema):
    """Samples that one dataset gives an epoch, over all ranks."""

    dataset: str
    """The name of the dataset."""
    samples: int
    """Its samples, those that `skip` leaves out and those before `offset` included."""
    share: float
    """Its fraction of all datasets' samples."""
    passes: float
    """How often all of its samples are shown; less than 1 shows a part of them."""


class SharesInfo(Schema):
    """Samples of each dataset before a step of an epoch."""

    epoch: Epoch
    step: Step
    datasets: list[ShareInfo]
    """The datasets of the mixture, or the only one."""


class EstimateInfo(Schema):
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


class CachePointInfo(Schema):
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


class PaceInfo(Schema):
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


class PrepareInfo(Schema):
    """Time to make all blocks before a run."""

    tokens: int
    """Tokens of all rows; estimated from the bytes of the blocks before they are counted."""
    tokens_per_second: float
    """Tokens that the server makes in a second."""
    seconds: float
    """Seconds that it takes."""
    is_measured: bool
    """Whether the rate was measured on some rows of this server; otherwise it is that of the URL."""


class PlanInfo(Schema):
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


class MeasureInfo(Schema):
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


class MeasuresInfo(Schema):
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


class SampledInfo(Schema):
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


class ScatterInfo(Schema):
    """Positions of some samples of one dataset in the epoch and in the source, to plot one against the other."""

    dataset: str
    """The name of the dataset."""
    source_samples: int
    """Samples of the source."""
    numbers: list[int]
    """The number of each sample in the epoch."""
    places: list[int]
    """The number of the same sample in the source."""


class ShuffleReportInfo(Schema):
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
