"""Pieces: what of a body is copied into it, from the blocks to where it is to stay; all in one go.

Lines are short, so what counts is what one piece costs: to slice it and have Python join all slices takes two thirds of the
time of copying them one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock_server.geometry.order import IntArray

Array = npt.NDArray[Any]


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

    def add(
        self,
        arrays: list[Array],
        dtype: np.dtype[Any],
        begins: IntArray,
        numbers: IntArray,
        starts: IntArray,
        lengths: IntArray,
    ) -> None:
        """Elements [starts[i], starts[i] + lengths[i]) of arrays[numbers[i]] go to byte begins[i] of the body, as this type.

        None is empty, and they are in the order of the body.
        """
        size = dtype.itemsize
        self._copies.append(_Copies(begins, numbers + len(self._sources), starts * size, lengths * size))
        self._sources += [(array, dtype) for array in arrays]

    def spans(self) -> Iterator[tuple[int, int]]:
        """Address and bytes of what `join` will read."""
        found = [(array.ctypes.data, array.itemsize, dtype.itemsize) for array, dtype in self._sources]
        addresses, sizes, sizes_there = np.array(found).T
        for _, sources, starts, nbytes in self._copies:
            firsts, counts = (column // sizes_there[sources] * sizes[sources] for column in (starts, nbytes))
            yield from zip((addresses[sources] + firsts).tolist(), counts.tolist(), strict=True)

    def join(self, nbytes: int) -> bytearray:
        """The body, of so many bytes."""
        copies = _in_order(self._copies)
        # From border to border it is a gap and a piece in turn, and at last a gap.
        borders = np.zeros(2 * len(copies.begins) + 2, np.int64)
        borders[1:-1:2], borders[2:-1:2], borders[-1] = copies.begins, copies.begins + copies.nbytes, nbytes
        sizes = borders[1:] - borders[:-1]
        sources, starts = np.full(len(sizes), len(self._sources)), np.zeros(len(sizes), np.int64)
        sources[1::2], starts[1::2] = copies.sources, copies.starts
        some = np.flatnonzero(sizes)
        columns = (sources[some], starts[some], starts[some] + sizes[some])
        views = [array.view(np.uint8).data if array.dtype == dtype else _Cast(array, dtype) for array, dtype in self._sources]
        views.append(memoryview(bytes(sizes[::2].max())))  # for the gaps
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return bytearray().join([views[source][start:stop] for source, start, stop in rows])


def _in_order(copies: list[_Copies]) -> _Copies:
    if len(copies) == 1:
        return copies[0]
    columns = [np.concatenate(column) for column in zip(*copies, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return _Copies(*(column[order] for column in columns))
