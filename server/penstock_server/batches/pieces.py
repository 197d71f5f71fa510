"""Pieces: what of a body is copied into it, from the blocks to where it is to stay.

Lines are short, so what counts is what one piece costs. To Arrow a body is a column of binary views, each of which says where
its bytes lie; cast to plain binaries they are written one after the other, and other threads run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock_server.geometry.arrays import IntArray, in_order
from penstock_server.storage.block import ListColumn

# Arrow's view of a binary. What has few bytes is held by the view itself; of others the first four are there, for who compares
# them: here they are zero, and nobody does.
_VIEW = np.dtype(
    {
        "names": ["nbytes", "held", "buffer", "offset"],
        "formats": ["<i4", "S12", "<i4", "<i4"],
        "offsets": [0, 4, 8, 12],
        "itemsize": 16,
    }
)
_HELD_BYTES = 12
_FEW_PIECES, _FEW_BYTES = 128, 1 << 20  # Python joins fewer than these sooner than Arrow is told of them
_MOST_BYTES = _REACH = (1 << 31) - 1  # of a body, and of what an offset can tell of: both have 32 bits in a view
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
        self._memory: list[pa.Buffer] = []  # what pieces are of
        self._types: list[tuple[np.dtype[Any], np.dtype[Any]]] = []  # of its elements: there, and in the body
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
        sizes, sizes_in_body = np.array([(there.itemsize, here.itemsize) for there, here in self._types]).T
        for _, sources, starts, nbytes in self._copies:
            firsts, counts = (column // sizes_in_body[sources] * sizes[sources] for column in (starts, nbytes))
            yield from zip((addresses[sources] + firsts).tolist(), counts.tolist(), strict=True)

    def join(self, nbytes: int) -> memoryview:
        """The body, of so many bytes.

        Raises IndexError: a piece overlaps another, is not all in what it is of, or the body is longer than 2^31 - 1 bytes.
        """
        found = [*self._copies, *self._fills]
        sources, starts, sizes = self._whole(found[0] if len(found) == 1 else _Copies(*in_order(found)), nbytes)
        memory = [*self._memory, _ZEROS]
        room = np.array([own.size for own in memory])
        others = [n for n, (there, here) in enumerate(self._types) if there != here or memory[n].size > _REACH]
        for number in others:
            there, here = self._types[number]
            room[number] = room[number] // there.itemsize * here.itemsize
        left = room[sources] - starts - sizes
        if np.minimum(np.minimum(starts, sizes), left).min() < 0 or nbytes > _MOST_BYTES:  # Arrow would copy whatever is there
            raise IndexError("a piece of a body overlaps another, is not all in what it is of, or the body is too long")
        mine = np.flatnonzero(np.isin(sources, others)) if others else sources[:0]
        if not len(mine):
            return _joined(memory, sources, starts, sizes)
        # Arrow casts nothing on the way, and does not reach as far: for these it leaves gaps.
        spans = zip(*(column[mine].tolist() for column in (sources, np.cumsum(sizes) - sizes, starts, sizes)), strict=True)
        memory.append(pa.py_buffer(bytes(sizes[mine].max())))
        sources[mine], starts[mine] = len(memory) - 1, 0
        body = _joined(memory, sources, starts, sizes)
        for source, begin, start, size in spans:
            there, here = self._types[source]
            values = np.frombuffer(memory[source], there, size // here.itemsize, start // here.itemsize * there.itemsize)
            np.frombuffer(body, here, len(values), begin)[...] = values
        return body

    def _whole(self, copies: _Copies, nbytes: int) -> tuple[IntArray, IntArray, IntArray]:
        """The source, start and bytes of all that a body consists of, one after the other: copies, and gaps between them."""
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
            return self._whole(_Copies(*in_order([copies, _Copies(cuts, nothing, nothing, nothing)])), nbytes)
        some = np.flatnonzero(sizes)
        return sources[some], starts[some], sizes[some]


def _joined(memory: list[pa.Buffer], numbers: IntArray, starts: IntArray, sizes: IntArray) -> memoryview:
    """Bytes [starts[i], starts[i] + sizes[i]) of memory[numbers[i]], for each i, one after the other."""
    if len(numbers) < _FEW_PIECES and sizes.sum() < _FEW_BYTES:
        return memoryview(bytearray().join(_slices(memory, numbers, starts, starts + sizes)))
    views = np.zeros(len(numbers), _VIEW)
    views["nbytes"], views["buffer"], views["offset"] = sizes, numbers, starts
    short = sizes <= _HELD_BYTES
    # What begins where its memory does, as zeros and padding, is looked up once. What else stands in a view is not looked at.
    which, place = np.unique(numbers[at := np.flatnonzero(short & (starts == 0))], return_inverse=True)
    views["held"][at] = np.array([memory[number][:_HELD_BYTES].to_pybytes() for number in which.tolist()], "S12")[place]
    at = np.flatnonzero(short & (starts != 0))
    views["held"][at] = list(map(bytes, _slices(memory, numbers[at], starts[at], (starts + sizes)[at])))
    # As bytes: to describe the fields of an array for who takes its memory takes longer than all else here.
    column = pa.Array.from_buffers(pa.binary_view(), len(views), [None, pa.py_buffer(views.view(np.uint8)), *memory])
    *_, content = column.cast(pa.large_binary()).buffers()
    return memoryview(content).cast("B")


def _slices(memory: list[pa.Buffer], numbers: IntArray, starts: IntArray, stops: IntArray) -> list[pa.Buffer]:
    spans = zip(numbers.tolist(), starts.tolist(), stops.tolist(), strict=True)
    return [memory[number][start:stop] for number, start, stop in spans]
