"""Answers: what the routes tell as JSON, field by field. The documentation page shows these words."""

from __future__ import annotations

from typing import Any, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic takes that of typing from Python 3.12 on

from penstock_server.batches.sequences import Origin
from penstock_server.storage.quarantine import BadGroup, Quarantined

described = with_config(ConfigDict(use_attribute_docstrings=True))


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
    """what becomes of a batch that holds one: fail, or substitute"""
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
    """bytes that it may take; less than `asked_bytes` where the disk is full"""
    asked_bytes: int
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
    splits: dict[str, SplitAnswer] | None
    """what is in the splits train and validation; null until it is counted"""
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
    """columns that say what is learned or is padding, which this recipe leaves unused"""
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
    mix_stop: str
    """when an epoch ends, as the parameter mix_stop"""
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
    num_sequences: int
    """sequences of an epoch, of all ranks"""
    vocab_size: int | None
    """every token id is below it; null if nobody knows"""
    padding: float | None
    """share of padding; null where it depends on rows that are not counted, with packing=rows, and of a mixture that is not
    concatenated"""
    tensors: list[TensorAnswer]
    """what a batch holds; masks and labels are derived from it by the client"""
    advice: list[str]
    """what a client should warn of"""
    spec: dict[str, int | str | None]
    """every parameter, with its value"""


@described
class TurnAnswer(TypedDict):
    """A turn of a row, prompt and response or a message of a chat, or as much of one as stands in a sequence."""

    learned: bool
    """whether its tokens have labels"""
    num_tokens: int
    """how many they are"""
    text: NotRequired[str]
    """them as text, if there is a tokenizer"""


@described
class RowAnswer(TypedDict):
    """A row. In preference pairs tokens, text and turns stand there twice: `chosen_tokens`, `rejected_tokens` and so on."""

    row: int
    """its number, counted over all shards in their order"""
    shard: str
    """its Parquet file"""
    row_group: int
    """its row group there"""
    row_in_group: int
    """its number in the row group"""
    left_out_by: NotRequired[str]
    """the filter that leaves it out; then the rest is missing"""
    bad: NotRequired[str]
    """why it cannot be used; then the rest is missing"""
    split: NotRequired[str]
    """train or validation"""
    text: NotRequired[str]
    """all of it as text, if there is a tokenizer"""
    turns: NotRequired[list[TurnAnswer]]
    """its turns, if it has some"""
    tokens: NotRequired[list[int]]
    """all of its token ids, not cut to seq_len"""
    columns: NotRequired[dict[str, Any]]
    """the columns that travel with it"""


@described
class OccurrenceAnswer(TypedDict):
    """A place at which a row, or a part of it, is seen."""

    epoch: int
    """the epoch"""
    step: int
    """the step of the epoch"""
    rank: int
    """the rank that sees it"""
    index: int
    """the line of the batch"""


@described
class ScheduleAnswer(TypedDict):
    """When an epoch shows a row."""

    occurrences: list[OccurrenceAnswer]
    """every place, in the order of steps; where they are many, the first: a thousand at most, and of a mixture those of the
    first hundred passes of its epoch through the dataset, or of fewer"""


@described
class QuarantineAnswer(TypedDict):
    """What is bad in a dataset."""

    num_bad_rows: int
    """rows that cannot be used, as far as is known"""
    complete: bool
    """whether all rows were looked at"""
    on_bad_row: str
    """what becomes of a batch that holds one: fail, or substitute"""
    rows: list[Quarantined]
    """these rows"""
    row_groups: list[BadGroup]
    """row groups that cannot be read"""


@described
class SequenceAnswer(TypedDict):
    """What a sequence of a batch is made of."""

    index: int
    """the line of the batch"""
    sources: list[Origin]
    """the rows, or parts of rows, in their order"""


@described
class ProvenanceAnswer(TypedDict):
    """What a batch is made of."""

    step: int
    """the step of the epoch"""
    rank: int
    """the rank that it is for"""
    sequences: list[SequenceAnswer]
    """each of its lines"""


@described
class LineAnswer(TypedDict):
    """A sequence of a batch, without padding.

    In preference pairs what is told of tokens stands there twice: `chosen_input_ids`, `rejected_input_ids` and so on.
    """

    index: int
    """the line of the batch"""
    num_tokens: int
    """tokens in it"""
    source: str
    """the rows that it is made of"""
    text: NotRequired[str]
    """its tokens as text, if there is a tokenizer"""
    prompt: NotRequired[str]
    """as text, where the line is one prompt and its response"""
    response: NotRequired[str]
    """as text, likewise"""
    pieces: NotRequired[list[TurnAnswer]]
    """the rows and turns that the tokens are of, if more than one"""
    input_ids: NotRequired[list[int]]
    """token ids"""
    labels: NotRequired[list[int]]
    """what is learned, in the place of each token; -100 where nothing is"""
    lengths: NotRequired[int]
    """tokens before the padding; this and the next four only where the tensor travels"""
    prompt_lengths: NotRequired[int]
    """tokens before the response"""
    label_lengths: NotRequired[int]
    """tokens of the response, with task=seq2seq"""
    loss_mask: NotRequired[list[int]]
    """1 where a token is learned"""
    document_starts: NotRequired[list[int]]
    """where a document, or the padding, begins"""
    position_ids: NotRequired[list[int]]
    """the place of each token in its document, beside `document_starts`"""
    columns: NotRequired[dict[str, Any]]
    """the columns that travel with its row"""


@described
class BatchAnswer(TypedDict):
    """A batch for people."""

    dataset: str
    """the name in the URL"""
    snapshot: str
    """fingerprint of the data"""
    epoch: int
    """the epoch"""
    rank: int
    """the rank that it is for"""
    step: int
    """the step of the epoch"""
    digest: str
    """of the tensors, as in the frame"""
    nbytes: int
    """bytes of the tensors"""
    substituted: int
    """how many sequences, the first of them, stand in for rows that cannot be used"""
    tensors: list[list[str | list[int]]]
    """name, dtype and shape of each, as it travels"""
    sequences: list[LineAnswer]
    """each of its lines"""


@described
class QuantileAnswer(TypedDict):
    """A quantile of what is measured."""

    share: float
    """which: the share of the sample that is at most so much"""
    measured: float
    """of this order"""
    expected: float
    """of a uniform shuffle"""
    usual: list[float]
    """from where to where a uniform shuffle stays, but for one order in a million"""
    is_usual: bool
    """whether this order does"""


@described
class MeasureAnswer(TypedDict):
    """A measure of an order, beside that of an exact uniform shuffle."""

    says: str
    """what it means, in a sentence"""
    unit: str
    """the unit of its numbers"""
    measured: float
    """of this order"""
    expected: float
    """of a uniform shuffle"""
    usual: list[float]
    """from where to where a uniform shuffle stays, but for one order in a million"""
    is_usual: bool
    """whether this order does"""
    quantiles: NotRequired[list[QuantileAnswer]]
    """more of the same"""


@described
class WindowsAnswer(TypedDict):
    """The windows that a dataset is cut into, each shuffled as a whole."""

    dataset: str
    """which dataset"""
    windows: int
    """how many there are"""
    sequences: int
    """sequences of the average one"""
    blocks: int
    """blocks of the average one"""
    share: float
    """share of the dataset in the average one"""
    says: str
    """the same in a sentence"""


@described
class SampleAnswer(TypedDict):
    """How much was looked at."""

    sequences: int
    """sequences that were looked at one by one"""
    neighbours: int
    """those of them that have a neighbour in the source"""
    global_batches: int
    """global batches"""
    of_the_first: int
    """of how many samples of the epoch, from its first on"""
    of: int
    """how many the epoch has"""


@described
class ReportAnswer(TypedDict):
    """How well an order mixes the source."""

    dataset: str
    """the name in the URL"""
    snapshot: str
    """fingerprint of the data"""
    epoch: int
    """which epoch"""
    grade: str
    """none, weak, windowed or uniform; unclear where too little is there to measure"""
    verdict: str
    """what follows from the measures, and what to do"""
    measures: dict[str, MeasureAnswer]
    """each measure, by its name"""
    windows: list[WindowsAnswer]
    """of each dataset that is shuffled"""
    sample: SampleAnswer
    """how much was looked at"""
    spec: dict[str, int | str | None]
    """every parameter, with its value"""


@described
class HealthAnswer(TypedDict):
    """A process that is alive."""

    status: str
    """ok"""
    version: str
    """of the server"""
    wire: int
    """of the format of frames"""
    time: float
    """the clock, in seconds since 1970"""


@described
class ReadyAnswer(TypedDict):
    """A server that serves."""

    status: str
    """ready"""
    datasets: int
    """how many are served"""
    refused: int
    """how many cannot be"""


@described
class ProblemAnswer(TypedDict):
    """Why there is no answer (RFC 9457)."""

    type: str
    """the kind of problem, a name for programs"""
    title: str
    """the kind of problem, in words"""
    status: int
    """the HTTP status"""
    detail: str
    """what happened, what follows and what to do"""
    instance: str
    """the path that was asked for"""
    done: NotRequired[int]
    """blocks that are counted, where a count is waited for"""
    total: NotRequired[int]
    """blocks to count, likewise"""
