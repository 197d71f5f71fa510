"""Packing: how rows become sequences. Pure arithmetic; what it needs of the data are counts per block.

    Rows     one row, one sequence, cut to its longest length and padded; from row counts
    Concat   the documents of all blocks, one behind the other, are a ring of tokens, cut into sequences; from token counts

Both say how many sequences begin in each block, which is what an order permutes, and what each is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock_server.order import IntArray, find, starts_of


class Spans(NamedTuple):
    """Parts of blocks, in the order of the sequences that they make up.

    Part i, of sequence `sequences[i]`, is [starts[i], stops[i]) of block `blocks[i]`: rows of it in Rows, tokens in Concat.
    """

    sequences: IntArray
    blocks: IntArray
    starts: IntArray
    stops: IntArray


class Packing(Protocol):
    """How the blocks of one snapshot become sequences in one epoch."""

    @property
    def sequences_per_block(self) -> IntArray:
        """How many sequences begin in each block, shape [num_blocks]."""

    def spans(self, blocks: IntArray, indices: IntArray) -> Spans:
        """What sequences are made of; sequence i is the one with number indices[i] of those that begin in blocks[i]."""

    def holding(self, block: int, start: int, stop: int) -> tuple[IntArray, IntArray]:
        """The inverse: the (block, number) of each sequence that a part [start, stop) of a block is in."""


class Rows:
    """One row, one sequence."""

    def __init__(self, rows_per_block: IntArray) -> None:
        self.sequences_per_block = rows_per_block

    def spans(self, blocks: IntArray, indices: IntArray) -> Spans:
        """One row each."""
        return Spans(np.arange(len(blocks)), blocks, indices, indices + 1)

    def holding(self, block: int, start: int, stop: int) -> tuple[IntArray, IntArray]:
        """One each."""
        return np.full(stop - start, block), np.arange(start, stop)


class Concat:
    """The ring of tokens, cut every `seq_len` tokens from token `shift` on, 0 <= shift < seq_len.

    Sequence s is [s * seq_len + shift, (s + 1) * seq_len + shift) of the ring. Nothing is left out but what is too short
    for a sequence; with another shift in each epoch that is something else each time, and so are the borders.
    """

    def __init__(self, tokens_per_block: IntArray, seq_len: int, shift: int) -> None:
        self._starts = starts_of(tokens_per_block)
        self._seq_len, self._shift = seq_len, shift
        self.num_sequences = int(self._starts[-1]) // seq_len
        # The first sequence that begins at a block's first token or behind it.
        self._first = np.clip(-((shift - self._starts) // seq_len), 0, self.num_sequences)
        self.sequences_per_block = np.diff(self._first)

    def spans(self, blocks: IntArray, indices: IntArray) -> Spans:
        """As many parts as a sequence meets blocks; on the ring the first block follows the last."""
        begins = (self._first[blocks] + indices) * self._seq_len + self._shift
        ends = begins + self._seq_len
        round_twice = np.concatenate([self._starts[:-1], self._starts + self._starts[-1]])
        first, last = find(round_twice, begins), find(round_twice, ends - 1)
        num_parts = last - first + 1
        sequences = np.repeat(np.arange(len(blocks)), num_parts)
        turn = np.arange(len(sequences)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
        place = first[sequences] + turn
        starts = np.maximum(begins[sequences], round_twice[place]) - round_twice[place]
        stops = np.minimum(ends[sequences], round_twice[place + 1]) - round_twice[place]
        filled = stops > starts  # blocks without a token lie in between
        parts = (sequences, place % (len(self._starts) - 1), starts, stops)
        return Spans(*(part[filled] for part in parts))

    def holding(self, block: int, start: int, stop: int) -> tuple[IntArray, IntArray]:
        """Those that the part meets, also where the ring closes; none if it is what is left out."""
        total = int(self._starts[-1])
        begin, end = int(self._starts[block]) + start - self._shift, int(self._starts[block]) + stop - self._shift
        turns = [np.arange((begin + turn) // self._seq_len, -(-(end + turn) // self._seq_len)) for turn in (0, total)]
        sequences = np.unique(np.concatenate(turns))
        sequences = sequences[(sequences >= 0) & (sequences < self.num_sequences)]
        blocks = find(self._first, sequences)
        return blocks, sequences - self._first[blocks]


class Piece(NamedTuple):
    """A run of tokens of one feature of one row: source[start : start + length]."""

    feature: str
    source: npt.NDArray[np.unsignedinteger[Any]]
    start: int
    length: int


def truncate(pieces: Sequence[Piece], seq_len: int) -> list[Piece]:
    """The first `seq_len` tokens of the pieces, one behind the other; a piece past them has length 0."""
    kept, room = [], seq_len
    for piece in pieces:
        kept.append(piece._replace(length=min(piece.length, room)))
        room -= kept[-1].length
    return kept


def fill(out: npt.NDArray[np.unsignedinteger[Any]], lines: Sequence[Sequence[Piece]], pad_id: int) -> None:
    """Writes line i, its pieces one behind the other, into out[i], shape [batch_size, width], and pads the rest."""
    for line, pieces in zip(out, lines, strict=True):
        end = 0
        for _, source, start, length in pieces:
            line[end : end + length] = source[start : start + length]
            end += length
        line[end:] = pad_id


def fill_mask(out: npt.NDArray[np.uint8], lines: Sequence[Sequence[Piece]], features: Sequence[str]) -> None:
    """Writes 1 for each token of these features and 0 for every other, in the places that `fill` gives the tokens."""
    for line, pieces in zip(out, lines, strict=True):
        line[:] = 0
        end = 0
        for piece in pieces:
            line[end : end + piece.length] = piece.feature in features
            end += piece.length
