"""Pieces: what of a body is copied into it, from the blocks to where it is to stay.

Lines are short, so what counts is what one piece costs. To Arrow a body is a column of binary views, each of which says where
its bytes lie; cast to plain binaries they are written one behind the other, and other threads run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock_server.geometry.order import IntArray, starts_of
from penstock_server.storage.block import ListColumn

# Arrow's view of a binary. What has few bytes holds them itself; others hold their first four, for who compares them.
_VIEW = np.dtype(
    {
        "names": ["nbytes", "held", "buffer", "offset"],
        "formats": ["<i4", "S12", "<i4", "<i4"],
        "offsets": [0, 4, 8, 12],
        "itemsize": 16,
    }
)
_HELD_BYTES = 12
_FEW = 128  # pieces, which Python has copied before Arrow knows of them
_LONGEST_BUFFER = (1 << 31) - 1  # bytes, for an offset in it
_ZEROS = pa.py_buffer(bytes(1 << 16))  # of longer gaps there are several


class _Copies(NamedTuple):
    """In columns: bytes [starts[i], starts[i] + nbytes[i]) of source sources[i] go to byte begins[i] of the body."""

    begins: IntArray
    sources: IntArray
    starts: IntArray
    nbytes: IntArray


class Pieces:
    """The pieces of one body; they do not overlap. What none of them covers is zero."""

    def __init__(self) -> None:
        self._memory: list[pa.Buffer] = []
        self._types: list[tuple[np.dtype[Any], np.dtype[Any]]] = []  # of the elements there, and as what they are copied
        self._copies: list[_Copies] = []
        self._fills: list[_Copies] = []

    def copy(
        self,
        lists: list[ListColumn],
        dtype: np.dtype[Any],
        begins: IntArray,
        numbers: IntArray,
        starts: IntArray,
        lengths: IntArray,
    ) -> None:
        """Values [starts[i], starts[i] + lengths[i]) of lists[numbers[i]] go to byte begins[i] of the body, as this type.

        They are in the order of the body.
        """
        size = dtype.itemsize
        self._copies.append(_Copies(begins, numbers + len(self._memory), starts * size, lengths * size))
        self._memory += [own.memory for own in lists]
        self._types += [(own.values.dtype, dtype) for own in lists]

    def fill(self, value: int, dtype: np.dtype[Any], begins: IntArray, lengths: IntArray) -> None:
        """At byte begins[i] of the body stand lengths[i] elements of this value. They are in the order of the body."""
        zeros = np.zeros_like(lengths)
        self._fills.append(_Copies(begins, zeros + len(self._memory), zeros, lengths * dtype.itemsize))
        self._memory.append(pa.py_buffer(np.full(lengths.max(initial=0), value, dtype)))
        self._types.append((dtype, dtype))

    def spans(self) -> Iterator[tuple[int, int]]:
        """Address and bytes of what will be copied."""
        addresses = np.array([memory.address for memory in self._memory])
        sizes, sizes_here = np.array([(there.itemsize, here.itemsize) for there, here in self._types]).T
        for _, sources, starts, nbytes in self._copies:
            firsts, counts = (column // sizes_here[sources] * sizes[sources] for column in (starts, nbytes))
            yield from zip((addresses[sources] + firsts).tolist(), counts.tolist(), strict=True)

    def join(self, nbytes: int) -> memoryview:
        """The body, of so many bytes. Raises IndexError: a piece overlaps another, or is not all in its source."""
        sources, starts, sizes = self._whole(_in_order([*self._copies, *self._fills]), nbytes)
        memory = [*self._memory, _ZEROS]
        for number, (there, here) in enumerate(self._types):
            if there != here or memory[number].size > _LONGEST_BUFFER:
                mine = np.flatnonzero(sources == number)
                values = np.frombuffer(memory[number], there)
                memory[number], starts[mine] = _collected(values, here, starts[mine], sizes[mine])
        return _joined(memory, sources, starts, sizes)

    def _whole(self, copies: _Copies, nbytes: int) -> tuple[IntArray, IntArray, IntArray]:
        """The source, start and bytes of all that a body consists of, one behind the other: copies, and gaps between them."""
        # From border to border it is a gap and a copy in turn, and at last a gap.
        borders = np.zeros(2 * len(copies.begins) + 2, np.int64)
        borders[1:-1:2], borders[2:-1:2], borders[-1] = copies.begins, copies.begins + copies.nbytes, nbytes
        sizes = borders[1:] - borders[:-1]
        sources, starts = np.full(len(sizes), len(self._memory)), np.zeros(len(sizes), np.int64)
        sources[1::2], starts[1::2] = copies.sources, copies.starts
        if sizes[::2].max() > _ZEROS.size:  # copies of nothing cut it
            gaps = zip(borders[::2].tolist(), borders[1::2].tolist(), strict=True)
            cuts = np.array([at for first, last in gaps for at in range(first + _ZEROS.size, last, _ZEROS.size)])
            nothing = np.zeros_like(cuts)
            return self._whole(_in_order([copies, _Copies(cuts, nothing, nothing, nothing)]), nbytes)
        some = np.flatnonzero(sizes)
        return sources[some], starts[some], sizes[some]


def _in_order(copies: list[_Copies]) -> _Copies:
    if len(copies) == 1:
        return copies[0]
    columns = [np.concatenate(column) for column in zip(*copies, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return _Copies(*(column[order] for column in columns))


def _collected(values: npt.NDArray[Any], dtype: np.dtype[Any], starts: IntArray, sizes: IntArray) -> tuple[pa.Buffer, IntArray]:
    """Pieces of some values as another type, one behind the other, and where each begins; starts and sizes are bytes."""
    spans = zip((starts // dtype.itemsize).tolist(), ((starts + sizes) // dtype.itemsize).tolist(), strict=True)
    pieces = [values[:0], *(values[first:last] for first, last in spans)]
    return pa.py_buffer(np.concatenate(pieces, dtype=dtype, casting="unsafe")), starts_of(sizes)[:-1]


def _joined(memory: list[pa.Buffer], numbers: IntArray, starts: IntArray, sizes: IntArray) -> memoryview:
    """Bytes [starts[i], starts[i] + sizes[i]) of memory[numbers[i]], for each i, one behind the other."""
    stops = starts + sizes
    left = np.array([buffer.size for buffer in memory])[numbers] - stops
    if np.minimum(np.minimum(starts, sizes), left).min() < 0:  # Arrow would copy whatever is there
        raise IndexError("a piece of a body overlaps another, or is not all in its source")
    if len(numbers) < _FEW:
        return memoryview(bytearray().join(_slices(memory, numbers, starts, stops)))
    views = np.zeros(len(numbers), _VIEW)
    views["nbytes"], views["buffer"], views["offset"] = sizes, numbers, starts
    short = np.flatnonzero(sizes <= _HELD_BYTES)
    views["held"][short] = list(map(bytes, _slices(memory, numbers[short], starts[short], stops[short])))
    # As bytes: to describe the fields of an array for who takes its memory takes longer than all else here.
    column = pa.Array.from_buffers(pa.binary_view(), len(views), [None, pa.py_buffer(views.view(np.uint8)), *memory])
    *_, content = column.cast(pa.large_binary()).buffers()
    return memoryview(content).cast("B")


def _slices(memory: list[pa.Buffer], numbers: IntArray, starts: IntArray, stops: IntArray) -> list[pa.Buffer]:
    spans = zip(numbers.tolist(), starts.tolist(), stops.tolist(), strict=True)
    return [memory[number][start:stop] for number, start, stop in spans]
