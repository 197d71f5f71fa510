"""Pieces: what of a body is copied into it, from the blocks to where it is to stay.

Lines are short, so what counts is what one piece costs: one slice each, and some hundred at a time are written one behind the
other, in seven eighths of the time that it takes to copy each to its place. Not all at a time: they are objects themselves, and
while they are written no other thread runs, even if a disk must be waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock_server.geometry.order import IntArray

Array = npt.NDArray[Any]

_AT_A_TIME = 128
_ZEROS = memoryview(bytes(1 << 16))  # of longer gaps there are several


class _Copies(NamedTuple):
    """In columns: bytes [starts[i], starts[i] + nbytes[i]) of source sources[i] go to byte begins[i] of the body."""

    begins: IntArray
    sources: IntArray
    starts: IntArray
    nbytes: IntArray


class _Cast:
    """An array as one of another type; it is sliced by the bytes of that, as a view of bytes is."""

    def __init__(self, array: Array, dtype: np.dtype[Any]) -> None:
        self._array, self._dtype = array, dtype

    def __getitem__(self, span: slice) -> memoryview:
        size = self._dtype.itemsize
        return self._array[span.start // size : span.stop // size].astype(self._dtype).data


class Pieces:
    """The pieces of one body; they do not overlap. What none of them covers is zero."""

    def __init__(self) -> None:
        self._sources: list[tuple[Array, np.dtype[Any]]] = []  # and as what they are copied
        self._copies: list[_Copies] = []
        self._fills: list[_Copies] = []

    def copy(
        self,
        arrays: list[Array],
        dtype: np.dtype[Any],
        begins: IntArray,
        numbers: IntArray,
        starts: IntArray,
        lengths: IntArray,
    ) -> None:
        """Elements [starts[i], starts[i] + lengths[i]) of arrays[numbers[i]] go to byte begins[i] of the body, as this type.

        They are in the order of the body.
        """
        size = dtype.itemsize
        self._copies.append(_Copies(begins, numbers + len(self._sources), starts * size, lengths * size))
        self._sources += [(array, dtype) for array in arrays]

    def fill(self, value: int, dtype: np.dtype[Any], begins: IntArray, lengths: IntArray) -> None:
        """At byte begins[i] of the body stand lengths[i] elements of this value. They are in the order of the body."""
        zeros = np.zeros_like(lengths)
        self._fills.append(_Copies(begins, zeros + len(self._sources), zeros, lengths * dtype.itemsize))
        self._sources.append((np.full(lengths.max(initial=0), value, dtype), dtype))

    def spans(self) -> Iterator[tuple[int, int]]:
        """Address and bytes of what will be copied."""
        found = [(array.ctypes.data, array.itemsize, dtype.itemsize) for array, dtype in self._sources]
        addresses, sizes, sizes_there = np.array(found).T
        for _, sources, starts, nbytes in self._copies:
            firsts, counts = (column // sizes_there[sources] * sizes[sources] for column in (starts, nbytes))
            yield from zip((addresses[sources] + firsts).tolist(), counts.tolist(), strict=True)

    def join(self, nbytes: int) -> memoryview:
        """The body, of so many bytes."""
        columns = self._whole(_in_order([*self._copies, *self._fills]), nbytes)
        views = [array.view(np.uint8).data if array.dtype == dtype else _Cast(array, dtype) for array, dtype in self._sources]
        views.append(_ZEROS)
        body = BytesIO(bytes(nbytes))  # as long as it will be, or it would move while it grows
        for first in range(0, len(columns[0]), _AT_A_TIME):
            rows = zip(*(column[first : first + _AT_A_TIME].tolist() for column in columns), strict=True)
            body.writelines([views[source][start:stop] for source, start, stop in rows])
        assert body.tell() == nbytes
        return body.getbuffer()

    def _whole(self, copies: _Copies, nbytes: int) -> tuple[IntArray, IntArray, IntArray]:
        """The source, start and stop of all that a body consists of, one behind the other: copies, and gaps between them."""
        # From border to border it is a gap and a copy in turn, and at last a gap.
        borders = np.zeros(2 * len(copies.begins) + 2, np.int64)
        borders[1:-1:2], borders[2:-1:2], borders[-1] = copies.begins, copies.begins + copies.nbytes, nbytes
        sizes = borders[1:] - borders[:-1]
        sources, starts = np.full(len(sizes), len(self._sources)), np.zeros(len(sizes), np.int64)
        sources[1::2], starts[1::2] = copies.sources, copies.starts
        if sizes[::2].max() > len(_ZEROS):  # copies of nothing cut it
            gaps = zip(borders[::2].tolist(), borders[1::2].tolist(), strict=True)
            cuts = np.array([at for first, last in gaps for at in range(first + len(_ZEROS), last, len(_ZEROS))])
            nothing = np.zeros_like(cuts)
            return self._whole(_in_order([copies, _Copies(cuts, nothing, nothing, nothing)]), nbytes)
        some = np.flatnonzero(sizes)
        return sources[some], starts[some], starts[some] + sizes[some]


def _in_order(copies: list[_Copies]) -> _Copies:
    if len(copies) == 1:
        return copies[0]
    columns = [np.concatenate(column) for column in zip(*copies, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return _Copies(*(column[order] for column in columns))
