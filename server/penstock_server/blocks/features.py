"""Features: the tokens of rows that lie in several blocks, and how parts of rows are cut out of them."""

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
    """Tokens of rows, in columns: part i is tokens [firsts[i], lasts[i]) of rows[i]; spans[i] is the span that it is of."""

    spans: IntArray
    rows: IntArray
    firsts: IntArray
    lasts: IntArray


class TokenRuns(NamedTuple):
    """Runs of tokens, in columns: piece i, of span spans[i], is values[starts[i] : starts[i] + lengths[i]] of a feature.

    They stand in the order of the spans; none is empty. `in_loss[i]`: it is no prompt.
    """

    spans: IntArray
    starts: IntArray
    lengths: IntArray
    in_loss: npt.NDArray[np.bool_]


class Feature(NamedTuple):
    """A token list a row, and the lengths of the turns in it: prompt, response, prompt, ...; without them all is response.

    `documents` are the lengths of the documents in each row; without them a row is one document.
    """

    tokens: ListColumn
    turns: ListColumn | None
    documents: ListColumn | None = None

    def take(self, rows: IntArray) -> Feature:
        """The feature of some of the rows."""
        turns, documents = (lists and lists.take(rows) for lists in (self.turns, self.documents))
        return Feature(self.tokens.take(rows), turns, documents)

    def prompt_lengths(self, rows: IntArray) -> IntArray:
        """How many tokens each of these rows has before its first response, shape of `rows`."""
        lengths = np.zeros(len(rows), np.int64)
        if self.turns is not None:
            starts, stops, turns = self.turns.starts[rows], self.turns.stops[rows], self.turns.values
            with_prompt, with_both = (np.flatnonzero(stops - starts > n) for n in (0, 1))
            lengths[with_prompt] = turns[starts[with_prompt]]
            for row in with_both[turns[starts[with_both] + 1] == 0].tolist():  # as of a chat whose first reply is blank
                own = turns[starts[row] : stops[row]]
                first = np.append(np.flatnonzero(own[1::2]), len(own))[0]
                lengths[row] = own[: 2 * first + 1].sum()
        return lengths

    def num_loss_tokens(self, row: int) -> int:
        """How many tokens of a row have loss."""
        if self.turns is None:
            return int(self.tokens.lengths[row])
        return int(self.turns.values[self.turns.starts[row] : self.turns.stops[row]][1::2].sum(dtype=np.int64))

    def row(self, row: int, most: int | None = None) -> list[Turn]:
        """The tokens of a row, or the first of them, turn by turn."""
        of_row = RowSpans(*np.array([[0], [row], [0], [len(self.tokens.values) if most is None else most]]))
        _, starts, lengths, in_loss = Features([self]).cut(np.zeros(1, np.int64), of_row)
        turns = zip(starts.tolist(), lengths.tolist(), in_loss.tolist(), strict=True)
        return [(self.tokens.values[start : start + length].tolist(), is_in_loss) for start, length, is_in_loss in turns]


class Features:
    """A feature of several blocks, by their numbers."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self.tokens = ListColumns([own.tokens for own in features])
        self._turns = _Partition([own.turns for own in features])
        self._documents = _Partition([own.documents for own in features])

    @cached_property
    def are_streams(self) -> bool:
        """Whether of each block all tokens, end to end, are its stream, and none is of a prompt."""
        return self.tokens.are_whole and not self._turns.blocks

    def cut(self, blocks: IntArray, parts: RowSpans) -> TokenRuns:
        """The tokens of parts of rows, part i of block blocks[i], each cut at the row's end and between turns."""
        spans, rows, firsts, lasts = parts
        begins, ends = self.tokens.bounds(blocks, rows)
        part, firsts, lasts, numbers = self._turns.cut(blocks, rows, firsts, np.minimum(lasts, ends - begins))
        lengths = lasts - firsts
        starts, some = begins[part] + firsts, lengths > 0
        return TokenRuns(spans[part][some], starts[some], lengths[some], numbers[some] % 2 == 1)

    def documents(self, blocks: IntArray, parts: RowSpans) -> tuple[IntArray, IntArray]:
        """The documents in parts of rows, as `cut` takes them: which part each is of, and its first token in the row."""
        part, firsts, _, _ = self._documents.cut(blocks, *parts[1:])
        return part, firsts


class _Partition:
    """How the rows of blocks are divided: of each block the lengths of each row's pieces, or None for whole rows."""

    def __init__(self, lists: Sequence[ListColumn | None]) -> None:
        self._has_lists = np.array([own is not None for own in lists])
        self._lists = ListColumns([own for own in lists if own is not None])
        self.blocks = int(self._has_lists.sum())

    def cut(self, blocks: IntArray, rows: IntArray, firsts: IntArray, lasts: IntArray) -> tuple[IntArray, ...]:
        """Tokens [firsts[i], lasts[i]) of rows, cut between pieces: of each the part i, its tokens, and its number in the row.

        A whole row counts as number 1: without turns all is response.
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
        # Each row's pieces are gone through once: one row may be cut into thousands of parts.
        keys = blocks << 32 | rows
        own = distinct(keys)
        own_blocks, own_rows = np.divmod(own, 1 << 32)
        own_blocks = np.cumsum(self._has_lists)[own_blocks] - 1  # their numbers among these
        starts, stops = self._lists.bounds(own_blocks, own_rows)
        borders = starts_of(self._lists.values(own_blocks, starts, stops - starts))  # all their pieces, end to end
        first_pieces = starts_of(stops - starts)[np.searchsorted(own, keys)]
        begins = borders[first_pieces]
        pieces = find(borders, begins + firsts)
        part, further = numbered(np.maximum(np.searchsorted(borders, begins + lasts) - pieces, 0))
        pieces, begins = pieces[part] + further, begins[part]
        firsts = np.maximum(borders[pieces] - begins, firsts[part])
        lasts = np.minimum(borders[pieces + 1] - begins, lasts[part])
        return part, firsts, lasts, pieces - first_pieces[part]
