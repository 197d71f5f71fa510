"""Bodies: where the frames of a chunk lie, and each tensor in all of them. What is alike is written together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock import wire
from penstock_server.geometry.order import IntArray, find, starts_of

Array = npt.NDArray[Any]

_STEP_WIDTHS = (0, 1 << 7, 1 << 8, 1 << 16, 1 << 32, 1 << 64)  # msgpack spells a step longer from each of these on


class Alike(NamedTuple):
    """Frames of a body, one behind the other from byte `start` on, that are of one layout and whose heads have one length."""

    start: int
    steps: range
    heads: wire.Heads
    layout: wire.Layout
    head_nbytes: int

    @property
    def frame_nbytes(self) -> int:
        """The bytes of each."""
        return self.head_nbytes + self.layout.nbytes

    @property
    def stop(self) -> int:
        """The byte behind the last."""
        return self.start + len(self.steps) * self.frame_nbytes

    def out(self, body: bytearray, number: int) -> Out:
        """The tensor of that number in the layout, in all of them."""
        tensor = self.layout.tensors[number]
        begin = self.start + self.head_nbytes + tensor.offset
        return Out(begin, wire.strided(tensor, body, begin, self.frame_nbytes, len(self.steps)))

    def cut(self, body: memoryview) -> Iterator[tuple[memoryview, memoryview]]:
        """Head and payload of each."""
        for start in range(self.start, self.stop, self.frame_nbytes):
            yield body[start : start + self.head_nbytes], body[start + self.head_nbytes : start + self.frame_nbytes]


def alike_frames(address: wire.Address, steps: range, layouts: list[wire.Layout]) -> Iterator[Alike]:
    """The frames of some steps of one epoch and rank, in their order; mostly all of them are alike."""
    start = 0
    of_step = dict(zip(steps, layouts, strict=True))
    for some in of_one_width(steps):
        for layout, alike in groupby(some, of_step.__getitem__):
            first, *others = alike
            own = range(first, first + (1 + len(others)) * steps.step, steps.step)
            heads = wire.Heads(address, layout)
            found = Alike(start, own, heads, layout, len(heads.head(first)))
            yield found
            start = found.stop


def of_one_width(steps: range) -> Iterator[range]:
    """The steps in parts that a header spells with as many bytes each."""
    for low, high in pairwise(_STEP_WIDTHS):
        if alike := steps[bisect_left(steps, low) : bisect_left(steps, high)]:
            yield alike


class Out(NamedTuple):
    """A tensor in frames that are alike: its array, which begins at that byte of the body.

    Its shape is [frames, batch_size, ...], or [frames, nbytes] of texts.
    """

    begin: int
    array: Array


class Outs:
    """One tensor in all frames of a body."""

    def __init__(self, body: bytearray, outs: list[Out]) -> None:
        self.body, self._outs = body, outs

    @property
    def arrays(self) -> list[Array]:
        """The arrays that it consists of."""
        return [out.array for out in self._outs]

    def frames(self) -> Iterator[Array]:
        """What it is in each frame."""
        return chain.from_iterable(self.arrays)

    def parts(self, values: Array) -> Iterator[tuple[Array, Array]]:
        """To each of the arrays its own of the values, one a sequence; not of texts."""
        first = 0
        for array in self.arrays:
            last = first + array.shape[0] * array.shape[1]
            yield array, values[first:last]
            first = last

    def begins(self, lines: IntArray, offsets: IntArray) -> IntArray:
        """The bytes of the body at which elements of lines begin: `offsets[i]` of line `lines[i]` of all."""
        size, itemsize = self.arrays[0].shape[1], self.arrays[0].itemsize
        [begin, array], *others = self._outs
        first_line: int | IntArray = 0
        frame, line = array.strides[:2]
        if others:
            first_lines = starts_of(np.array([len(array) * size for array in self.arrays]))
            which = find(first_lines, lines)
            first_line = first_lines[which]
            begin, frame, line = np.array([(out.begin, *out.array.strides[:2]) for out in self._outs]).T[:, which]
        frames, own = np.divmod(lines - first_line, size)
        begins: IntArray = begin + frames * frame + own * line + offsets * itemsize
        return begins
