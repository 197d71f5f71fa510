"""Features: tokens of rows in several blocks, and cutting parts of rows from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock_server.blocks.lists import ListColumn, ListColumns
from penstock_server.order.arrays import IntArray, distinct, find, in_order, numbered, starts_of

Turn = tuple[list[int], bool]  # tokens, and whether they have loss


class RowSpans(NamedTuple):
    """Parts of rows, in columns: part i is tokens [firsts[i], lasts[i]) of rows[i], in span spans[i]."""

    spans: IntArray
    rows: IntArray
    firsts: IntArray
    lasts: IntArray


class TokenRuns(NamedTuple):
    """Runs of tokens, in columns: piece i, of span spans[i], is values[starts[i] : starts[i] + lengths[i]] of a feature.

    They are in the order of the spans; no run is empty. `in_loss[i]`: the run is not a prompt.
    """

    spans: IntArray
    starts: IntArray
    lengths: IntArray
    in_loss: npt.NDArray[np.bool_]


class Feature(NamedTuple):
    """One token list per row, with the lengths of its turns: prompt, response, prompt, ...; without turns, all is response.

    `documents` has the lengths of the documents in each row; without it, a row is one document.
    """

    tokens: ListColumn
    turns: ListColumn | None
    documents: ListColumn | None = None

    def take(self, rows: IntArray) -> Feature:
        """Returns the feature of some of the rows."""
        turns, documents = (lists and lists.take(rows) for lists in (self.turns, self.documents))
        return Feature(self.tokens.take(rows), turns, documents)

    def prompt_lengths(self, rows: IntArray) -> IntArray:
        """Returns the tokens of each row before its first response, shape of `rows`."""
        lengths = np.zeros(len(rows), np.int64)
        if self.turns is not None:
            starts, stops, turns = self.turns.starts[rows], self.turns.stops[rows], self.turns.values
            with_prompt, with_both = (np.flatnonzero(stops - starts > n) for n in (0, 1))
            lengths[with_prompt] = turns[starts[with_prompt]]
            for row in with_both[turns[starts[with_both] + 1] == 0].tolist():  # as in a chat with an empty first reply
                own = turns[starts[row] : stops[row]]
                first = np.append(np.flatnonzero(own[1::2]), len(own))[0]
                lengths[row] = own[: 2 * first + 1].sum()
        return lengths

    def num_loss_tokens(self, row: int) -> int:
        """Returns the number of tokens with loss in a row."""
        if self.turns is None:
            return int(self.tokens.lengths[row])
        return int(self.turns.values[self.turns.starts[row] : self.turns.stops[row]][1::2].sum(dtype=np.int64))

    def row(self, row: int, most: int | None = None) -> list[Turn]:
        """Returns the tokens of a row by turn, at most the first `most`."""
        of_row = RowSpans(*np.array([[0], [row], [0], [len(self.tokens.values) if most is None else most]]))
        _, starts, lengths, in_loss = Features([self]).cut(np.zeros(1, np.int64), of_row)
        turns = zip(starts.tolist(), lengths.tolist(), in_loss.tolist(), strict=True)
        return [(self.tokens.values[start : start + length].tolist(), is_in_loss) for start, length, is_in_loss in turns]


class Features:
    """A feature of several blocks, by block number."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self.tokens = ListColumns([own.tokens for own in features])
        self._turns = _Partition([own.turns for own in features])
        self._documents = _Partition([own.documents for own in features])

    @cached_property
    def are_streams(self) -> bool:
        """Whether each block's stream is all of its tokens in order, without prompts."""
        return self.tokens.are_whole and not self._turns.blocks

    def cut(self, blocks: IntArray, parts: RowSpans) -> TokenRuns:
        """Returns the tokens of parts of rows, part i in block blocks[i], cut at the row's end and between turns."""
        spans, rows, firsts, lasts = parts
        begins, ends = self.tokens.bounds(blocks, rows)
        part, firsts, lasts, numbers = self._turns.cut(blocks, rows, firsts, np.minimum(lasts, ends - begins))
        lengths = lasts - firsts
        starts, some = begins[part] + firsts, lengths > 0
        return TokenRuns(spans[part][some], starts[some], lengths[some], numbers[some] % 2 == 1)

    def documents(self, blocks: IntArray, parts: RowSpans) -> tuple[IntArray, IntArray]:
        """Returns the documents in parts of rows, as passed to `cut`: the part of each, and its first token in the row."""
        part, firsts, _, _ = self._documents.cut(blocks, *parts[1:])
        return part, firsts


class _Partition:
    """Division of rows into pieces: for each block the lengths of each row's pieces, or None for whole rows."""

    def __init__(self, lists: Sequence[ListColumn | None]) -> None:
        self._has_lists = np.array([own is not None for own in lists])
        self._lists = ListColumns([own for own in lists if own is not None])
        self.blocks = int(self._has_lists.sum())

    def cut(self, blocks: IntArray, rows: IntArray, firsts: IntArray, lasts: IntArray) -> tuple[IntArray, ...]:
        """Cuts tokens [firsts[i], lasts[i]) of rows between pieces; returns the part i, the tokens and the number of each.

        The number is that of the piece in its row. A whole row has number 1: without turns, all is response.
        """
        whole = (np.arange(len(rows)), firsts, lasts, np.ones(len(rows), np.int64))
        if not self.blocks:
            return whole
        has_lists = self._has_lists[blocks]
        plain, others = np.flatnonzero(~has_lists), np.flatnonzero(has_lists)
        own, *cut = self._cut(*(column[others] for column in (blocks, rows, firsts, lasts)))
        return tuple(in_order([tuple(column[plain] for column in whole), (others[own], *cut)]))

    def _cut(
        self, blocks: IntArray, rows: IntArray, firsts: IntArray, lasts: IntArray
    ) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        # Scan each row's pieces once: one row may be cut into thousands of parts.
        keys = blocks << 32 | rows
        own = distinct(keys)
        own_blocks, own_rows = np.divmod(own, 1 << 32)
        own_blocks = np.cumsum(self._has_lists)[own_blocks] - 1  # numbers among the blocks with lists
        starts, stops = self._lists.bounds(own_blocks, own_rows)
        borders = starts_of(self._lists.values(own_blocks, starts, stops - starts))  # all pieces of these rows, concatenated
        first_pieces = starts_of(stops - starts)[np.searchsorted(own, keys)]
        begins = borders[first_pieces]
        pieces = find(borders, begins + firsts)
        part, further = numbered(np.maximum(np.searchsorted(borders, begins + lasts) - pieces, 0))
        pieces, begins = pieces[part] + further, begins[part]
        firsts = np.maximum(borders[pieces] - begins, firsts[part])
        lasts = np.minimum(borders[pieces + 1] - begins, lasts[part])
        return part, firsts, lasts, pieces - first_pieces[part]
