"""Joined: bytes of many buffers, one after the other, in one step and not one a piece.

To Arrow this is a column of binary views, each of which says where its bytes lie; cast to plain binaries they are written one
after the other, and other threads run meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from penstock_server.order.arrays import IntArray

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
_REACH = (1 << 31) - 1  # bytes: as far into a buffer a view can tell of them, and as many can be joined


def joined(memory: Sequence[pa.Buffer], numbers: IntArray, starts: IntArray, sizes: IntArray) -> memoryview:
    """Bytes [starts[i], starts[i] + sizes[i]) of memory[numbers[i]], for each i, one after the other.

    Raises IndexError: they are not all in their buffer, or 2^31 or more in all.
    """
    stops, nbytes = starts + sizes, int(sizes.sum())
    room = np.array([own.size for own in memory])[numbers] - stops
    if min(starts.min(initial=0), sizes.min(initial=0), room.min(initial=0), _REACH - nbytes) < 0:  # Arrow would not notice
        raise IndexError("some bytes are not in the buffer that they are to be of, or are too many")
    if stops.max(initial=0) > _REACH or (len(numbers) < _FEW_PIECES and nbytes < _FEW_BYTES):
        return memoryview(bytearray().join(_slices(memory, numbers, starts, stops)))
    views = np.zeros(len(numbers), _VIEW)
    views["nbytes"], views["buffer"], views["offset"] = sizes, numbers, starts
    short = sizes <= _HELD_BYTES
    # What begins where its memory does, as zeros and padding, is looked up once. What else stands in a view is not looked at.
    which, place = np.unique(numbers[at := np.flatnonzero(short & (starts == 0))], return_inverse=True)
    views["held"][at] = np.array([memory[number][:_HELD_BYTES].to_pybytes() for number in which.tolist()], "S12")[place]
    at = np.flatnonzero(short & (starts != 0))
    views["held"][at] = list(map(bytes, _slices(memory, numbers[at], starts[at], stops[at])))
    # As bytes: to describe the fields of an array for who takes its memory takes longer than all else here.
    column = pa.Array.from_buffers(pa.binary_view(), len(views), [None, pa.py_buffer(views.view(np.uint8)), *memory])
    *_, content = column.cast(pa.large_binary()).buffers()
    return memoryview(content).cast("B")


def _slices(memory: Sequence[pa.Buffer], numbers: IntArray, starts: IntArray, stops: IntArray) -> list[pa.Buffer]:
    spans = zip(numbers.tolist(), starts.tolist(), stops.tolist(), strict=True)
    return [memory[number][start:stop] for number, start, stop in spans]
