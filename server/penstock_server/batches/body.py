"""Bodies: offsets of the frames of a chunk, and of each tensor in them. Frames of one layout are placed together."""

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

_STEP_WIDTHS = (0, 1 << 7, 1 << 8, 1 << 16, 1 << 32, 1 << 64)  # from each of these on, msgpack encodes a step with more bytes


class Alike(NamedTuple):
    """Consecutive frames of a body from byte `start` on, with one layout and one head length."""

    start: int
    steps: range
    heads: wire.Heads
    layout: wire.Layout
    head_nbytes: int

    @property
    def frame_nbytes(self) -> int:
        """Bytes per frame."""
        return self.head_nbytes + self.layout.nbytes

    @property
    def stop(self) -> int:
        """Byte offset after the last frame."""
        return self.start + len(self.steps) * self.frame_nbytes

    def place(self, number: int) -> Place:
        """Returns the place of tensor `number` of the layout, in all of these frames."""
        tensor = self.layout.tensors[number]
        return Place(self.start + self.head_nbytes + tensor.offset, self.frame_nbytes, len(self.steps), tensor)

    def write_heads(self, body: memoryview, replaced: Iterator[int]) -> None:
        """Writes each frame's head for the payload in `body`. Keep it short: a statement costs as much as copying a row."""
        frame_nbytes, head_nbytes, head = self.frame_nbytes, self.head_nbytes, self.heads.head
        for step, start in zip(self.steps, range(self.start, self.stop, frame_nbytes), strict=True):
            begin = start + head_nbytes
            body[start:begin] = head(step, wire.digest(body[begin : start + frame_nbytes]), next(replaced))


def alike_frames(address: wire.Address, steps: range, layouts: list[wire.Layout]) -> Iterator[Alike]:
    """Yields the frames of some steps of one epoch and rank, in order; usually all share one layout."""
    start = 0
    of_step = dict(zip(steps, layouts, strict=True))
    for some in of_one_width(steps):
        for layout, alike in groupby(some, of_step.__getitem__):
            own, heads = list(alike), wire.Heads(address, layout)
            found = Alike(start, range(own[0], own[-1] + 1, steps.step), heads, layout, len(heads.head(own[0])))
            yield found
            start = found.stop


def of_one_width(steps: range) -> Iterator[range]:
    """Splits the steps into parts that a header encodes with the same number of bytes."""
    for low, high in pairwise(_STEP_WIDTHS):
        if alike := steps[bisect_left(steps, low) : bisect_left(steps, high)]:
            yield alike


class Place(NamedTuple):
    """A tensor in frames of one layout: it starts at byte `begin` of the body, and then every `stride` bytes."""

    begin: int
    stride: int
    num_frames: int
    tensor: wire.TensorLayout

    @property
    def num_lines(self) -> int:
        """Lines of a tensor of shape [batch_size, ...], in all of these frames."""
        return self.num_frames * self.tensor.shape[0]

    def array(self, body: memoryview) -> Array:
        """Views the tensor in all of these frames, shape [num_frames, batch_size, ...]; [num_frames, nbytes] for texts."""
        return wire.strided(self.tensor, body, self.begin, self.stride, self.num_frames)


class Places:
    """One tensor in all frames of a body."""

    def __init__(self, places: list[Place]) -> None:
        self._places = places

    @property
    def num_frames(self) -> int:
        """Number of frames."""
        return sum(place.num_frames for place in self._places)

    def frames(self, body: memoryview) -> Iterator[Array]:
        """Yields the tensor in each frame, shape [batch_size, ...]; [nbytes] for texts."""
        return chain.from_iterable(place.array(body) for place in self._places)

    def parts(self, body: memoryview, values: Array) -> Iterator[tuple[Array, Array]]:
        """Yields each Place.array with its part of `values`, which has one value per line of all frames; not for texts."""
        first = 0
        for place in self._places:
            last = first + place.num_lines
            yield place.array(body), values[first:last]
            first = last

    def widths(self) -> IntArray:
        """Returns the width of each line of a tensor [batch_size, width], shape [num_lines], or [1] if all are equal."""
        widths = np.array([place.tensor.shape[1] for place in self._places])
        return widths if len(widths) == 1 else np.repeat(widths, [place.num_lines for place in self._places])

    def begins(self, lines: IntArray, offsets: IntArray) -> IntArray:
        """Returns the byte offsets in the body of elements offsets[i] of samples lines[i], numbered over all frames."""
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
