"""Sequences: the lines of some batches before they are written, still in their blocks; and where each comes from.

All is in columns: a run of batches has thousands of sequences, and an object takes longer to make than its tokens to copy.
An example: packing=concat with seq_len=5, and a block of two rows, each of five tokens: a prompt of two and a response of
three, then a prompt of one and a response of four. Sequence 7 begins at the block's fourth token:

Spans       tokens [3, 8) of the block's stream                                  what the plan says
RowSpans    tokens [3, 5) of row 0, [0, 3) of row 1                              cut where rows end
TokenRuns   [3, 5) learned, [5, 6) not learned, [6, 8) learned, of the values    cut where turns end
Runs        these go to tokens 0, 2 and 3 of line 7 of a tensor                  laid into the lines of batches
Pieces      bytes of the values that go to bytes of the body                     laid into the frames
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock_server.batches.member import Member
from penstock_server.batches.tensor import Tensor
from penstock_server.geometry.arrays import IntArray, begins_run, by_value, in_order
from penstock_server.geometry.packing import STREAM, Spans
from penstock_server.storage.block import Block, ListColumn, RowSpans, Turn

_FEW_ROWS = 4  # of a block: to look them up one by one takes less time than all at once


@dataclass(frozen=True, slots=True)
class Origin:
    """A row of a sequence, of whose `row_tokens` tokens [start, stop) are in it.

    `row` counts from the start of its row group, `dataset_row` over all shards.
    """

    dataset: str
    shard: str
    row_group: int
    row: int
    start: int
    stop: int
    row_tokens: int
    dataset_row: int


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    """Block `index` of a member, in memory, with the rows of the split that is asked for."""

    member: Member
    index: int
    block: Block


class Runs(NamedTuple):
    """What the lines of a tensor are made of, line by line, and in each in its order.

    Run i is tokens [starts[i], starts[i] + lengths[i]) of the loaded block number blocks[i], and goes to token offsets[i] of
    line lines[i]. `learned[i]`: it is no prompt.
    """

    lines: IntArray
    blocks: IntArray
    starts: IntArray
    lengths: IntArray
    learned: npt.NDArray[np.bool_]
    offsets: IntArray


class Documents(NamedTuple):
    """The rows that sequences are made of, or parts of them, in their order: tokens [firsts[i], lasts[i]) of rows[i]."""

    sequences: IntArray
    blocks: IntArray
    rows: IntArray
    firsts: IntArray
    lasts: IntArray

    def offsets(self) -> IntArray:
        """Where each document begins in its sequence."""
        return _offsets(self.sequences, self.lasts - self.firsts)


class Sequences:
    """`count` sequences, made of `spans`, sequence by sequence, whose blocks are numbered as in `loaded`.

    `substituted`, shape [count], are those that stand in for bad rows.
    """

    def __init__(self, count: int, loaded: list[LoadedBlock], spans: Spans, substituted: npt.NDArray[np.bool_]) -> None:
        self.count, self.loaded, self.substituted = count, loaded, substituted
        self._spans = spans
        self._found = dict[tuple[str, str | None, int], Runs]()

    def tokens(self, feature: str) -> list[ListColumn]:
        """The tokens of a feature in each loaded block, by the numbers that Runs has."""
        return [own.block.features[feature].tokens for own in self.loaded]

    def runs(self, tensor: Tensor) -> Runs:
        """What the lines of a tensor of tokens are made of; of a mask or a count, what the tokens are that it is about."""
        # Spans are cut to length already, but one turn of them has a length of its own.
        key = tensor.feature, tensor.turn, tensor.longest if tensor.turn else 0
        # A cache around the method would hold this, and this the cache: both would stay until garbage is collected.
        if key not in self._found:
            self._found[key] = self._find_runs(*key)
        return self._found[key]

    def lengths(self, tensor: Tensor) -> IntArray:
        """The tokens of each line of a tensor, shape [count]."""
        runs = self.runs(tensor)
        return np.bincount(runs.lines, runs.lengths, self.count).astype(np.int64)

    @cached_property
    def documents(self) -> Documents:
        """The rows that the sequences are made of; a row without tokens is in none."""
        found = []
        for number, mine in self._by_block:
            parts = self._row_spans(number, mine)
            found.append((mine[parts.spans], np.full(len(parts.spans), number), *parts[1:]))
        at, blocks, rows, firsts, lasts = in_order(found)
        return Documents(self._spans.sequences[at], blocks, rows, firsts, lasts)

    def documents_of(self, sequence: int) -> Documents:
        """The documents of one sequence."""
        first, last = np.searchsorted(self.documents.sequences, [sequence, sequence + 1]).tolist()
        return Documents(*(column[first:last] for column in self.documents))

    def sources(self, sequence: int) -> list[Origin]:
        """The rows of one sequence, as they lie in the shards."""
        documents = self.documents_of(sequence)
        return [self._source(*line) for line in zip(*(column.tolist() for column in documents[1:]), strict=True)]

    def line(self, tensor: Tensor, sequence: int) -> list[Turn]:
        """The tokens of one line of a tensor, in runs; none is of two rows."""
        runs, tokens, own = self.runs(tensor), self.tokens(tensor.feature), self._runs_of(tensor, sequence)
        begins = [] if tensor.turn else self.documents_of(sequence).offsets().tolist()
        found: list[Turn] = []
        for number, start, length, learned, offset in zip(*(column[own].tolist() for column in runs[1:]), strict=True):
            inside = (begin - offset for begin in begins if offset < begin < offset + length)
            for first, last in pairwise([0, *inside, length]):
                found.append((tokens[number].values[start + first : start + last].tolist(), learned))
        return found

    def num_tokens(self, tensor: Tensor, sequence: int) -> int:
        """The tokens of one line of a tensor."""
        return int(self.runs(tensor).lengths[self._runs_of(tensor, sequence)].sum())

    def member(self, sequence: int) -> Member:
        """The dataset that a sequence is of."""
        return self.loaded[int(self._spans.blocks[np.searchsorted(self._spans.sequences, sequence)])].member

    def row(self, sequence: int) -> tuple[Block, int]:
        """The block and the row of a sequence of one row."""
        at = int(np.searchsorted(self._spans.sequences, sequence))
        return self.loaded[int(self._spans.blocks[at])].block, int(self._spans.rows[at])

    def rows(self) -> Iterator[tuple[Block, IntArray, IntArray]]:
        """Where each sequence is one row: the blocks, each with the sequences that are made of it and their rows in it."""
        for number, mine in self._by_block:
            yield self.loaded[number].block, self._spans.sequences[mine], self._spans.rows[mine]

    def _runs_of(self, tensor: Tensor, sequence: int) -> slice:
        """Where the runs of one line stand among those of the tensor."""
        return slice(*np.searchsorted(self.runs(tensor).lines, [sequence, sequence + 1]).tolist())

    @cached_property
    def _by_block(self) -> list[tuple[int, IntArray]]:
        """The number of each block, and the spans that are of it."""
        return list(by_value(self._spans.blocks))

    def _find_runs(self, feature: str, turn: str | None, longest: int) -> Runs:
        if not turn and self._is_of_plain_rows(feature):
            return self._find_rows(feature)
        found = []
        for number, mine in self._by_block:
            block, (rows, starts, stops) = self.loaded[number].block, (column[mine] for column in self._spans[2:])
            if rows[0] == STREAM:  # of one packing all spans are of the stream, or none is
                pieces = block.cut_stream(feature, starts, stops)
            else:
                pieces = block.features[feature].cut(RowSpans(np.arange(len(mine)), rows, starts, stops))
            found.append((mine[pieces.spans], np.full(len(pieces.spans), number), *pieces[1:]))
        at, blocks, starts, lengths, learned = in_order(found)
        if turn:
            of_turn = learned == (turn == "response")
            at, blocks, starts, lengths, learned = (column[of_turn] for column in (at, blocks, starts, lengths, learned))
        lines = self._spans.sequences[at]
        offsets = _offsets(lines, lengths)
        if longest:
            lengths = np.clip(longest - offsets, 0, lengths)
            some = lengths > 0
            lines, blocks, starts, lengths, offsets = (column[some] for column in (lines, blocks, starts, lengths, offsets))
            learned = learned[some]
        return Runs(lines, blocks, starts, lengths, learned, offsets)

    def _is_of_plain_rows(self, feature: str) -> bool:
        """Whether the sequences are rows without turns, or parts of such rows."""
        return STREAM not in self._spans.rows and all(own.block.features[feature].turns is None for own in self.loaded)

    def _find_rows(self, feature: str) -> Runs:
        """The runs of sequences of rows without turns, in few steps a block: of a hundred blocks a run has a few rows each."""
        sequences, blocks, rows, firsts, lasts = self._spans
        tokens = self.tokens(feature)
        if len(rows) < _FEW_ROWS * len(tokens):
            lists = [tokens[number] for number in blocks.tolist()]
            starts = np.array([own.starts.item(row) for own, row in zip(lists, rows.tolist(), strict=True)])
            stops = np.array([own.stops.item(row) for own, row in zip(lists, rows.tolist(), strict=True)])
        else:
            starts, stops = np.empty_like(rows), np.empty_like(rows)
            for number, mine in self._by_block:
                own = rows[mine]
                starts[mine], stops[mine] = tokens[number].starts[own], tokens[number].stops[own]
        lengths, starts = np.minimum(lasts, stops - starts) - firsts, starts + firsts
        some = lengths > 0
        if not some.all():
            sequences, blocks, starts, lengths = (column[some] for column in (sequences, blocks, starts, lengths))
        return Runs(sequences, blocks, starts, lengths, np.ones(len(starts), np.bool_), _offsets(sequences, lengths))

    def _row_spans(self, number: int, mine: IntArray) -> RowSpans:
        block, (rows, starts, stops) = self.loaded[number].block, (column[mine] for column in self._spans[2:])
        if rows[0] == STREAM:
            return block.rows_of_stream(starts, stops)
        return RowSpans(np.arange(len(mine)), rows, starts, np.minimum(stops, block.row_lengths_of(rows)))

    def _source(self, number: int, row: int, first: int, last: int) -> Origin:
        own = self.loaded[number]
        snapshot, stored = own.member.snapshot, int(own.block.rows[row])
        at, dataset_row = snapshot.block(own.index), snapshot.first_row_of(own.index) + stored
        [row_tokens] = own.block.row_lengths_of(np.array([row])).tolist()
        row_in_group = at.first_row + stored
        return Origin(own.member.name, at.shard.path.name, at.row_group, row_in_group, first, last, row_tokens, dataset_row)


def _offsets(lines: IntArray, lengths: IntArray) -> IntArray:
    """Where each run begins in its line, if those of a line stand one after the other."""
    begins = np.cumsum(lengths) - lengths
    offsets: IntArray = begins - np.maximum.accumulate(np.where(begins_run(lines), begins, 0))
    return offsets
