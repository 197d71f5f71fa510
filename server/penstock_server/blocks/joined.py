"""Joined: concatenates ranges of many buffers in one call, not one call per piece.

The ranges form an Arrow column of binary views; each view refers to its bytes. A cast to plain binaries writes them one after
the other, and releases the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from penstock_server.order.arrays import IntArray

# Arrow's view of a binary. A view holds short bytes itself. For longer ones it holds the first four, for comparisons; here they
# are zero, since no view is compared.
_VIEW = np.dtype(
    {
        "names": ["nbytes", "held", "buffer", "offset"],
        "formats": ["<i4", "S12", "<i4", "<i4"],
        "offsets": [0, 4, 8, 12],
        "itemsize": 16,
    }
)
_HELD_BYTES = 12
_FEW_PIECES, _FEW_BYTES = 128, 1 << 20  # below both, Python joins the pieces faster than Arrow
_REACH = (1 << 31) - 1  # bytes: largest offset in a view, and largest joined size


def joined(memory: Sequence[pa.Buffer], numbers: IntArray, starts: IntArray, sizes: IntArray) -> memoryview:
    """Concatenates bytes [starts[i], starts[i] + sizes[i]) of memory[numbers[i]] for each i.

    Raises IndexError: a range is outside its buffer, or the total is 2^31 bytes or more.
    """
    stops, nbytes = starts + sizes, int(sizes.sum())
    room = np.array([own.size for own in memory])[numbers] - stops
    if min(starts.min(initial=0), sizes.min(initial=0), room.min(initial=0), _REACH - nbytes) < 0:  # Arrow does not check this
        raise IndexError("some bytes are not in the buffer that they are to be of, or are too many")
    if stops.max(initial=0) > _REACH or (len(numbers) < _FEW_PIECES and nbytes < _FEW_BYTES):
        return memoryview(bytearray().join(_slices(memory, numbers, starts, stops)))
    views = np.zeros(len(numbers), _VIEW)
    views["nbytes"], views["buffer"], views["offset"] = sizes, numbers, starts
    short = sizes <= _HELD_BYTES
    # Ranges at the start of their buffer, such as zeros and padding, are looked up once per buffer.
    which, place = np.unique(numbers[at := np.flatnonzero(short & (starts == 0))], return_inverse=True)
    views["held"][at] = np.array([memory[number][:_HELD_BYTES].to_pybytes() for number in which.tolist()], "S12")[place]
    at = np.flatnonzero(short & (starts != 0))
    views["held"][at] = list(map(bytes, _slices(memory, numbers[at], starts[at], stops[at])))
    # As bytes: exporting the buffer of a structured array describes its fields, which takes longer than the rest.
    column = pa.Array.from_buffers(pa.binary_view(), len(views), [None, pa.py_buffer(views.view(np.uint8)), *memory])
    *_, content = column.cast(pa.large_binary()).buffers()
    return memoryview(content).cast("B")


def _slices(memory: Sequence[pa.Buffer], numbers: IntArray, starts: IntArray, stops: IntArray) -> list[pa.Buffer]:
    spans = zip(numbers.tolist(), starts.tolist(), stops.tolist(), strict=True)
    return [memory[number][start:stop] for number, start, stop in spans]
