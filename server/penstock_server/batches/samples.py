"""Samples of some batches before they are written, as references into blocks; and their source rows.

All is in columns: a range of batches has thousands of samples, and making an object takes longer than copying its tokens.
An example: packing=concat with seq_len=5, and a block of two rows, each of five tokens: a prompt of two and a response of
three, then a prompt of one and a response of four. Sample 7 begins at the block's fourth token:

Spans       tokens [3, 8) of the block's stream                                  what the plan says
RowSpans    tokens [3, 5) of row 0, [0, 3) of row 1                              cut where rows end
TokenRuns   [3, 5) with loss, [5, 6) without loss, [6, 8) with loss, of the values    cut where turns end
Runs        these go to tokens 0, 2 and 3 of line 7 of a tensor                  laid into the lines of batches
Pieces      bytes of the values that go to bytes of the body                     laid into the frames
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock_server.batches.member import Member
from penstock_server.batches.plan import TensorSpec
from penstock_server.blocks.block import Block, Features, ListColumns, RowSpans, TokenRuns, Turn
from penstock_server.order.arrays import IntArray, begins_run, by_value, equal_runs, find, numbered
from penstock_server.order.packing import STREAM, Spans


@dataclass(frozen=True, slots=True)
class Origin:
    """A row, or a part of one, in a sample."""

    dataset: str
    """The name of the dataset."""
    shard: str
    """The name of the Parquet file."""
    row_group: int
    """The row group in the file."""
    row: int
    """The number of the row in its row group."""
    start: int
    """The first token of the row in the sample; 0 with task=seq2seq."""
    stop: int
    """The token after the last one in the sample; the row's end with task=seq2seq, which cuts both sides."""
    row_tokens: int
    """Tokens of the row, or of the longer side of a preference pair."""
    side_tokens: dict[str, int] | None
    """Tokens of each side of a preference pair: chosen and rejected."""
    prompt_tokens: int
    """Tokens before the first response; the smaller number for a preference pair; 0 for a text."""
    dataset_row: int
    """The number of the row, counted over all shards."""


@dataclass(slots=True)
class LoadedBlock:
    """Loaded block `index` of member `number` of the mixture, with the rows of the requested split."""

    member: Member
    number: int
    index: int
    block: Block


class Runs(NamedTuple):
    """Runs of tokens that make the lines of a tensor, in order.

    Run i is tokens [starts[i], starts[i] + lengths[i]) of the loaded block number blocks[i], and goes to token offsets[i] of
    line lines[i]. `in_loss[i]`: the tokens of the run have loss.
    """

    lines: IntArray
    blocks: IntArray
    starts: IntArray
    lengths: IntArray
    in_loss: npt.NDArray[np.bool_]
    offsets: IntArray


class Documents(NamedTuple):
    """Rows, or parts of rows, of samples, in order: tokens [firsts[i], lasts[i]) of rows[i]."""

    samples: IntArray
    blocks: IntArray
    rows: IntArray
    firsts: IntArray
    lasts: IntArray

    def offsets(self) -> IntArray:
        """Start of each document in its sample."""
        return _offsets(self.samples, self.lasts - self.firsts)


class Samples:
    """`count` samples of `spans`, in order; span blocks are numbers in `loaded`.

    `replaced`, shape [count], marks the samples with replaced rows.
    """

    def __init__(self, count: int, loaded: list[LoadedBlock], spans: Spans, replaced: npt.NDArray[np.bool_]) -> None:
        self.count, self.loaded, self.replaced = count, loaded, replaced
        self._spans = spans
        self._features = dict[str, Features]()
        self._runs = dict[tuple[str, str | None, int], Runs]()

    def tokens(self, feature: str) -> ListColumns:
        """Returns the tokens of a feature in the loaded blocks, by the block numbers of Runs."""
        return self._feature(feature).tokens

    def runs(self, tensor: TensorSpec) -> Runs:
        """Returns the runs of tokens of a tensor's samples; for a mask or a count, the runs that it marks or counts."""
        # Spans are already cut to seq_len, but a separate prompt or response has its own limit.
        key = tensor.feature, tensor.turn, tensor.longest if tensor.turn else 0
        # An lru_cache on the method and this object would refer to each other, and stay until a garbage collection.
        if key not in self._runs:
            self._runs[key] = self._find_runs(*key)
        return self._runs[key]

    def lengths(self, tensor: TensorSpec) -> IntArray:
        """Returns the tokens of each line of a tensor, shape [count]."""
        runs = self.runs(tensor)
        return np.bincount(runs.lines, runs.lengths, self.count).astype(np.int64)

    @cached_property
    def documents(self) -> Documents:
        """Documents of the samples; an empty row is in no sample."""
        samples, blocks, rows, firsts, stops = self._spans
        if self._are_of_streams:
            at, rows, firsts, lasts = self._rows_of_streams
            return Documents(samples[at], blocks[at], rows, firsts, lasts)
        return Documents(samples, blocks, rows, firsts, np.minimum(stops, self._row_lengths(blocks, rows)))

    @cached_property
    def begins(self) -> tuple[IntArray, IntArray]:
        """Sample of each document, and its first token there. A row that was packed before has several documents."""
        rows = self.documents
        feature = self._feature(next(iter(self.loaded[0].block.features)))
        part, firsts = feature.documents(rows.blocks, RowSpans(np.arange(len(rows.rows)), *rows[2:]))
        return rows.samples[part], (rows.offsets() - rows.firsts)[part] + firsts

    def begins_of(self, sample: int) -> list[int]:
        """Returns the starts of the documents of one sample."""
        samples, tokens = self.begins
        starts: list[int] = tokens[self._where(samples, sample)].tolist()
        return starts

    def sources(self, sample: int) -> list[Origin]:
        """Returns the source rows of one sample in the shards."""
        at = self._where(self.documents.samples, sample)
        columns = (*self.documents[1:], self._row_tokens)
        return [self._source(*line) for line in zip(*(column[at].tolist() for column in columns), strict=True)]

    def line(self, tensor: TensorSpec, sample: int) -> list[Turn]:
        """Returns the tokens of one line of a tensor, in runs; no run spans two documents."""
        runs, tokens = self.runs(tensor), self.tokens(tensor.feature)
        at = self._where(runs.lines, sample)
        begins = [] if tensor.turn else self.begins_of(sample)
        turns: list[Turn] = []
        for number, start, length, in_loss, offset in zip(*(column[at].tolist() for column in runs[1:]), strict=True):
            inside = (begin - offset for begin in begins if offset < begin < offset + length)
            for first, last in pairwise([0, *inside, length]):
                turns.append((tokens[number].values[start + first : start + last].tolist(), in_loss))
        return turns

    def num_tokens(self, tensor: TensorSpec, sample: int) -> int:
        """Returns the number of tokens of one line of a tensor."""
        runs = self.runs(tensor)
        return int(runs.lengths[self._where(runs.lines, sample)].sum())

    def member(self, sample: int) -> Member:
        """Returns the dataset of a sample."""
        return self.loaded[int(self._spans.blocks[np.searchsorted(self._spans.samples, sample)])].member

    @cached_property
    def member_numbers(self) -> IntArray:
        """Number in the mixture of each sample's dataset, shape [count]."""
        first = np.searchsorted(self._spans.samples, np.arange(self.count))
        numbers: IntArray = np.array([block.number for block in self.loaded])[self._spans.blocks[first]]
        return numbers

    def row(self, sample: int) -> tuple[Block, int]:
        """Returns the block and the row of a sample of one row."""
        at = int(np.searchsorted(self._spans.samples, sample))
        return self.loaded[int(self._spans.blocks[at])].block, int(self._spans.rows[at])

    def rows(self) -> Iterator[tuple[Block, IntArray, IntArray]]:
        """Yields (block, its samples, their rows in it), for samples of one row each."""
        for number, mine in self._by_block:
            yield self.loaded[number].block, self._spans.samples[mine], self._spans.rows[mine]

    @staticmethod
    def _where(samples: IntArray, sample: int) -> slice:
        """Returns the slice of one sample in ascending `samples`."""
        return slice(*np.searchsorted(samples, [sample, sample + 1]).tolist())

    @cached_property
    def _row_tokens(self) -> IntArray:
        """Tokens of each document's row, including those outside the sample."""
        return self._row_lengths(self.documents.blocks, self.documents.rows)

    @cached_property
    def _by_block(self) -> list[tuple[int, IntArray]]:
        """Number of each block, and its spans."""
        return list(by_value(self._spans.blocks))

    def _feature(self, name: str) -> Features:
        if name not in self._features:
            self._features[name] = Features([loaded.block.features[name] for loaded in self.loaded])
        return self._features[name]

    def _find_runs(self, feature: str, turn: str | None, longest: int) -> Runs:
        at, starts, lengths, in_loss = self._cut(self._feature(feature))
        if turn:
            of_turn = in_loss == (turn == "response")
            at, starts, lengths, in_loss = (column[of_turn] for column in (at, starts, lengths, in_loss))
        lines, blocks = self._spans.samples[at], self._spans.blocks[at]
        offsets = _offsets(lines, lengths)
        if longest:
            lengths = np.clip(longest - offsets, 0, lengths)
            fits = lengths > 0
            lines, blocks, starts, lengths, offsets = (column[fits] for column in (lines, blocks, starts, lengths, offsets))
            in_loss = in_loss[fits]
        return Runs(lines, blocks, starts, lengths, in_loss, offsets)

    def _cut(self, feature: Features) -> TokenRuns:
        """Returns the tokens of the spans, in the fewest pieces."""
        _, blocks, rows, starts, stops = self._spans
        if not self._are_of_streams:
            return feature.cut(blocks, RowSpans(np.arange(len(rows)), rows, starts, stops))
        if feature.are_streams:
            return TokenRuns(np.arange(len(rows)), starts, stops - starts, np.ones(len(rows), np.bool_))
        return feature.cut(blocks[self._rows_of_streams.spans], self._rows_of_streams)

    @property
    def _are_of_streams(self) -> bool:
        """Whether the spans are of streams; a packing has only one kind."""
        return bool(self._spans.rows[0] == STREAM)

    @cached_property
    def _rows_of_streams(self) -> RowSpans:
        """Rows in the spans of streams, without empty rows."""
        _, blocks, _, starts, stops = self._spans
        order = np.argsort(blocks, kind="stable")
        ends = np.stack([starts, stops - 1])[:, order]  # the first and the last token of each
        rows_of_ends, begins = np.empty_like(ends), np.empty_like(starts)
        for number, run in equal_runs(blocks[order]):  # thousands of runs: the cost of each step matters
            stream = self.loaded[number].block.stream
            rows_of_ends[:, run] = rows = find(stream, ends[:, run])
            begins[run] = stream[rows[0]]
        back = np.argsort(order)
        (first, last), begins = rows_of_ends[:, back], begins[back]
        spans, further = numbered(last + 1 - first)
        rows = first[spans] + further
        lengths = self._row_lengths(blocks[spans], rows)
        row_begins = begins[spans] + _offsets(spans, lengths)
        firsts, lasts = np.maximum(starts[spans] - row_begins, 0), np.minimum(stops[spans] - row_begins, lengths)
        return RowSpans(*(column[lasts > firsts] for column in (spans, rows, firsts, lasts)))

    def _row_lengths(self, blocks: IntArray, rows: IntArray) -> IntArray:
        """Returns the tokens of rows; of the longest feature if a row has several."""
        features = map(self._feature, self.loaded[0].block.features)
        return reduce(np.maximum, (feature.tokens.lengths(blocks, rows) for feature in features))

    def _source(self, number: int, row: int, first: int, last: int, row_tokens: int) -> Origin:
        loaded = self.loaded[number]
        snapshot, stored = loaded.member.snapshot, int(loaded.block.stored_rows[row])
        at = snapshot.block(loaded.index)
        return Origin(
            dataset=loaded.member.name,
            shard=at.shard.path.name,
            row_group=at.row_group,
            row=at.first_row + stored,
            start=first,
            stop=last,
            row_tokens=row_tokens,
            side_tokens=loaded.block.side_lengths(row),
            prompt_tokens=int(loaded.block.prompt_lengths(np.array([row]))[0]),
            dataset_row=snapshot.first_row_of(loaded.index) + stored,
        )


def _offsets(lines: IntArray, lengths: IntArray) -> IntArray:
    """Returns the start of each run in its line, with the runs of a line placed consecutively."""
    begins = np.cumsum(lengths) - lengths
    offsets: IntArray = begins - np.maximum.accumulate(np.where(begins_run(lines), begins, 0))
    return offsets
