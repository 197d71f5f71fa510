"""Buffers: reused receive memory for bodies, because fresh pages cost as much as a copy."""

from __future__ import annotations

from itertools import accumulate

MAX_BUFFER = 16 << 20  # more than most bodies take
_SPARE_BYTES = 32 << 20  # kept for the next connection: a loop that waits for data cycles through three ranges
_KEPT_BUFFERS = 12  # one receives, and frames in the earlier ones wait for the loop


class Buffers:
    """Memory for bodies, one after the other. For one thread at a time."""

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []

    def allocate(self, nbytes: int) -> memoryview:
        """Return `nbytes` of memory that no other view uses. Buffers above MAX_BUFFER are not kept."""
        if not nbytes or nbytes > MAX_BUFFER:
            return memoryview(bytearray(nbytes))
        for buffer in self._buffers:
            if nbytes <= len(buffer) and _is_free(buffer):
                return memoryview(buffer)[:nbytes]
        made = bytearray(nbytes)
        self._buffers = [buffer for buffer in self._buffers if nbytes <= len(buffer) or not _is_free(buffer)]
        if len(self._buffers) < _KEPT_BUFFERS:
            self._buffers.append(made)
        return memoryview(made)

    def trim(self) -> None:
        """Drop the buffers that the next connection would rarely need."""
        totals = accumulate(map(len, self._buffers))
        self._buffers = [buffer for buffer, total in zip(self._buffers, totals, strict=True) if total <= _SPARE_BYTES]


def _is_free(buffer: bytearray) -> bool:
    """Whether no view of a buffer exists: with one, Python refuses to change its length."""
    try:
        last = buffer.pop()
    except (BufferError, IndexError):
        return False
    buffer.append(last)  # pop did not release the memory
    return True
