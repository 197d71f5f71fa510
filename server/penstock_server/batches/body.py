"""Bodies: where the frames of a chunk lie, and each tensor in all of them. What is alike is placed together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock import wire
from penstock_server.order.arrays import IntArray, find, starts_of

Array = npt.NDArray[Any]

_STEP_WIDTHS = (0, 1 << 7, 1 << 8, 1 << 16, 1 << 32, 1 << 64)  # msgpack spells a step longer from each of these on


class Alike(NamedTuple):
    """Frames of a body, one after the other from byte `start` on, that are of one layout and whose heads have one length."""

    start: int
    steps: range
    heads: wire.Heads
    layout: wire.Layout
    head_nbytes: int

    @property
    def frame_nbytes(self) -> int:
        """The bytes of each frame."""
        return self.head_nbytes + self.layout.nbytes

    @property
    def stop(self) -> int:
        """The byte after the last frame."""
        return self.start + len(self.steps) * self.frame_nbytes

    def place(self, number: int) -> Place:
        """Where the tensor of that number in the layout lies, in all of them."""
        tensor = self.layout.tensors[number]
        return Place(self.start + self.head_nbytes + tensor.offset, self.frame_nbytes, len(self.steps), tensor)

    def write_heads(self, body: memoryview, replaced: Iterator[int]) -> None:
        """Writes each frame's head, of the payload that is there; a line here costs as much as copying a row."""
        frame_nbytes, head_nbytes, head = self.frame_nbytes, self.head_nbytes, self.heads.head
        for step, start in zip(self.steps, range(self.start, self.stop, frame_nbytes), strict=True):
            begin = start + head_nbytes
            body[start:begin] = head(step, wire.digest(body[begin : start + frame_nbytes]), next(replaced))


def alike_frames(address: wire.Address, steps: range, layouts: list[wire.Layout]) -> Iterator[Alike]:
    """The frames of some steps of one epoch and rank, in their order; mostly all of them are alike."""
    start = 0
    of_step = dict(zip(steps, layouts, strict=True))
    for some in of_one_width(steps):
        for layout, alike in groupby(some, of_step.__getitem__):
            own, heads = list(alike), wire.Heads(address, layout)
            found = Alike(start, range(own[0], own[-1] + 1, steps.step), heads, layout, len(heads.head(own[0])))
            yield found
            start = found.stop


def of_one_width(steps: range) -> Iterator[range]:
    """The steps in parts that a header spells with as many bytes each."""
    for low, high in pairwise(_STEP_WIDTHS):
        if alike := steps[bisect_left(steps, low) : bisect_left(steps, high)]:
            yield alike


class Place(NamedTuple):
    """A tensor in frames that are alike: it begins at byte `begin` of the body, and then each `stride` bytes."""

    begin: int
    stride: int
    num_frames: int
    tensor: wire.TensorLayout

    @property
    def num_lines(self) -> int:
        """The lines of a tensor of shape [batch_size, ...], in all of them."""
        return self.num_frames * self.tensor.shape[0]

    def array(self, body: memoryview) -> Array:
        """The tensor in all of these frames, shape [num_frames, batch_size, ...], or [num_frames, nbytes] of texts."""
        return wire.strided(self.tensor, body, self.begin, self.stride, self.num_frames)


class Places:
    """One tensor in all frames of a body."""

    def __init__(self, places: list[Place]) -> None:
        self._places = places

    @property
    def num_frames(self) -> int:
        """How many frames there are."""
        return sum(place.num_frames for place in self._places)

    def frames(self, body: memoryview) -> Iterator[Array]:
        """The tensor in each frame, shape [batch_size, ...], or [nbytes] of texts."""
        return chain.from_iterable(place.array(body) for place in self._places)

    def parts(self, body: memoryview, values: Array) -> Iterator[tuple[Array, Array]]:
        """Each Place.array, and those of the values, one a line of all frames, that belong into it; not for texts."""
        first = 0
        for place in self._places:
            last = first + place.num_lines
            yield place.array(body), values[first:last]
            first = last

    def widths(self) -> IntArray:
        """The elements of each line of a tensor of shape [batch_size, width]: shape [num_lines], or [1] if all are alike."""
        widths = np.array([place.tensor.shape[1] for place in self._places])
        return widths if len(widths) == 1 else np.repeat(widths, [place.num_lines for place in self._places])

    def begins(self, lines: IntArray, offsets: IntArray) -> IntArray:
        """The bytes of the body at which elements offsets[i] of lines lines[i] begin; lines are counted over all frames."""
        [place, *others] = self._places
        size, itemsize = place.tensor.shape[0], np.dtype(place.tensor.dtype).itemsize
        widths = self.widths()
        of_place: tuple[int | IntArray, ...] = (place.begin, place.stride, 0)
        if others:
            first_lines = starts_of(np.array([place.num_lines for place in self._places]))
            which = find(first_lines, lines)
            widths = widths[lines]
            of_place = (*np.array([(place.begin, place.stride) for place in self._places])[which].T, first_lines[which])
        begin, stride, first_line = of_place
        frames, number = np.divmod(lines - first_line, size)
        begins: IntArray = begin + frames * stride + (number * widths + offsets) * itemsize
        return begins
