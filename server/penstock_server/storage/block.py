"""A block in memory: the tokens of its rows, as views of what the store mapped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock_server.geometry.arrays import IntArray, distinct, find, numbered, starts_of
from penstock_server.recipes.column_types import is_raw, numpy_type
from penstock_server.recipes.encode import COLUMN, REASON, ROW, SPLIT, TURNS, is_validation

Turn = tuple[list[int], bool]  # tokens, and whether they are learned


@dataclass(frozen=True, slots=True)
class ListColumn:
    """A list a row: row i is values[starts[i] : stops[i]].

    memory   what the values lie in, from the first on
    offsets  where each begins, and at last where all end; None where the lists are not all of the values, end to end
    """

    values: npt.NDArray[np.integer[Any]]
    memory: pa.Buffer
    starts: IntArray
    stops: IntArray
    offsets: IntArray | None = None

    @classmethod
    def of(cls, column: pa.LargeListArray) -> ListColumn:
        """The lists of an Arrow column, without a copy: thousands of blocks are held at a time."""
        values, offsets = _view(column.values), _view(column.offsets)
        memory = column.values.buffers()[1].slice(column.values.offset * values.itemsize, values.nbytes)
        return cls(values, memory, offsets[:-1], offsets[1:], offsets)

    @property
    def lengths(self) -> IntArray:
        """The length of each list, computed anew."""
        return self.stops - self.starts

    def lengths_of(self, rows: IntArray) -> IntArray:
        """The lengths of the lists of some rows."""
        lengths: IntArray = self.stops[rows] - self.starts[rows]
        return lengths

    def take(self, rows: IntArray) -> ListColumn:
        """Some of the rows."""
        return ListColumn(self.values, self.memory, self.starts[rows], self.stops[rows])


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


@dataclass(frozen=True, slots=True)
class Feature:
    """A token list a row, and the lengths of the turns in it: prompt, response, prompt, ...; without them all is response."""

    tokens: ListColumn
    turns: ListColumn | None

    def cut(self, parts: RowSpans) -> TokenRuns:
        """The tokens of parts of rows, each cut at the row's end and between turns."""
        spans, rows, firsts, lasts = parts
        lasts = np.minimum(lasts, self.tokens.lengths_of(rows))
        learned = np.ones(len(rows), np.bool_)
        if self.turns is not None:
            # Each row's turns are gone through once: one row may be cut into thousands of parts.
            own = distinct(rows)
            num_turns = self.turns.lengths_of(own)
            row, number = numbered(num_turns)
            borders = starts_of(self.turns.values[self.turns.starts[own[row]] + number])  # all their turns, end to end
            first_turns = starts_of(num_turns)[np.searchsorted(own, rows)]
            begins = borders[first_turns]
            turns = find(borders, begins + firsts)
            part, further = numbered(np.maximum(np.searchsorted(borders, begins + lasts) - turns, 0))
            turns = turns[part] + further
            spans, rows, learned = spans[part], rows[part], (turns - first_turns[part]) % 2 == 1
            firsts = np.maximum(borders[turns] - begins[part], firsts[part])
            lasts = np.minimum(borders[turns + 1] - begins[part], lasts[part])
        lengths = lasts - firsts
        starts, some = self.tokens.starts[rows] + firsts, lengths > 0
        return TokenRuns(spans[some], starts[some], lengths[some], learned[some])

    def row(self, row: int) -> list[Turn]:
        """The tokens of a row, turn by turn."""
        at, zero = np.array([row]), np.zeros(1, np.int64)
        _, starts, lengths, learned = self.cut(RowSpans(zero, at, zero, self.tokens.lengths_of(at)))
        turns = zip(starts.tolist(), lengths.tolist(), learned.tolist(), strict=True)
        return [(self.tokens.values[start : start + length].tolist(), is_learned) for start, length, is_learned in turns]


@dataclass(frozen=True)
class Block:
    """The tokens of one block's rows.

    features  "tokens", or "chosen" and "rejected"
    columns   what travels beside them, by name
    bad       the rows that cannot be used, with the reasons; they have no tokens
    numbered  of each row its number in the block as it is stored in the shard, shape [num_rows]; None: they are all there
    splits    of each row the hash that decides of which split it is, shape [num_rows]
    """

    features: dict[str, Feature]
    columns: dict[str, pa.Array]
    bad: dict[int, str]
    numbered: npt.NDArray[np.integer[Any]] | None
    splits: npt.NDArray[np.uint32]

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
        )

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in the cache, but for a few."""
        lists = [column for feature in self.features.values() for column in (feature.tokens, feature.turns) if column]
        listed = sum(column.values.nbytes + column.starts.nbytes for column in lists)
        return int(listed + sum(column.nbytes for column in self.columns.values()) + self.splits.nbytes)

    @property
    def num_rows(self) -> int:
        """Rows, the bad ones included."""
        return len(self.splits)

    @property
    def rows(self) -> IntArray:
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

    def row_lengths_of(self, rows: IntArray) -> IntArray:
        """As row_lengths, of some rows."""
        return reduce(np.maximum, (feature.tokens.lengths_of(rows) for feature in self.features.values()))

    @cached_property
    def stream(self) -> IntArray:
        """Where each row starts in the block's stream of tokens, shape [num_rows + 1]."""
        return starts_of(self.row_lengths) if self._offsets is None else self._offsets

    def rows_of_stream(self, starts: IntArray, stops: IntArray) -> RowSpans:
        """The rows that some tokens [starts[i], stops[i]) of the stream run over; rows without a token are left out."""
        first = np.searchsorted(self.stream, starts, side="right") - 1
        spans, number = numbered(np.searchsorted(self.stream, stops, side="left") - first)
        rows = first[spans] + number
        firsts = np.maximum(starts[spans] - self.stream[rows], 0)
        lasts = np.minimum(stops[spans], self.stream[rows + 1]) - self.stream[rows]
        parts = (spans, rows, firsts, lasts)
        return RowSpans(*(column[lasts > firsts] for column in parts))

    def cut_stream(self, name: str, starts: IntArray, stops: IntArray) -> TokenRuns:
        """Tokens [starts[i], stops[i]) of the stream of a block with one feature, in as few pieces as there can be."""
        feature = self.features[name]
        if feature.turns is None and self._offsets is not None:
            return TokenRuns(np.arange(len(starts)), starts, stops - starts, np.ones(len(starts), np.bool_))
        return feature.cut(self.rows_of_stream(starts, stops))

    @property
    def _offsets(self) -> IntArray | None:
        """Where each row begins, and at last where all end: of a block with one feature, whose rows are all there."""
        first, *others = self.features.values()
        return None if others else first.tokens.offsets

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
