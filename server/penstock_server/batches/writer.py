"""Batches: writes the samples of a chunk as the tensors of frames.

Everything in a body is a piece: the lines of tokens, their padding, and the values of the other tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock import wire
from penstock.wire.layout import DTYPES, TEXTS
from penstock_server.batches.assemble import Chunk, gather
from penstock_server.batches.plan import MAX_BATCH_BYTES, Plan, TensorSpec
from penstock_server.batches.samples import Samples
from penstock_server.blocks.block import Block, ListColumns, joined
from penstock_server.blocks.cache import Waits
from penstock_server.order.arrays import IntArray, in_order
from penstock_server.problems import BadParameter

Array = npt.NDArray[Any]
Sizes = dict[str, IntArray]  # bytes per sample of each passthrough column of text or bytes

_waits = Waits()  # shared by all datasets of this process
_STEP_WIDTHS = (0, 1 << 7, 1 << 8, 1 << 16, 1 << 32, 1 << 64)  # from each of these on, msgpack encodes a step with more bytes
_ZEROS = pa.py_buffer(bytes(1 << 16))
_BYTE = np.dtype(np.uint8)


class Body(NamedTuple):
    """The concatenated frames of a chunk. `num_tokens` is without padding."""

    content: memoryview
    num_tokens: int
    num_replaced: int


def frames(chunk: Chunk, blocks: Sequence[Block]) -> memoryview:
    """Returns the concatenated frames of a chunk, from its blocks. Raises what gather raises."""
    return body_of(chunk, blocks).content


def body_of(chunk: Chunk, blocks: Sequence[Block]) -> Body:
    """Returns the frames of a chunk, and the numbers of what is in them. Raises what gather raises."""
    plan, samples = chunk.plan, gather(chunk, blocks)
    sizes = {tensor.name: _sizes(tensor.name, samples) for tensor in plan.tensors if tensor.is_ragged}
    groups = list(frame_groups(plan.address(chunk.epoch, chunk.rank), chunk.steps, _layouts(plan, samples, sizes)))
    pieces, payloads = Pieces(), np.concatenate([group.payloads for group in groups])
    for number, tensor in enumerate(plan.tensors):
        places = Places.of(groups, payloads, number)
        if tensor.kind == "tokens":
            _add_tokens(tensor, places, samples, plan.pad_id, pieces)
        elif tensor.kind == "mask":
            _add_ones(tensor, places, samples, pieces)
        elif tensor.is_ragged:
            _add_texts(tensor.name, places, samples, sizes[tensor.name], pieces)
        else:
            pieces.put(_values(tensor, samples).astype(tensor.dtype), places.begins)
    with _waits.copying(pieces.spans()):
        body = pieces.join(groups[-1].stop)
    num_replaced = samples.replaced.reshape(len(chunk.steps), -1).sum(axis=1).tolist()
    replaced = iter(num_replaced)
    for group in groups:
        group.write_heads(body, replaced)
    num_tokens = sum(int(samples.runs(tensor).lengths.sum()) for tensor in plan.tensors if tensor.kind == "tokens")
    return Body(body, num_tokens, sum(num_replaced))


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


def _widths(plan: Plan, tensor: TensorSpec, samples: Samples, sizes: Sizes) -> list[int]:
    """Returns the width of a tensor's lines in each batch."""
    num_batches = samples.count // plan.spec.batch_size
    if tensor.is_ragged:
        widths = sizes[tensor.name].reshape(num_batches, -1).sum(axis=1)
    elif not tensor.has_lines or plan.has_fixed_widths:
        widths = np.full(num_batches, tensor.longest)
    else:
        longest = samples.lengths(tensor).reshape(num_batches, -1).max(axis=1)
        multiple = int(plan.spec.pad) if plan.spec.pad.isdigit() else 1
        # The inputs are padded to a multiple. With labels=shifted a sample has a token more than they.
        more = plan.spec.sample_len - plan.spec.seq_len
        widths = -((more - np.maximum(longest, 1 + more)) // multiple) * multiple + more
    of_batches: list[int] = widths.tolist()
    return of_batches


def _add_ones(tensor: TensorSpec, places: Places, samples: Samples, pieces: Pieces) -> None:
    """Adds the ones of a mask, for tokens with loss, in every batch."""
    runs = samples.runs(tensor)
    begins = places.at(runs.lines, runs.offsets)
    pieces.fill(1, np.dtype(tensor.dtype), begins[runs.in_loss], runs.lengths[runs.in_loss])


def _add_tokens(tensor: TensorSpec, places: Places, samples: Samples, pad_id: int, pieces: Pieces) -> None:
    """Adds the lines of a tensor of tokens, and their padding, in every batch."""
    runs, dtype = samples.runs(tensor), np.dtype(tensor.dtype)
    begins = places.at(runs.lines, runs.offsets)
    pieces.copy(samples.tokens(tensor.feature), dtype, begins, runs.blocks, runs.starts, runs.lengths)
    lengths = samples.lengths(tensor)
    missing = np.repeat(places.widths, places.batch_size) - lengths
    if pad_id and missing.any():
        short = np.flatnonzero(missing)
        pieces.fill(pad_id, dtype, places.at(short, lengths[short]), missing[short])


def _add_texts(name: str, places: Places, samples: Samples, sizes: IntArray, pieces: Pieces) -> None:
    """Adds a passthrough column of texts or bytes, in the format of penstock.wire, in every batch."""
    offsets = np.zeros((len(places.begins), places.batch_size + 1), np.int64)
    np.cumsum(sizes.reshape(len(offsets), -1), axis=1, out=offsets[:, 1:])
    pieces.put(offsets, places.begins)
    begins = (places.begins[:, None] + offsets[0].nbytes + offsets[:, :-1]).reshape(-1)
    memory, numbers, starts = list[pa.Buffer](), np.empty_like(begins), np.empty_like(begins)
    for block, lines, rows in samples.rows():
        numbers[lines], starts[lines] = len(memory), block.text_bounds(name, rows)[0]
        memory.append(block.columns[name].buffers()[2] or _ZEROS)
    pieces.copy_bytes(memory, begins, numbers, starts, sizes)


def _values(tensor: TensorSpec, samples: Samples) -> Array:
    """Returns the values of a tensor that has one of fixed size per sample, shape [count, ...]."""
    if tensor.kind == "member":
        return samples.member_numbers
    if tensor.kind == "count":
        return samples.lengths(tensor)
    if tensor.kind == "starts":
        begins = np.zeros((samples.count, tensor.longest), np.bool_)
        begins[samples.begins] = True
        lengths = samples.lengths(tensor)
        short = np.flatnonzero(lengths < tensor.longest)
        begins[short, lengths[short]] = True
        return np.packbits(begins, axis=1, bitorder="little")
    numbers = np.empty((samples.count, *tensor.item), tensor.dtype)
    for block, lines, rows in samples.rows():
        numbers[lines] = block.numbers[tensor.name][rows]
    return numbers


def _sizes(name: str, samples: Samples) -> IntArray:
    sizes = np.zeros(samples.count, np.int64)
    for block, lines, rows in samples.rows():
        starts, stops = block.text_bounds(name, rows)
        sizes[lines] = stops - starts
    return sizes


class FrameRun(NamedTuple):
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
    def payloads(self) -> IntArray:
        """Byte offset of each payload."""
        return np.arange(len(self.steps)) * self.frame_nbytes + (self.start + self.head_nbytes)

    @property
    def stop(self) -> int:
        """Byte offset after the last frame."""
        return self.start + len(self.steps) * self.frame_nbytes

    def write_heads(self, body: memoryview, replaced: Iterator[int]) -> None:
        """Writes each frame's head for the payload in `body`. Keep it short: a statement costs as much as copying a row."""
        frame_nbytes, head_nbytes, head = self.frame_nbytes, self.head_nbytes, self.heads.head
        for step, start in zip(self.steps, range(self.start, self.stop, frame_nbytes), strict=True):
            begin = start + head_nbytes
            body[start:begin] = head(step, wire.digest(body[begin : start + frame_nbytes]), next(replaced))


def frame_groups(address: wire.Address, steps: range, layouts: list[wire.Layout]) -> Iterator[FrameRun]:
    """Yields the frames of some steps of one epoch and rank, in order; usually all share one layout."""
    start = 0
    of_step = dict(zip(steps, layouts, strict=True))
    for part in by_step_width(steps):
        for layout, same in groupby(part, of_step.__getitem__):
            of_group, heads = list(same), wire.Heads(address, layout)
            group_steps = range(of_group[0], of_group[-1] + 1, steps.step)
            group = FrameRun(start, group_steps, heads, layout, len(heads.head(of_group[0])))
            yield group
            start = group.stop


def by_step_width(steps: range) -> Iterator[range]:
    """Splits the steps into parts that a header encodes with the same number of bytes."""
    for low, high in pairwise(_STEP_WIDTHS):
        if part := steps[bisect_left(steps, low) : bisect_left(steps, high)]:
            yield part


class Places(NamedTuple):
    """One tensor in all frames of a body: in frame f it begins at byte begins[f], and has lines of widths[f] elements."""

    begins: IntArray
    widths: IntArray
    batch_size: int
    itemsize: int

    @classmethod
    def of(cls, groups: Sequence[FrameRun], payloads: IntArray, number: int) -> Places:
        """Returns the places of tensor `number` of the layouts, in frames whose payloads begin at these bytes."""
        tensors = [group.layout.tensors[number] for group in groups]
        of_groups = np.array([[tensor.offset for tensor in tensors], [tensor.shape[-1] for tensor in tensors]])
        offsets, widths = np.repeat(of_groups, [len(group.steps) for group in groups], axis=1)
        itemsize = 1 if tensors[0].dtype in TEXTS else DTYPES[tensors[0].dtype].itemsize
        return cls(payloads + offsets, widths, tensors[0].shape[0], itemsize)

    def at(self, lines: IntArray, offsets: IntArray) -> IntArray:
        """Returns the byte offsets in the body of elements offsets[i] of samples lines[i], numbered over all frames."""
        frames, number = np.divmod(lines, self.batch_size)
        begins: IntArray = self.begins[frames] + (number * self.widths[frames] + offsets) * self.itemsize
        return begins


class _Copies(NamedTuple):
    """Copies: bytes [starts[i], starts[i] + nbytes[i]) of memory[numbers[i]] go to byte begins[i] of the body.

    They hold elements of type `there`, which have the type `here` in the body.
    """

    memory: Sequence[pa.Buffer]
    begins: IntArray
    numbers: IntArray
    starts: IntArray
    nbytes: IntArray
    there: np.dtype[Any] = _BYTE
    here: np.dtype[Any] = _BYTE

    def take(self, at: IntArray) -> _Copies:
        """Returns some of the copies."""
        begins, numbers, starts, nbytes = (column[at] for column in self[1:5])
        return _Copies(self.memory, begins, numbers, starts, nbytes, self.there, self.here)

    def cast(self) -> _Copies:
        """Returns the copies from elements that are cast already. Raises IndexError: a copy exceeds its source."""
        if self.there == self.here:
            return self
        starts, lengths = self.starts // self.there.itemsize, self.nbytes // self.there.itemsize
        begins = np.cumsum(lengths) - lengths
        values = np.empty(int(lengths.sum()), self.here)
        for number, begin, start, length in zip(*(c.tolist() for c in (self.numbers, begins, starts, lengths)), strict=True):
            source = np.frombuffer(self.memory[number], self.there)
            if not 0 <= start <= start + length <= len(source):
                raise IndexError("a piece of a body exceeds its source")
            values[begin : begin + length] = source[start : start + length]
        size = self.here.itemsize
        return _Copies([pa.py_buffer(values)], self.begins, np.zeros_like(begins), begins * size, lengths * size)


class Pieces:
    """Pieces of one body, without overlap; uncovered bytes are zero. Each call adds pieces in the order of the body."""

    def __init__(self) -> None:
        self._of_blocks: list[_Copies] = []
        self._made: list[_Copies] = []

    def copy(
        self,
        lists: ListColumns,
        dtype: np.dtype[Any],
        begins: IntArray,
        numbers: IntArray,
        starts: IntArray,
        lengths: IntArray,
    ) -> None:
        """Copies values [starts[i], starts[i] + lengths[i]) of lists[numbers[i]] to byte begins[i], as `dtype`."""
        types = set(lists.dtypes)
        for there in types:
            copies = _Copies(lists.memory, begins, numbers, starts * there.itemsize, lengths * there.itemsize, there, dtype)
            if len(types) > 1:
                copies = copies.take(np.flatnonzero(np.array([other == there for other in lists.dtypes])[numbers]))
            self._of_blocks.append(copies)

    def copy_bytes(
        self, memory: Sequence[pa.Buffer], begins: IntArray, numbers: IntArray, starts: IntArray, nbytes: IntArray
    ) -> None:
        """Copies bytes [starts[i], starts[i] + nbytes[i]) of memory[numbers[i]] to byte begins[i]."""
        self._of_blocks.append(_Copies(memory, begins, numbers, starts, nbytes))

    def put(self, values: Array, begins: IntArray) -> None:
        """Puts an equal part of the values at each of some bytes."""
        nothing = np.zeros_like(begins)
        nbytes = nothing + values.nbytes // len(begins)
        self._made.append(_Copies([pa.py_buffer(values)], begins, nothing, np.cumsum(nbytes) - nbytes, nbytes))

    def fill(self, value: int, dtype: np.dtype[Any], begins: IntArray, lengths: IntArray) -> None:
        """Fills lengths[i] elements at byte begins[i] with a value."""
        values, nothing = np.full(lengths.max(initial=0), value, dtype), np.zeros_like(begins)
        self._made.append(_Copies([pa.py_buffer(values)], begins, nothing, nothing, lengths * dtype.itemsize))

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yields (address, bytes) of each copy from a block."""
        for copies in self._of_blocks:
            addresses = np.array([memory.address for memory in copies.memory])[copies.numbers] + copies.starts
            yield from zip(addresses.tolist(), copies.nbytes.tolist(), strict=True)

    def join(self, nbytes: int) -> memoryview:
        """Returns the body of `nbytes`.

        Raises IndexError: a piece overlaps another or exceeds its source, or the body is longer than 2^31 - 1 bytes.
        """
        memory, tables = list[pa.Buffer](), []
        for copies in (*self._of_blocks, *self._made):
            of_table, begins, numbers, starts, sizes, *_ = copies.cast()
            tables.append((begins, numbers + len(memory), starts, sizes))
            memory += of_table
        begins, numbers, starts, sizes = tables[0] if len(tables) == 1 else in_order(tables)
        # Parts alternate between gap and copy, and end with a gap.
        offsets = np.zeros(2 * len(begins) + 2, np.int64)
        offsets[1:-1:2], offsets[2:-1:2], offsets[-1] = begins, begins + sizes, nbytes
        parts = np.diff(offsets)
        if parts.min() < 0:
            raise IndexError("a piece of a body overlaps another, or exceeds the body")
        sources, firsts = np.full(len(parts), len(memory)), np.zeros(len(parts), np.int64)
        sources[1::2], firsts[1::2] = numbers, starts
        longest = int(parts[::2].max())
        memory.append(_ZEROS if longest <= _ZEROS.size else pa.py_buffer(bytes(longest)))
        nonempty = np.flatnonzero(parts)
        return joined(memory, sources[nonempty], firsts[nonempty], parts[nonempty])
