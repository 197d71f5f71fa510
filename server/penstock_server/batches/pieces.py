"""Pieces: copies from blocks into the body of a response. Samples are short, so the cost of each piece matters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock_server.blocks.joined import joined
from penstock_server.blocks.lists import ListColumns
from penstock_server.order.arrays import IntArray, in_order

_ZEROS = pa.py_buffer(bytes(1 << 16))  # longer gaps take several pieces


class _Copies(NamedTuple):
    """Columns of copies: bytes [starts[i], starts[i] + nbytes[i]) of source sources[i] go to byte begins[i] of the body."""

    begins: IntArray
    sources: IntArray
    starts: IntArray
    nbytes: IntArray


class Pieces:
    """Pieces of one body, without overlap; uncovered bytes are zero."""

    def __init__(self) -> None:
        self._memory: list[pa.Buffer] = []  # sources of pieces
        self._types: list[np.dtype[Any]] = []  # element type of each source
        self._types_here: list[np.dtype[Any]] = []  # element type of each source in the body
        self._cast: list[int] = []  # sources with another type in the body
        self._copies: list[_Copies] = []
        self._fills: list[_Copies] = []

    def copy(
        self,
        lists: ListColumns,
        dtype: np.dtype[Any],
        begins: IntArray,
        numbers: IntArray,
        starts: IntArray,
        lengths: IntArray,
    ) -> None:
        """Copies values [starts[i], starts[i] + lengths[i]) of lists[numbers[i]] to byte begins[i], as `dtype`.

        The pieces are in the order of the body.
        """
        size = dtype.itemsize
        self._copies.append(_Copies(begins, numbers + len(self._memory), starts * size, lengths * size))
        self._add(lists.memory, lists.dtypes, dtype)

    def fill(self, value: int, dtype: np.dtype[Any], begins: IntArray, lengths: IntArray) -> None:
        """Fills lengths[i] elements at byte begins[i] with a value. The pieces are in the order of the body."""
        zeros = np.zeros_like(lengths)
        self._fills.append(_Copies(begins, zeros + len(self._memory), zeros, lengths * dtype.itemsize))
        self._add([pa.py_buffer(np.full(lengths.max(initial=0), value, dtype))], [dtype], dtype)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yields (address, bytes) of each copy."""
        addresses = np.array([memory.address for memory in self._memory])
        sizes, sizes_in_body = (np.array([own.itemsize for own in types]) for types in (self._types, self._types_here))
        for _, sources, starts, nbytes in self._copies:
            firsts, counts = (column // sizes_in_body[sources] * sizes[sources] for column in (starts, nbytes))
            yield from zip((addresses[sources] + firsts).tolist(), counts.tolist(), strict=True)

    def join(self, nbytes: int) -> memoryview:
        """Returns the body of `nbytes`.

        Raises IndexError: a piece overlaps another or exceeds its source, or the body is longer than 2^31 - 1 bytes.
        """
        found = [*self._copies, *self._fills]
        sources, starts, sizes = self._whole(found[0] if len(found) == 1 else _Copies(*in_order(found)), nbytes)
        if sizes.min() < 0:
            raise IndexError("a piece of a body overlaps another, or ends behind it")
        memory = [*self._memory, _ZEROS]
        mine = np.flatnonzero(np.isin(sources, self._cast)) if self._cast else sources[:0]
        if not len(mine):
            return joined(memory, sources, starts, sizes)
        # Leave gaps for cast pieces, since `joined` does not cast.
        spans = zip(*(column[mine].tolist() for column in (sources, np.cumsum(sizes) - sizes, starts, sizes)), strict=True)
        memory.append(pa.py_buffer(bytes(sizes[mine].max())))
        sources[mine], starts[mine] = len(memory) - 1, 0
        body = joined(memory, sources, starts, sizes)
        for source, begin, start, size in spans:
            values, here = np.frombuffer(memory[source], self._types[source]), self._types_here[source]
            first, last = start // here.itemsize, (start + size) // here.itemsize
            if not 0 <= first <= last <= len(values):
                raise IndexError("a piece of a body is not all in what it is of")
            np.frombuffer(body, here, last - first, begin)[...] = values[first:last]
        return body

    def _add(self, memory: Sequence[pa.Buffer], types: list[np.dtype[Any]], here: np.dtype[Any]) -> None:
        """Adds sources with elements of `types`, which have the type `here` in the body."""
        if types.count(here) < len(types):
            self._cast += [len(self._memory) + number for number, there in enumerate(types) if there != here]
        self._memory += memory
        self._types += types
        self._types_here += [here] * len(memory)

    def _whole(self, copies: _Copies, nbytes: int) -> tuple[IntArray, IntArray, IntArray]:
        """Returns the source, start and bytes of the consecutive parts of a body: copies, and the gaps between them."""
        # Parts alternate between gap and copy, and end with a gap.
        borders = np.zeros(2 * len(copies.begins) + 2, np.int64)
        borders[1:-1:2], borders[2:-1:2], borders[-1] = copies.begins, copies.begins + copies.nbytes, nbytes
        sizes = borders[1:] - borders[:-1]
        sources, starts = np.full(len(sizes), len(self._memory)), np.zeros(len(sizes), np.int64)
        sources[1::2], starts[1::2] = copies.sources, copies.starts
        if sizes[::2].max() > _ZEROS.size:  # empty copies split a long gap
            gaps = zip(borders[::2].tolist(), borders[1::2].tolist(), strict=True)
            cuts = np.array([at for first, last in gaps for at in range(first + _ZEROS.size, last, _ZEROS.size)])
            nothing = np.zeros_like(cuts)
            return self._whole(_Copies(*in_order([copies, _Copies(cuts, nothing, nothing, nothing)])), nbytes)
        some = np.flatnonzero(sizes)
        return sources[some], starts[some], sizes[some]
