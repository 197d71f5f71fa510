"""Answers about rows: what one holds, when it is seen, which are bad."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict

from penstock_server.blocks.quarantine import BadGroup, Quarantined
from penstock_server.schemas import described


@described
class TurnAnswer(TypedDict):
    """A turn of a row, prompt and response or a message of a chat, or as much of one as stands in a sample."""

    in_loss: bool
    """whether its tokens have labels"""
    num_tokens: int
    """how many they are"""
    text: NotRequired[str]
    """them as text, if there is a tokenizer"""


@described
class RowAnswer(TypedDict):
    """A row. Of a preference pair what is of tokens stands there twice: `chosen_tokens`, `rejected_tokens` and so on."""

    row: int
    """its number, counted over all shards in their order"""
    shard: str
    """its Parquet file"""
    row_group: int
    """its row group there"""
    row_in_group: int
    """its number in the row group"""
    filtered_by: NotRequired[str]
    """the filter that leaves it out; then the rest is missing"""
    bad: NotRequired[str]
    """why it cannot be used; then the rest is missing"""
    split: NotRequired[str]
    """train, validation or test; none: in no split but all"""
    text: NotRequired[str]
    """it as text, if there is a tokenizer"""
    turns: NotRequired[list[TurnAnswer]]
    """its turns, if it has some; the first 10,000"""
    num_tokens: NotRequired[int]
    """how many tokens it has"""
    num_loss_tokens: NotRequired[int]
    """how many of them have labels"""
    tokens: NotRequired[list[int]]
    """its token ids, not cut to seq_len, and of a very long row the first 1,048,576, as of text and turns"""
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
    """what becomes of a batch that holds one: fail, or replace"""
    rows: list[Quarantined]
    """these rows"""
    row_groups: list[BadGroup]
    """row groups that cannot be read"""
