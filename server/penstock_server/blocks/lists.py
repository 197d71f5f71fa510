"""Lists of whole numbers, one a row, where they lie in a stored block; and those of several blocks, looked up together."""

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
    """A list a row: row i is values[starts[i] : stops[i]].

    dtype    of the values
    memory   what they lie in, from the first on
    bounds   where lists begin and end, int64: list i is told by the 16 bytes from byte i * stride on
    stride   8 where each list begins where the one before it ends, and they are all of the values; else 16
    """

    dtype: np.dtype[Any]
    memory: pa.Buffer
    bounds: pa.Buffer
    stride: int

    @classmethod
    def of(cls, column: pa.LargeListArray) -> ListColumn:
        """The lists of an Arrow column, without a copy: thousands of blocks are held at a time."""
        values = column.values
        # Buffers alone: Arrow's own objects would take half of what a block does.
        return cls(numpy_type(values.type), _memory(values), _memory(column.offsets), _BOUNDS.itemsize)

    @property
    def is_whole(self) -> bool:
        """Whether the lists are all of the values, end to end."""
        return self.stride == _BOUNDS.itemsize

    @property
    def values(self) -> npt.NDArray[np.integer[Any]]:
        """All values."""
        return np.frombuffer(self.memory, self.dtype)

    @property
    def starts(self) -> IntArray:
        """Where each list begins, shape [num_lists]."""
        return self.borders[:-1] if self.is_whole else self.borders[::2]

    @property
    def stops(self) -> IntArray:
        """Where each list ends, shape [num_lists]."""
        return self.borders[1:] if self.is_whole else self.borders[1::2]

    @property
    def borders(self) -> IntArray:
        """All bounds; of lists end to end where each begins, and at last where all end."""
        return np.frombuffer(self.bounds, _BOUNDS)

    @property
    def lengths(self) -> IntArray:
        """The length of each list, shape [num_lists]."""
        return self.stops - self.starts

    def take(self, rows: IntArray) -> ListColumn:
        """Some of the rows."""
        bounds = np.stack([self.starts[rows], self.stops[rows]], axis=1)
        return ListColumn(self.dtype, self.memory, pa.py_buffer(bounds), 2 * _BOUNDS.itemsize)


class ListColumns:
    """A list column of several blocks, by their numbers. Of thousands of blocks a step for each would take longest."""

    def __init__(self, columns: Sequence[ListColumn]) -> None:
        self._columns = columns

    def __getitem__(self, block: int) -> ListColumn:
        return self._columns[block]

    @cached_property
    def memory(self) -> list[pa.Buffer]:
        """What the values of each block lie in."""
        return [own.memory for own in self._columns]

    @cached_property
    def dtypes(self) -> list[np.dtype[Any]]:
        """Of what type they are, of each block."""
        return [own.dtype for own in self._columns]

    @property
    def are_whole(self) -> bool:
        """Whether the lists of each block are all of its values, end to end."""
        return all(own.is_whole for own in self._columns)

    def bounds(self, blocks: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Where lists begin and end among the values of their block: those of rows[i] of block blocks[i].

        Raises IndexError: a block has no such row.
        """
        sizes = np.full(len(rows), 2 * _BOUNDS.itemsize)
        pairs = joined(self._bounds, blocks, rows * self._strides[blocks], sizes)
        starts, stops = np.frombuffer(pairs, _BOUNDS).reshape(-1, 2).T
        return starts, stops

    def lengths(self, blocks: IntArray, rows: IntArray) -> IntArray:
        """The lengths of lists, as `bounds` finds them."""
        starts, stops = self.bounds(blocks, rows)
        return stops - starts

    def values(self, blocks: IntArray, starts: IntArray, lengths: IntArray) -> npt.NDArray[Any]:
        """Values [starts[i], starts[i] + lengths[i]) of block blocks[i], for each i, end to end; of blocks of one type."""
        dtype = self.dtypes[0]
        return np.frombuffer(joined(self.memory, blocks, starts * dtype.itemsize, lengths * dtype.itemsize), dtype)

    @cached_property
    def _bounds(self) -> list[pa.Buffer]:
        return [own.bounds for own in self._columns]

    @cached_property
    def _strides(self) -> IntArray:
        return np.array([own.stride for own in self._columns])


def _memory(numbers: pa.Array) -> pa.Buffer:
    """What numbers without nulls lie in, from the first to the last."""
    itemsize = numpy_type(numbers.type).itemsize
    return numbers.buffers()[1].slice(numbers.offset * itemsize, len(numbers) * itemsize)
