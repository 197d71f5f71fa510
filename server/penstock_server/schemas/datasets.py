"""Descriptions of datasets, and of what a spec gives of them."""

from __future__ import annotations

from typing import NotRequired

from penstock_server.index.index import Prepared
from penstock_server.schemas.common import BadRowsMet, Fingerprint, Name, NumShards, OnBadRow, Parameters, Schema


class SplitInfo(Schema):
    """Size of one split of a dataset."""

    rows: int
    """Rows that the filter keeps."""
    tokens: int
    """Tokens of these rows."""
    bad_rows: int
    """Those of these rows that cannot be used."""


class IndexInfo(Schema):
    """Progress of the token counts."""

    blocks_done: int
    """Blocks counted so far."""
    blocks: int
    """Blocks to count."""
    seconds_left: int | None
    """Estimated seconds left while this server counts; null if it does not, as `penstock prepare` may count."""


class BadRowsInfo(Schema):
    """Rows that cannot be used. The URL /quarantine lists them."""

    known: BadRowsMet
    on_bad_row: OnBadRow
    refusal: str | None
    """Why too many bad rows stop the dataset from being served; null if it is served."""
    unread_row_groups: int
    """Row groups that could not be read."""


class CacheInfo(Schema):
    """The block cache on disk, shared by all datasets."""

    used_bytes: int
    """Bytes of the cached blocks."""
    budget_bytes: int
    """Bytes that the cache has room for now: less than `configured_bytes` if the disk is full."""
    configured_bytes: int
    """Bytes that the operator allows."""
    failure: str | None
    """Why the last block could not be stored; null if it was stored, or did not fit the budget."""


class SnapshotInfo(Schema):
    """A snapshot that jobs can use."""

    snapshot: Fingerprint
    shards: NumShards
    rows: int
    """Number of rows."""


class DatasetInfo(Schema):
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


class MixtureInfo(Schema):
    """A mixture declared by a folder."""

    name: Name
    mix: str
    """Datasets and weights, as in the parameter `mix`."""
    stopping_strategy: str
    """When an epoch ends, as in the parameter `stopping_strategy`."""
    datasets: list[str]
    """The datasets in the mixture."""


class RefusedInfo(Schema):
    """A dataset or mixture that cannot be served."""

    name: str
    """The name."""
    error: str
    """The reason, and what to do."""


class DatasetsInfo(Schema):
    """Everything in the data folder."""

    datasets: list[DatasetInfo]
    """Datasets served."""
    mixtures: list[MixtureInfo]
    """Mixtures served."""
    refused: list[RefusedInfo]
    """Datasets and mixtures that cannot be served."""


class TensorInfo(Schema):
    """A tensor of a batch on the wire."""

    name: str
    """The name in a frame."""
    dtype: str
    """A dtype of numpy, `utf8` or `binary`."""
    shape: list[int | None]
    """The dimensions; null for a width that differs between batches."""


class SpecInfo(Schema):
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
