"""A block in memory: the tokens of its rows, as views of what the store mapped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock_server.geometry.order import IntArray, starts_of
from penstock_server.geometry.packing import Piece
from penstock_server.recipes.column_types import is_raw
from penstock_server.recipes.encode import COLUMN, REASON, ROW, SPLIT, TURNS, is_validation


@dataclass(frozen=True, slots=True)
class ListColumn:
    """A list a row: row i is values[starts[i] : starts[i] + lengths[i]]."""

    values: npt.NDArray[np.integer[Any]]
    starts: IntArray
    lengths: IntArray

    @classmethod
    def of(cls, column: pa.LargeListArray) -> ListColumn:
        """The lists of an Arrow column, without a copy."""
        offsets = column.offsets.to_numpy()
        return cls(column.values.to_numpy(zero_copy_only=True), offsets[:-1], np.diff(offsets))

    def take(self, rows: IntArray) -> ListColumn:
        """Some of the rows."""
        return ListColumn(self.values, self.starts[rows], self.lengths[rows])


@dataclass(frozen=True, slots=True)
class Feature:
    """A token list a row, and the lengths of the turns in it: prompt, response, prompt, ...; without them all is response."""

    tokens: ListColumn
    turns: ListColumn | None

    def cut(self, rows: IntArray, firsts: IntArray, lasts: IntArray) -> list[list[Piece]]:
        """Tokens [firsts[i], lasts[i]) of rows[i], each cut at the row's end and between turns."""
        values, starts = self.tokens.values, self.tokens.starts[rows]
        lasts = np.minimum(lasts, self.tokens.lengths[rows])
        if self.turns is None:
            borders = np.zeros_like(rows)
        elif (self.turns.lengths[rows] == 2).all():  # a prompt and a response
            borders = self.turns.values[self.turns.starts[rows]].astype(np.int64)
        else:
            spans = zip(rows.tolist(), firsts.tolist(), lasts.tolist(), strict=True)
            return [list(self.pieces(row, first, last)) for row, first, last in spans]
        borders = np.clip(borders, firsts, np.maximum(firsts, lasts))
        columns = (starts + firsts, borders - firsts, starts + borders, lasts - borders)
        return [
            [Piece(values, at, n, learned) for at, n, learned in ((p, prompt, False), (r, response, True)) if n > 0]
            for p, prompt, r, response in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def pieces(self, row: int, first: int, last: int) -> Iterator[Piece]:
        """Tokens [first, last) of a row, cut at the row's end and between turns."""
        start, length = int(self.tokens.starts[row]), int(self.tokens.lengths[row])
        last = min(last, length)
        if self.turns is None:
            if last > first:
                yield Piece(self.tokens.values, start + first, last - first, True)
            return
        begin, turn = int(self.turns.starts[row]), 0
        for number, size in enumerate(self.turns.values[begin : begin + int(self.turns.lengths[row])].tolist()):
            low, high = max(first, turn), min(last, turn + size)
            if high > low:
                yield Piece(self.tokens.values, start + low, high - low, number % 2 == 1)
            turn += size


class Cut(NamedTuple):
    """Tokens [start, stop) of a block's stream, and their pieces in each feature."""

    start: int
    stop: int
    pieces: dict[str, list[Piece]]


@dataclass(frozen=True)
class Block:
    """The tokens of one block's rows.

    features  "tokens", or "chosen" and "rejected"
    columns   what travels beside them, by name
    bad       the rows that cannot be used, with the reasons; they have no tokens
    rows      of each row its number in the block as it is stored in the shard, shape [num_rows]
    splits    of each row the hash that decides of which split it is, shape [num_rows]
    """

    features: dict[str, Feature]
    columns: dict[str, pa.Array]
    bad: dict[int, str]
    rows: IntArray
    splits: npt.NDArray[np.uint32]
    _splits: dict[str, Block] = field(default_factory=dict, compare=False)

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
        rows = batch.column(ROW).to_numpy().astype(np.int64) if ROW in names else np.arange(batch.num_rows)
        return cls(
            features=features,
            columns={name.removeprefix(COLUMN): batch.column(name) for name in names if name.startswith(COLUMN)},
            bad={int(row): reasons[int(row)].as_py() for row in bad_rows},
            rows=rows,
            splits=batch.column(SPLIT).to_numpy(),
        )

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in the cache, but for a few."""
        lists = [column for feature in self.features.values() for column in (feature.tokens, feature.turns) if column]
        listed = sum(column.values.nbytes + 8 * len(column.lengths) for column in lists)
        return int(listed + sum(column.nbytes for column in self.columns.values()) + self.splits.nbytes)

    @property
    def num_rows(self) -> int:
        """Rows, the bad ones included."""
        return len(self.rows)

    def is_validation(self, row: int, share: float) -> bool:
        """Whether a row is of the validation split, which has that share of all rows."""
        return bool(is_validation(self.splits[row : row + 1], share)[0])

    def of_split(self, split: str, share: float) -> Block:
        """The block of the rows of one split, "train" or "validation", or itself for "all"."""
        if split == "all":
            return self
        if split not in self._splits:
            self._splits[split] = self.take(np.flatnonzero(is_validation(self.splits, share) == (split == "validation")))
        return self._splits[split]

    def take(self, rows: IntArray) -> Block:
        """The block of some of the rows."""
        kept = {int(row): number for number, row in enumerate(rows.tolist()) if row in self.bad} if self.bad else {}
        return replace(
            self,
            features={
                name: Feature(feature.tokens.take(rows), feature.turns and feature.turns.take(rows))
                for name, feature in self.features.items()
            },
            columns={name: column.take(pa.array(rows)) for name, column in self.columns.items()},
            bad={number: self.bad[row] for row, number in kept.items()},
            rows=self.rows[rows],
            splits=self.splits[rows],
            _splits={},
        )

    @cached_property
    def numbers(self) -> dict[str, npt.NDArray[Any]]:
        """The columns of numbers, each of shape [num_rows, *item]."""
        return {name: _numbers(column) for name, column in self.columns.items() if not is_raw(column.type)}

    @cached_property
    def row_lengths(self) -> IntArray:
        """Tokens of each row, shape [num_rows]; where it has several features, of the longest."""
        first, *others = [feature.tokens.lengths for feature in self.features.values()]
        return np.max([first, *others], axis=0) if others else first

    @cached_property
    def stream(self) -> IntArray:
        """Where each row starts in the block's stream of tokens, shape [num_rows + 1]."""
        return starts_of(self.row_lengths)

    def cut_rows(self, rows: IntArray, starts: IntArray, stops: IntArray) -> list[Cut]:
        """Tokens [starts[i], stops[i]) of rows[i], each cut at the row's end."""
        begins, ends = self.stream[rows], np.minimum(stops, self.row_lengths[rows])
        by_feature = [feature.cut(rows, starts, stops) for feature in self.features.values()]
        pieces = (dict(zip(self.features, lines, strict=True)) for lines in zip(*by_feature, strict=True))
        return [Cut(*cut) for cut in zip((begins + starts).tolist(), (begins + ends).tolist(), pieces, strict=True)]

    def cut_stream(self, starts: IntArray, stops: IntArray) -> list[Cut]:
        """Tokens [starts[i], stops[i]) of the stream, which may run over rows; the block has one feature."""
        [name] = self.features
        spans = zip(starts.tolist(), stops.tolist(), strict=True)
        return [Cut(start, stop, {name: list(self._pieces(start, stop))}) for start, stop in spans]

    def _pieces(self, start: int, stop: int) -> Iterator[Piece]:
        [feature] = self.features.values()
        if feature.turns is None and self._is_contiguous:
            yield Piece(feature.tokens.values, start + int(feature.tokens.starts[0]), stop - start, True)
            return
        first_row = int(np.searchsorted(self.stream, start, side="right")) - 1
        last_row = int(np.searchsorted(self.stream, stop, side="left"))
        for row in range(first_row, last_row):
            begin = int(self.stream[row])
            yield from feature.pieces(row, max(0, start - begin), stop - begin)

    @cached_property
    def _is_contiguous(self) -> bool:
        [feature] = self.features.values()
        return bool((feature.tokens.starts - feature.tokens.starts[:1] == self.stream[:-1]).all())

    @property
    def has_good(self) -> bool:
        """Whether any row can be used."""
        return len(self.bad) < self.num_rows

    @cached_property
    def substitutes(self) -> IntArray:
        """For each row the row to serve in its place: itself, or the next good one, round the block's end; there is one."""
        good = np.setdiff1d(np.arange(self.num_rows), np.fromiter(self.bad, np.int64, len(self.bad)))
        return good[np.searchsorted(good, np.arange(self.num_rows)) % len(good)]


def _numbers(column: pa.Array) -> npt.NDArray[Any]:
    if pa.types.is_fixed_size_list(column.type):
        return _numbers(column.flatten()).reshape(len(column), column.type.list_size)
    numbers: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return numbers
