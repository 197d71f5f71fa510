"""Answers about batches: one as JSON, and where it comes from."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict

from penstock_server.batches.samples import Origin
from penstock_server.schemas import described
from penstock_server.schemas.rows import TurnAnswer


@described
class SampleAnswer(TypedDict):
    """What a sample of a batch is made of."""

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
    samples: list[SampleAnswer]
    """each of its lines"""


@described
class LineAnswer(TypedDict):
    """A sample of a batch, without padding.

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
    """what has loss, in the place of each token; -100 where nothing is"""
    lengths: NotRequired[int]
    """tokens before the padding, if that tensor travels"""
    prompt_lengths: NotRequired[int]
    """tokens before the response, if that tensor travels"""
    label_lengths: NotRequired[int]
    """tokens of the response, with task=seq2seq"""
    loss_mask: NotRequired[list[int]]
    """1 where a token has loss, if that tensor travels"""
    document_starts: NotRequired[list[int]]
    """where a document, or the padding, begins, if that tensor travels"""
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
    """bytes of the payload: of the tensors and the filler between them"""
    replaced: int
    """how many of its samples stand in for rows that cannot be used; a frame does not tell which"""
    tensors: list[list[str | list[int]]]
    """name, dtype and shape of each, as it travels; not of columns of text and bytes"""
    samples: list[LineAnswer]
    """each of its lines"""
