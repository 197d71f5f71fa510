"""Lists of integers, one per row, as views of a stored block; and lookups over several blocks together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock_server.blocks.joined import joined
from penstock_server.order.arrays import IntArray
from penstock_server.recipes.column_types import numpy_type

_BOUNDS = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class ListColumn:
    """A column with one list per row: row i is values[starts[i] : stops[i]].

    dtype    type of the values
    memory   buffer of the values, from the first one on
    bounds   start and stop of list i, int64, in the 16 bytes from byte i * stride on
    stride   8 if the lists are contiguous and cover all values; else 16
    """

    dtype: np.dtype[Any]
    memory: pa.Buffer
    bounds: pa.Buffer
    stride: int

    @classmethod
    def of(cls, column: pa.LargeListArray) -> ListColumn:
        """Views the lists of an Arrow column without a copy: thousands of blocks are held at a time."""
        values = column.values
        # Keep only buffers: Arrow's array objects would take half of a block's memory.
        return cls(numpy_type(values.type), _memory(values), _memory(column.offsets), _BOUNDS.itemsize)

    @property
    def is_whole(self) -> bool:
        """Whether the lists are contiguous and cover all values."""
        return self.stride == _BOUNDS.itemsize

    @property
    def values(self) -> npt.NDArray[np.integer[Any]]:
        """All values."""
        return np.frombuffer(self.memory, self.dtype)

    @property
    def starts(self) -> IntArray:
        """Start of each list, shape [num_lists]."""
        return self.borders[:-1] if self.is_whole else self.borders[::2]

    @property
    def stops(self) -> IntArray:
        """Stop of each list, shape [num_lists]."""
        return self.borders[1:] if self.is_whole else self.borders[1::2]

    @property
    def borders(self) -> IntArray:
        """All bounds; for contiguous lists the start of each, then the end of the last."""
        return np.frombuffer(self.bounds, _BOUNDS)

    @property
    def lengths(self) -> IntArray:
        """Length of each list, shape [num_lists]."""
        return self.stops - self.starts

    def take(self, rows: IntArray) -> ListColumn:
        """Returns some of the rows."""
        bounds = np.stack([self.starts[rows], self.stops[rows]], axis=1)
        return ListColumn(self.dtype, self.memory, pa.py_buffer(bounds), 2 * _BOUNDS.itemsize)


class ListColumns:
    """A list column of several blocks, by block number. Avoids a Python step per block, since there may be thousands."""

    def __init__(self, columns: Sequence[ListColumn]) -> None:
        self._columns = columns

    def __getitem__(self, block: int) -> ListColumn:
        return self._columns[block]

    @cached_property
    def memory(self) -> list[pa.Buffer]:
        """Buffer of each block's values."""
        return [own.memory for own in self._columns]

    @cached_property
    def dtypes(self) -> list[np.dtype[Any]]:
        """Type of each block's values."""
        return [own.dtype for own in self._columns]

    @property
    def are_whole(self) -> bool:
        """Whether the lists of each block are contiguous and cover all of its values."""
        return all(own.is_whole for own in self._columns)

    def bounds(self, blocks: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Returns (starts, stops) of the lists of rows[i] of block blocks[i] in the block's values.

        Raises IndexError: a row does not exist.
        """
        sizes = np.full(len(rows), 2 * _BOUNDS.itemsize)
        pairs = joined(self._bounds, blocks, rows * self._strides[blocks], sizes)
        starts, stops = np.frombuffer(pairs, _BOUNDS).reshape(-1, 2).T
        return starts, stops

    def lengths(self, blocks: IntArray, rows: IntArray) -> IntArray:
        """Returns the lengths of lists; arguments as in `bounds`."""
        starts, stops = self.bounds(blocks, rows)
        return stops - starts

    def values(self, blocks: IntArray, starts: IntArray, lengths: IntArray) -> npt.NDArray[Any]:
        """Concatenates values [starts[i], starts[i] + lengths[i]) of block blocks[i]; all blocks must have one type."""
        dtype = self.dtypes[0]
        return np.frombuffer(joined(self.memory, blocks, starts * dtype.itemsize, lengths * dtype.itemsize), dtype)

    @cached_property
    def _bounds(self) -> list[pa.Buffer]:
        return [own.bounds for own in self._columns]

    @cached_property
    def _strides(self) -> IntArray:
        return np.array([own.stride for own in self._columns])


def _memory(numbers: pa.Array) -> pa.Buffer:
    """Returns the buffer slice of numbers without nulls, from the first to the last."""
    itemsize = numpy_type(numbers.type).itemsize
    return numbers.buffers()[1].slice(numbers.offset * itemsize, len(numbers) * itemsize)
