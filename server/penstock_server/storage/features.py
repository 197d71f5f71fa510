"""Features: the tokens of rows that lie in several blocks, and how parts of rows are cut out of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock_server.geometry.arrays import IntArray, distinct, find, in_order, numbered, starts_of
from penstock_server.storage.lists import ListColumn, ListColumns

Turn = tuple[list[int], bool]  # tokens, and whether they are learned


class RowSpans(NamedTuple):
    """Tokens of rows, in columns: part i is tokens [firsts[i], lasts[i]) of rows[i]; spans[i] is the span that it is of."""

    spans: IntArray
    rows: IntArray
    firsts: IntArray
    lasts: IntArray


class TokenRuns(NamedTuple):
    """Runs of tokens, in columns: piece i, of span spans[i], is values[starts[i] : starts[i] + lengths[i]] of a feature.

    They stand in the order of the spans; none is empty. `learned[i]`: it is no prompt.
    """

    spans: IntArray
    starts: IntArray
    lengths: IntArray
    learned: npt.NDArray[np.bool_]


class Feature(NamedTuple):
    """A token list a row, and the lengths of the turns in it: prompt, response, prompt, ...; without them all is response."""

    tokens: ListColumn
    turns: ListColumn | None

    def take(self, rows: IntArray) -> Feature:
        """The feature of some of the rows."""
        return Feature(self.tokens.take(rows), self.turns and self.turns.take(rows))

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

    def num_learned(self, row: int) -> int:
        """How many tokens of a row are learned."""
        if self.turns is None:
            return int(self.tokens.lengths[row])
        return int(self.turns.values[self.turns.starts[row] : self.turns.stops[row]][1::2].sum(dtype=np.int64))

    def row(self, row: int, most: int | None = None) -> list[Turn]:
        """The tokens of a row, or the first of them, turn by turn."""
        of_row = RowSpans(*np.array([[0], [row], [0], [len(self.tokens.values) if most is None else most]]))
        _, starts, lengths, learned = Features([self]).cut(np.zeros(1, np.int64), of_row)
        turns = zip(starts.tolist(), lengths.tolist(), learned.tolist(), strict=True)
        return [(self.tokens.values[start : start + length].tolist(), is_learned) for start, length, is_learned in turns]


class Features:
    """A feature of several blocks, by their numbers."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self.tokens = ListColumns([own.tokens for own in features])
        self._turns = [own.turns for own in features]
        self._has_turns = self._turns.count(None) < len(features)

    @cached_property
    def are_streams(self) -> bool:
        """Whether of each block all tokens, end to end, are its stream, and none is of a prompt."""
        return self.tokens.are_whole and not self._has_turns

    def cut(self, blocks: IntArray, parts: RowSpans) -> TokenRuns:
        """The tokens of parts of rows, part i of block blocks[i], each cut at the row's end and between turns."""
        spans, rows, firsts, lasts = parts
        begins, ends = self.tokens.bounds(blocks, rows)
        lasts, learned = np.minimum(lasts, ends - begins), np.ones(len(rows), np.bool_)
        if self._has_turns:
            has_turns = np.array([turns is not None for turns in self._turns])[blocks]
            plain, others = np.flatnonzero(~has_turns), np.flatnonzero(has_turns)
            own, *cut = self._cut_turns(*(column[others] for column in (blocks, rows, firsts, lasts)))
            whole = (plain, firsts[plain], lasts[plain], learned[plain])
            part, firsts, lasts, learned = in_order([whole, (others[own], *cut)])
            spans, begins = spans[part], begins[part]
        lengths = lasts - firsts
        starts, some = begins + firsts, lengths > 0
        return TokenRuns(spans[some], starts[some], lengths[some], learned[some])

    def _cut_turns(
        self, blocks: IntArray, rows: IntArray, firsts: IntArray, lasts: IntArray
    ) -> tuple[IntArray, IntArray, IntArray, npt.NDArray[np.bool_]]:
        """Tokens [firsts[i], lasts[i]) of rows, cut between turns: of each piece i, its tokens, and whether it is learned."""
        # Each row's turns are gone through once: one row may be cut into thousands of parts.
        keys = blocks << 32 | rows
        own = distinct(keys)
        own_blocks, own_rows = np.divmod(own, 1 << 32)
        all_turns = ListColumns([turns for turns in self._turns if turns is not None])
        own_blocks = np.cumsum([turns is not None for turns in self._turns])[own_blocks] - 1  # their numbers among these
        starts, stops = all_turns.bounds(own_blocks, own_rows)
        borders = starts_of(all_turns.values(own_blocks, starts, stops - starts))  # all their turns, end to end
        first_turns = starts_of(stops - starts)[np.searchsorted(own, keys)]
        begins = borders[first_turns]
        turns = find(borders, begins + firsts)
        part, further = numbered(np.maximum(np.searchsorted(borders, begins + lasts) - turns, 0))
        turns, begins = turns[part] + further, begins[part]
        firsts = np.maximum(borders[turns] - begins, firsts[part])
        lasts = np.minimum(borders[turns + 1] - begins, lasts[part])
        return part, firsts, lasts, (turns - first_turns[part]) % 2 == 1
