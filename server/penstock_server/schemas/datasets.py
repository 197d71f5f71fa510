"""Answers about datasets, their snapshots, and what a spec comes to."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict

from penstock_server.schemas import described


@described
class SplitAnswer(TypedDict):
    """What is in one split of a dataset."""

    rows: int
    """rows that the filter keeps"""
    tokens: int
    """their tokens"""
    bad_rows: int
    """those of them that cannot be used"""


@described
class IndexAnswer(TypedDict):
    """How far the counting of tokens is."""

    blocks_done: int
    """blocks that are counted"""
    blocks: int
    """blocks to count"""


@described
class BadRowsAnswer(TypedDict):
    """Rows that cannot be used; /quarantine lists them."""

    known: int
    """how many are known by now"""
    on_bad_row: str
    """what becomes of a batch that holds one: fail, or replace"""
    refusal: str | None
    """why no batch is served for them; null if they are no reason"""
    unread_row_groups: int
    """row groups that could not be read"""


@described
class CacheAnswer(TypedDict):
    """The cache folder, which all datasets share."""

    used_bytes: int
    """bytes of the blocks in it"""
    budget_bytes: int
    """bytes that it may take; less than `configured_bytes` where the disk is full"""
    configured_bytes: int
    """bytes that the server was told it may take"""
    failure: str | None
    """why the last block could not be stored; null if it was, or had no room"""


@described
class SnapshotAnswer(TypedDict):
    """A snapshot that is held for the jobs on it."""

    snapshot: str
    """its fingerprint"""
    shards: int
    """its Parquet files"""
    rows: int
    """rows in them"""


@described
class DatasetAnswer(TypedDict):
    """A dataset, as its latest snapshot has it."""

    name: str
    """its name in URLs"""
    rows: int
    """rows in the shards"""
    rows_served: int | None
    """rows that the filter keeps; null until they are counted"""
    tokens: int | None
    """tokens of these; null until they are counted"""
    row_tokens: dict[str, int] | None
    """how many tokens a row has that can be used, whole, of a preference pair on its longer side: median, p90, p99 and longest;
    null until they are counted"""
    prompt_tokens: dict[str, int] | None
    """how many of them are its prompt's, likewise; null where rows have no prompts"""
    response_tokens: dict[str, int] | None
    """how many come after the prompt, likewise"""
    split_rule: str
    """what gives the splits: files, the shards' names, or hash, a stable hash of each row"""
    splits: dict[str, SplitAnswer] | None
    """what is in the splits train and validation, and in test if there is one; null until it is counted"""
    shards: int
    """Parquet files"""
    blocks: int
    """blocks, the unit of the cache: a row group, or a part of a very large one"""
    size_bytes: int
    """bytes of the shards"""
    blocks_bytes: int
    """bytes of all of its blocks in the cache; an estimate until they are counted"""
    index: IndexAnswer
    """how far tokens are counted"""
    bad_rows: BadRowsAnswer
    """rows that cannot be used"""
    cache: CacheAnswer
    """the cache folder, of all datasets"""
    columns: list[str]
    """columns that tokens are made of"""
    recipe: str
    """how these become tokens"""
    unused_columns: list[str]
    """columns that say what has loss or is padding, which this recipe leaves unused"""
    token_dtype: str
    """dtype in which token ids travel"""
    snapshot: str
    """fingerprint of the shards and the recipe"""
    snapshots: NotRequired[list[SnapshotAnswer]]
    """the snapshots that jobs may name, newest first; only where a dataset is shown alone, as the next"""
    refresh_error: NotRequired[str | None]
    """what keeps new data out; null if nothing does"""


@described
class MixtureAnswer(TypedDict):
    """A mixture that a folder declares."""

    name: str
    """its name in URLs"""
    mix: str
    """the datasets with their weights, as the parameter mix"""
    stopping_strategy: str
    """when an epoch ends, as the parameter stopping_strategy"""
    datasets: list[str]
    """the datasets that it is made of"""


@described
class RefusedAnswer(TypedDict):
    """A name that is not served."""

    name: str
    """the name"""
    error: str
    """why, and what to do"""


@described
class DatasetsAnswer(TypedDict):
    """All that is in the data folder."""

    datasets: list[DatasetAnswer]
    """what is served"""
    mixtures: list[MixtureAnswer]
    """mixtures that are declared"""
    refused: list[RefusedAnswer]
    """what cannot be served"""


@described
class TensorAnswer(TypedDict):
    """A tensor of a batch, as it travels."""

    name: str
    """its name in a frame"""
    dtype: str
    """as in numpy, or utf8 or binary"""
    shape: list[int | None]
    """its dimensions; null is what differs from batch to batch"""


@described
class SpecAnswer(TypedDict):
    """A spec that is resolved."""

    snapshot: str
    """fingerprint of the data; of a mixture those of its datasets, joined by +"""
    num_steps: int
    """steps of an epoch, of every rank"""
    num_samples: int
    """samples of an epoch, of all ranks"""
    vocab_size: int | None
    """every token id is below it; null if nobody knows"""
    padding: float | None
    """share of padding; null where it depends on rows that are not counted, with packing=rows, and of a mixture that is not
    concatenated"""
    tensors: list[TensorAnswer]
    """what a batch holds; masks and labels are derived from it by the client"""
    split_rules: dict[str, str]
    """what gives the splits of each dataset: files, the shards' names, or hash, a stable hash of each row"""
    advice: list[str]
    """what a client should warn of"""
    spec: dict[str, bool | int | str | None]
    """every parameter, with its value"""
