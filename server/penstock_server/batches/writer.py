"""Batches: writes the samples of a chunk as the tensors of frames."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock import wire
from penstock_server.batches.assemble import Chunk, gather
from penstock_server.batches.plan import MAX_BATCH_BYTES, Plan, Tensor
from penstock_server.batches.samples import Samples
from penstock_server.blocks.block import Block
from penstock_server.blocks.columns import ListColumns, joined
from penstock_server.blocks.mmap import Waits
from penstock_server.blocks.on_demand import PickedRows
from penstock_server.order.arrays import IntArray, find, in_order, starts_of
from penstock_server.problems import BadParameter

Array = npt.NDArray[Any]
Sizes = dict[str, IntArray]  # bytes per sample of each passthrough column of text or bytes

_waits = Waits()  # shared by all datasets of this process
_STEP_WIDTHS = (0, 1 << 7, 1 << 8, 1 << 16, 1 << 32, 1 << 64)  # from each of these on, msgpack encodes a step with more bytes
_ZEROS = pa.py_buffer(bytes(1 << 16))  # longer gaps take several pieces


def frames(chunk: Chunk, blocks: Sequence[Block | PickedRows]) -> memoryview:
    """Returns the concatenated frames of a chunk, from its blocks. Raises what gather raises."""
    plan, samples = chunk.plan, gather(chunk, blocks)
    sizes = {tensor.name: _sizes(tensor.name, samples) for tensor in plan.tensors if tensor.is_ragged}
    groups = list(frame_groups(plan.address(chunk.epoch, chunk.rank), chunk.steps, _layouts(plan, samples, sizes)))
    placed = [(tensor, Places([group.place(number) for group in groups])) for number, tensor in enumerate(plan.tensors)]
    pieces = Pieces()
    for tensor, places in placed:
        if tensor.kind == "tokens":
            _add_tokens(tensor, places, samples, plan.pad_id, pieces)
        elif tensor.kind == "mask":
            _add_ones(tensor, places, samples, pieces)
    with _waits.copying(pieces.spans()):
        body = pieces.join(groups[-1].stop)
    for tensor, places in placed:
        if not tensor.has_lines:
            _write(tensor, places, body, samples)
    num_replaced = iter(samples.replaced.reshape(len(chunk.steps), -1).sum(axis=1).tolist())
    for group in groups:
        group.write_heads(body, num_replaced)
    return body


def frames_nbytes(plan: Plan, epoch: int, rank: int, steps: range) -> int | None:
    """Returns the bytes of the frames of these steps, or None if they depend on the rows."""
    if not plan.has_fixed_shapes:
        return None
    layout = plan.largest_layout
    heads = wire.Heads(plan.address(epoch, rank), layout)
    return sum(len(part) * (len(heads.head(part[0])) + layout.nbytes) for part in by_step_width(steps))


def _layouts(plan: Plan, samples: Samples, sizes: Sizes) -> list[wire.Layout]:
    size = plan.spec.batch_size
    num_batches = samples.count // size
    if plan.has_fixed_shapes:
        return [plan.largest_layout] * num_batches
    widths = [_widths(plan, tensor, samples, sizes) for tensor in plan.tensors]
    made = []
    for batch in zip(*widths, strict=True):
        shapes = [(t.name, t.dtype, t.shape(size, width)) for t, width in zip(plan.tensors, batch, strict=True)]
        made.append(wire.Layout.of(shapes))
    if (nbytes := max(layout.nbytes for layout in made)) > MAX_BATCH_BYTES:
        raise BadParameter(
            f"a batch of these {size:,} samples, with its passthrough columns, has {nbytes:,} bytes; the limit is "
            f"{MAX_BATCH_BYTES:,}. Lower batch_size, or pass fewer columns through."
        )
    return made


def _widths(plan: Plan, tensor: Tensor, samples: Samples, sizes: Sizes) -> list[int]:
    """Returns the width of a tensor's lines in each batch."""
    num_batches = samples.count // plan.spec.batch_size
    if tensor.is_ragged:
        widths = sizes[tensor.name].reshape(num_batches, -1).sum(axis=1)
    elif not tensor.has_lines or plan.has_fixed_widths:
        widths = np.full(num_batches, tensor.longest)
    else:
        longest = samples.lengths(tensor).reshape(num_batches, -1).max(axis=1)
        multiple = int(plan.spec.pad) if plan.spec.pad.isdigit() else 1
        widths = -(-longest // multiple) * multiple
    of_batches: list[int] = widths.tolist()
    return of_batches


def _add_ones(tensor: Tensor, places: Places, samples: Samples, pieces: Pieces) -> None:
    """Adds the ones of a mask, for tokens with loss, in every batch."""
    runs = samples.runs(tensor)
    begins = places.begins(runs.lines, runs.offsets)
    pieces.fill(1, np.dtype(tensor.dtype), begins[runs.in_loss], runs.lengths[runs.in_loss])


def _add_tokens(tensor: Tensor, places: Places, samples: Samples, pad_id: int, pieces: Pieces) -> None:
    """Adds the lines of a tensor of tokens, and their padding, in every batch."""
    runs, dtype = samples.runs(tensor), np.dtype(tensor.dtype)
    begins = places.begins(runs.lines, runs.offsets)
    pieces.copy(samples.tokens(tensor.feature), dtype, begins, runs.blocks, runs.starts, runs.lengths)
    lengths = samples.lengths(tensor)
    missing = places.widths() - lengths
    if pad_id and missing.any():
        short = np.flatnonzero(missing)
        pieces.fill(pad_id, dtype, places.begins(short, lengths[short]), missing[short])


def _write(tensor: Tensor, places: Places, body: memoryview, samples: Samples) -> None:
    """Writes a tensor without lines in every batch."""
    if tensor.is_ragged:
        rest = iter(_texts(tensor.name, samples))
        size = samples.count // places.num_frames
        for out in places.frames(body):
            wire.pack_texts(list(islice(rest, size)), out)
    else:
        of_kind = {"count": _counts, "starts": _starts, "member": _members, "column": _numbers}
        for array, values in places.parts(body, of_kind[tensor.kind](tensor, samples)):
            array[...] = values.reshape(array.shape)


def _counts(tensor: Tensor, samples: Samples) -> Array:
    return samples.lengths(tensor)


def _starts(tensor: Tensor, samples: Samples) -> Array:
    begins = np.zeros((samples.count, tensor.longest), np.bool_)
    begins[samples.begins] = True
    lengths = samples.lengths(tensor)
    short = np.flatnonzero(lengths < tensor.longest)
    begins[short, lengths[short]] = True
    return np.packbits(begins, axis=1, bitorder="little")


def _members(_: Tensor, samples: Samples) -> Array:
    return samples.member_numbers


def _numbers(tensor: Tensor, samples: Samples) -> Array:
    numbers = np.empty((samples.count, *tensor.item), tensor.dtype)
    for block, lines, rows in samples.rows():
        numbers[lines] = block.numbers[tensor.name][rows]
    return numbers


def _sizes(name: str, samples: Samples) -> IntArray:
    sizes = np.zeros(samples.count, np.int64)
    for block, lines, rows in samples.rows():
        sizes[lines] = block.text_lengths(name, rows)
    return sizes


def _texts(name: str, samples: Samples) -> list[bytes]:
    texts = [b""] * samples.count
    for block, lines, rows in samples.rows():
        for line, row in zip(lines.tolist(), rows.tolist(), strict=True):
            texts[line] = block.columns[name][row].as_buffer().to_pybytes()
    return texts


class FrameGroup(NamedTuple):
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


def frame_groups(address: wire.Address, steps: range, layouts: list[wire.Layout]) -> Iterator[FrameGroup]:
    """Yields the frames of some steps of one epoch and rank, in order; usually all share one layout."""
    start = 0
    of_step = dict(zip(steps, layouts, strict=True))
    for part in by_step_width(steps):
        for layout, same in groupby(part, of_step.__getitem__):
            of_group, heads = list(same), wire.Heads(address, layout)
            group_steps = range(of_group[0], of_group[-1] + 1, steps.step)
            group = FrameGroup(start, group_steps, heads, layout, len(heads.head(of_group[0])))
            yield group
            start = group.stop


def by_step_width(steps: range) -> Iterator[range]:
    """Splits the steps into parts that a header encodes with the same number of bytes."""
    for low, high in pairwise(_STEP_WIDTHS):
        if part := steps[bisect_left(steps, low) : bisect_left(steps, high)]:
            yield part


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


class _Copies(NamedTuple):
    """Columns of copies: bytes [starts[i], starts[i] + nbytes[i]) of source sources[i] go to byte begins[i] of the body."""

    begins: IntArray
    sources: IntArray
    starts: IntArray
    nbytes: IntArray


class Pieces:
    """Pieces of one body, without overlap; uncovered bytes are zero."""

    def __init__(self) -> None:
        self._memory: list[pa.Buffer] = []  # sources of pieces
        self._types: list[np.dtype[Any]] = []  # element type of each source
        self._types_here: list[np.dtype[Any]] = []  # element type of each source in the body
        self._cast: list[int] = []  # sources with another type in the body
        self._copies: list[_Copies] = []
        self._fills: list[_Copies] = []

    def copy(
        self,
        lists: ListColumns,
        dtype: np.dtype[Any],
        begins: IntArray,
        numbers: IntArray,
        starts: IntArray,
        lengths: IntArray,
    ) -> None:
        """Copies values [starts[i], starts[i] + lengths[i]) of lists[numbers[i]] to byte begins[i], as `dtype`.

        The pieces are in the order of the body.
        """
        size = dtype.itemsize
        self._copies.append(_Copies(begins, numbers + len(self._memory), starts * size, lengths * size))
        self._add(lists.memory, lists.dtypes, dtype)

    def fill(self, value: int, dtype: np.dtype[Any], begins: IntArray, lengths: IntArray) -> None:
        """Fills lengths[i] elements at byte begins[i] with a value. The pieces are in the order of the body."""
        zeros = np.zeros_like(lengths)
        self._fills.append(_Copies(begins, zeros + len(self._memory), zeros, lengths * dtype.itemsize))
        self._add([pa.py_buffer(np.full(lengths.max(initial=0), value, dtype))], [dtype], dtype)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yields (address, bytes) of each copy."""
        addresses = np.array([memory.address for memory in self._memory])
        sizes, sizes_in_body = (np.array([dtype.itemsize for dtype in types]) for types in (self._types, self._types_here))
        for _, sources, starts, nbytes in self._copies:
            firsts, counts = (column // sizes_in_body[sources] * sizes[sources] for column in (starts, nbytes))
            yield from zip((addresses[sources] + firsts).tolist(), counts.tolist(), strict=True)

    def join(self, nbytes: int) -> memoryview:
        """Returns the body of `nbytes`.

        Raises IndexError: a piece overlaps another or exceeds its source, or the body is longer than 2^31 - 1 bytes.
        """
        tables = [*self._copies, *self._fills]
        copies = tables[0] if len(tables) == 1 else _Copies(*in_order(tables))
        sources, starts, sizes = self._with_gaps(copies, nbytes)
        if sizes.min() < 0:
            raise IndexError("a piece of a body overlaps another, or exceeds the body")
        memory = [*self._memory, _ZEROS]
        mine = np.flatnonzero(np.isin(sources, self._cast)) if self._cast else sources[:0]
        if not len(mine):
            return joined(memory, sources, starts, sizes)
        # Leave gaps for cast pieces, since `joined` does not cast.
        spans = zip(*(column[mine].tolist() for column in (sources, np.cumsum(sizes) - sizes, starts, sizes)), strict=True)
        memory.append(pa.py_buffer(bytes(sizes[mine].max())))
        sources[mine], starts[mine] = len(memory) - 1, 0
        body = joined(memory, sources, starts, sizes)
        for source, begin, start, size in spans:
            values, here = np.frombuffer(memory[source], self._types[source]), self._types_here[source]
            first, last = start // here.itemsize, (start + size) // here.itemsize
            if not 0 <= first <= last <= len(values):
                raise IndexError("a piece of a body exceeds its source")
            np.frombuffer(body, here, last - first, begin)[...] = values[first:last]
        return body

    def _add(self, memory: Sequence[pa.Buffer], types: list[np.dtype[Any]], here: np.dtype[Any]) -> None:
        """Adds sources with elements of `types`, which have the type `here` in the body."""
        if types.count(here) < len(types):
            self._cast += [len(self._memory) + number for number, there in enumerate(types) if there != here]
        self._memory += memory
        self._types += types
        self._types_here += [here] * len(memory)

    def _with_gaps(self, copies: _Copies, nbytes: int) -> tuple[IntArray, IntArray, IntArray]:
        """Returns the source, start and bytes of the consecutive parts of a body: copies, and the gaps between them."""
        # Parts alternate between gap and copy, and end with a gap.
        offsets = np.zeros(2 * len(copies.begins) + 2, np.int64)
        offsets[1:-1:2], offsets[2:-1:2], offsets[-1] = copies.begins, copies.begins + copies.nbytes, nbytes
        sizes = offsets[1:] - offsets[:-1]
        sources, starts = np.full(len(sizes), len(self._memory)), np.zeros(len(sizes), np.int64)
        sources[1::2], starts[1::2] = copies.sources, copies.starts
        if sizes[::2].max() > _ZEROS.size:  # empty copies split a long gap
            gaps = zip(offsets[::2].tolist(), offsets[1::2].tolist(), strict=True)
            cuts = np.array([at for first, last in gaps for at in range(first + _ZEROS.size, last, _ZEROS.size)])
            nothing = np.zeros_like(cuts)
            return self._with_gaps(_Copies(*in_order([copies, _Copies(cuts, nothing, nothing, nothing)])), nbytes)
        nonempty = np.flatnonzero(sizes)
        return sources[nonempty], starts[nonempty], sizes[nonempty]
