"""Block in memory: the tokens of its rows, as views of the mapped file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock_server.blocks.columns import Feature, ListColumn
from penstock_server.files import SEAL_BYTES
from penstock_server.order.arrays import IntArray, starts_of
from penstock_server.recipes.encode import COLUMN, DOCUMENTS, REASON, ROW, SPLIT, TURNS
from penstock_server.recipes.fields import is_raw, numpy_type
from penstock_server.recipes.recipe import FEATURES
from penstock_server.recipes.split import Selection, is_selected, is_validation

_END_BYTES = 8  # end marker of an Arrow stream


@dataclass(frozen=True)
class Block:
    """Tokens of the rows of one block.

    features  "tokens", or "chosen" and "rejected"
    columns   passthrough columns, by name
    bad       unusable rows, with reasons; they have no tokens
    numbered  number of each row in the block in the shard, shape [num_rows]; None if the block has all of its rows
    splits    hash of each row that decides its split, shape [num_rows]
    nbytes    bytes of the whole block in the cache
    """

    features: dict[str, Feature]
    columns: dict[str, pa.Array]
    bad: dict[int, str]
    numbered: npt.NDArray[np.integer[Any]] | None
    splits: npt.NDArray[np.uint32]
    nbytes: int

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> Block:
        """Returns the block of an encoded record batch."""
        names, reasons = batch.schema.names, batch.column(REASON)
        bad_rows = np.flatnonzero(reasons.is_valid().to_numpy(zero_copy_only=False))
        features = {}
        for name in FEATURES:
            if name in names:
                lists = (ListColumn.of(batch.column(n)) if n in names else None for n in (name + TURNS, name + DOCUMENTS))
                features[name] = Feature(ListColumn.of(batch.column(name)), *lists)
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
        """Number of rows, including bad ones."""
        return len(self.splits)

    @property
    def stored_rows(self) -> IntArray:
        """Number of each row in the block in the shard, shape [num_rows]."""
        return np.arange(self.num_rows) if self.numbered is None else self.numbered.astype(np.int64)

    def is_validation(self, row: int, share: float) -> bool:
        """Returns whether the hash holds a row out for validation, a `share` of all rows."""
        return bool(is_validation(self.splits[row : row + 1], share)[0])

    def selected(self, selection: Selection, share: float) -> Block:
        """Returns the rows of a split as a block; the hash holds out `share` for validation."""
        return self.take(np.flatnonzero(is_selected(is_validation(self.splits, share), selection)))

    def take(self, rows: IntArray) -> Block:
        """Returns some of the rows as a block."""
        return replace(
            self,
            features={name: feature.take(rows) for name, feature in self.features.items()},
            columns={name: column.take(pa.array(rows)) for name, column in self.columns.items()},
            bad={number: self.bad[row] for number, row in enumerate(rows.tolist()) if row in self.bad} if self.bad else {},
            numbered=rows if self.numbered is None else self.numbered[rows],
            splits=self.splits[rows],
        )

    @cached_property
    def numbers(self) -> dict[str, npt.NDArray[Any]]:
        """Numeric columns, each of shape [num_rows, *item]."""
        return {name: _numbers(column) for name, column in self.columns.items() if not is_raw(column.type)}

    def text_bounds(self, name: str, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Returns where the values of a text or binary column in some rows start and stop in the column's bytes."""
        column = self.columns[name]
        offsets = np.frombuffer(column.buffers()[1], np.int64)[column.offset :]
        return offsets[rows], offsets[rows + 1]

    @property
    def row_lengths(self) -> IntArray:
        """Tokens of each row, shape [num_rows]; of the longest feature if a row has several."""
        return reduce(np.maximum, (feature.tokens.lengths for feature in self.features.values()))

    def prompt_lengths(self, rows: IntArray) -> IntArray:
        """Returns the tokens of rows before their first response, the minimum over the sides of a pair; shape of `rows`."""
        return reduce(np.minimum, (feature.prompt_lengths(rows) for feature in self.features.values()))

    def side_lengths(self, row: int) -> dict[str, int] | None:
        """Returns the tokens of each side of a preference pair; None for other rows."""
        if len(self.features) == 1:
            return None
        lists = {name: feature.tokens for name, feature in self.features.items()}
        return {name: int(tokens.stops[row] - tokens.starts[row]) for name, tokens in lists.items()}

    @cached_property
    def stream(self) -> IntArray:
        """Start of each row in the block's stream of tokens, shape [num_rows + 1]."""
        first, *others = (feature.tokens for feature in self.features.values())
        return first.offsets if first.is_whole and not others else starts_of(self.row_lengths)

    @property
    def has_good(self) -> bool:
        """Whether any row can be used."""
        return len(self.bad) < self.num_rows

    @cached_property
    def replacements(self) -> IntArray:
        """Row to serve for each row: itself, or the next good row, wrapping at the block's end. Needs a good row."""
        good = np.delete(np.arange(self.num_rows), np.fromiter(self.bad, np.int64, len(self.bad)))
        return good[np.searchsorted(good, np.arange(self.num_rows)) % len(good)]


def _view(numbers: pa.Array) -> npt.NDArray[Any]:
    """Views numbers without nulls. Arrow's view would keep its array objects alive, half of a block's memory."""
    dtype = numpy_type(numbers.type)
    return np.frombuffer(numbers.buffers()[1], dtype, len(numbers), numbers.offset * dtype.itemsize)


def _numbers(column: pa.Array) -> npt.NDArray[Any]:
    if pa.types.is_fixed_size_list(column.type):
        return _numbers(column.flatten()).reshape(len(column), column.type.list_size)
    numbers: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return numbers
