"""Batches as text, and the rows that they come from."""

from __future__ import annotations

from typing import NotRequired

from penstock_server.batches.samples import Origin
from penstock_server.blocks.quarantine import BadGroup, Quarantined
from penstock_server.schemas.common import (
    BadRowsMet,
    Columns,
    Epoch,
    Fingerprint,
    Line,
    Name,
    NumTokens,
    OnBadRow,
    Rank,
    Schema,
    Step,
    Text,
)


class TurnInfo(Schema):
    """A turn of a row, or the part of it in a sample: a prompt, a response, or a message of a chat."""

    in_loss: bool
    """Whether its tokens have labels."""
    num_tokens: NumTokens
    text: NotRequired[Text]


class RowInfo(Schema):
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


class OccurrenceInfo(Schema):
    """A line of a batch that holds a row or a part of it."""

    epoch: Epoch
    step: Step
    rank: Rank
    index: Line


class RowScheduleInfo(Schema):
    """When an epoch shows a row."""

    occurrences: list[OccurrenceInfo]
    """Occurrences in the order of steps, the first 1,000 at most. For a mixture, only those in the first 100 passes of the
    epoch through the dataset, or fewer."""


class QuarantineInfo(Schema):
    """Bad rows and row groups of a dataset."""

    num_bad_rows: BadRowsMet
    complete: bool
    """Whether all rows were checked."""
    on_bad_row: OnBadRow
    rows: list[Quarantined]
    """The bad rows."""
    row_groups: list[BadGroup]
    """Row groups that could not be read."""


class SampleSources(Schema):
    """Rows that make up one sample of a batch."""

    index: Line
    sources: list[Origin]
    """The rows, or parts of rows, in order."""


class ProvenanceInfo(Schema):
    """Rows that make up a batch."""

    step: Step
    rank: Rank
    samples: list[SampleSources]
    """The lines of the batch."""


class SampleInfo(Schema):
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


class BatchInfo(Schema):
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
