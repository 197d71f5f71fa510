"""A block in memory: the tokens of its rows, as views of what the store mapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock_server.geometry.arrays import IntArray, distinct, find, in_order, numbered, starts_of
from penstock_server.recipes.column_types import is_raw, numpy_type
from penstock_server.recipes.encode import COLUMN, REASON, ROW, SPLIT, TURNS, is_validation
from penstock_server.sealed import SEAL_BYTES
from penstock_server.storage.lists import ListColumn, ListColumns

_END_BYTES = 8  # of an Arrow stream

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

    def row(self, row: int) -> list[Turn]:
        """The tokens of a row, turn by turn."""
        of_row = RowSpans(*np.array([[0], [row], [0], [len(self.tokens.values)]]))
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


@dataclass(frozen=True)
class Block:
    """The tokens of one block's rows.

    features  "tokens", or "chosen" and "rejected"
    columns   what travels beside them, by name
    bad       the rows that cannot be used, with the reasons; they have no tokens
    numbered  of each row its number in the block as it is stored in the shard, shape [num_rows]; None: they are all there
    splits    of each row the hash that decides of which split it is, shape [num_rows]
    nbytes    what the whole block takes in the cache
    """

    features: dict[str, Feature]
    columns: dict[str, pa.Array]
    bad: dict[int, str]
    numbered: npt.NDArray[np.integer[Any]] | None
    splits: npt.NDArray[np.uint32]
    nbytes: int

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> Block:
        """The block that an encoded record batch holds."""
        names, reasons = batch.schema.names, batch.column(REASON)
        bad_rows = np.flatnonzero(reasons.is_valid().to_numpy(zero_copy_only=False))
        features = {}
        for name in names:
            if name not in (REASON, ROW, SPLIT) and not name.startswith(COLUMN) and not name.endswith(TURNS):
                turns = ListColumn.of(batch.column(name + TURNS)) if name + TURNS in names else None
                features[name] = Feature(ListColumn.of(batch.column(name)), turns)
        return cls(
            features=features,
            columns={name.removeprefix(COLUMN): batch.column(name) for name in names if name.startswith(COLUMN)},
            bad={int(row): reasons[int(row)].as_py() for row in bad_rows},
            numbered=_view(batch.column(ROW)) if ROW in names else None,
            splits=_view(batch.column(SPLIT)),
            nbytes=pa.ipc.get_record_batch_size(batch) + batch.schema.serialize().size + _END_BYTES + SEAL_BYTES,
        )

    @property
    def num_rows(self) -> int:
        """Rows, the bad ones included."""
        return len(self.splits)

    @property
    def stored_rows(self) -> IntArray:
        """The number of each row in the block as it is stored in the shard, shape [num_rows]."""
        return np.arange(self.num_rows) if self.numbered is None else self.numbered.astype(np.int64)

    def is_validation(self, row: int, share: float) -> bool:
        """Whether a row is of the validation split, which has that share of all rows."""
        return bool(is_validation(self.splits[row : row + 1], share)[0])

    def of_split(self, split: str, share: float) -> Block:
        """The block of the rows of one split, "train" or "validation"."""
        return self.take(np.flatnonzero(is_validation(self.splits, share) == (split == "validation")))

    def take(self, rows: IntArray) -> Block:
        """The block of some of the rows."""
        return replace(
            self,
            features={
                name: Feature(feature.tokens.take(rows), feature.turns and feature.turns.take(rows))
                for name, feature in self.features.items()
            },
            columns={name: column.take(pa.array(rows)) for name, column in self.columns.items()},
            bad={number: self.bad[row] for number, row in enumerate(rows.tolist()) if row in self.bad} if self.bad else {},
            numbered=rows if self.numbered is None else self.numbered[rows],
            splits=self.splits[rows],
        )

    @cached_property
    def numbers(self) -> dict[str, npt.NDArray[Any]]:
        """The columns of numbers, each of shape [num_rows, *item]."""
        return {name: _numbers(column) for name, column in self.columns.items() if not is_raw(column.type)}

    @property
    def row_lengths(self) -> IntArray:
        """Tokens of each row, shape [num_rows]; where it has several features, of the longest."""
        return reduce(np.maximum, (feature.tokens.lengths for feature in self.features.values()))

    @cached_property
    def stream(self) -> IntArray:
        """Where each row starts in the block's stream of tokens, shape [num_rows + 1]."""
        first, *others = (feature.tokens for feature in self.features.values())
        return first.borders if first.is_whole and not others else starts_of(self.row_lengths)

    @property
    def has_good(self) -> bool:
        """Whether any row can be used."""
        return len(self.bad) < self.num_rows

    @cached_property
    def substitutes(self) -> IntArray:
        """For each row the row to serve in its place: itself, or the next good one, round the block's end; there is one."""
        good = np.delete(np.arange(self.num_rows), np.fromiter(self.bad, np.int64, len(self.bad)))
        return good[np.searchsorted(good, np.arange(self.num_rows)) % len(good)]


def _view(numbers: pa.Array) -> npt.NDArray[Any]:
    """Numbers without nulls where they lie. Arrow's own view would keep its arrays alive, for half of what a block takes."""
    dtype = numpy_type(numbers.type)
    return np.frombuffer(numbers.buffers()[1], dtype, len(numbers), numbers.offset * dtype.itemsize)


def _numbers(column: pa.Array) -> npt.NDArray[Any]:
    if pa.types.is_fixed_size_list(column.type):
        return _numbers(column.flatten()).reshape(len(column), column.type.list_size)
    numbers: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return numbers
