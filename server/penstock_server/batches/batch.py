"""Batches: writes the samples of a chunk as the tensors of frames."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import wire
from penstock_server.batches.body import Places, alike_frames, of_one_width
from penstock_server.batches.gather import Chunk, gather
from penstock_server.batches.pieces import Pieces
from penstock_server.batches.plan import MAX_BATCH_BYTES, Plan
from penstock_server.batches.samples import Samples
from penstock_server.batches.tensors import Tensor
from penstock_server.blocks.block import Block
from penstock_server.blocks.mmap_hints import Waits
from penstock_server.blocks.on_demand import PickedRows
from penstock_server.order.arrays import IntArray
from penstock_server.problems import BadParameter

Array = npt.NDArray[Any]
Sizes = dict[str, IntArray]  # bytes per sample of each passthrough column of text or bytes

_waits = Waits()  # shared by all datasets of this process


def frames(chunk: Chunk, blocks: Sequence[Block | PickedRows]) -> memoryview:
    """Returns the concatenated frames of a chunk, from its blocks. Raises what gather raises."""
    plan, samples = chunk.plan, gather(chunk, blocks)
    sizes = {tensor.name: _sizes(tensor.name, samples) for tensor in plan.tensors if tensor.is_ragged}
    alike = list(alike_frames(plan.address(chunk.epoch, chunk.rank), chunk.steps, _layouts(plan, samples, sizes)))
    placed = [(tensor, Places([some.place(number) for some in alike])) for number, tensor in enumerate(plan.tensors)]
    pieces = Pieces()
    for tensor, places in placed:
        if tensor.kind == "tokens":
            _add_tokens(tensor, places, samples, plan.pad_id, pieces)
        elif tensor.kind == "mask":
            _add_ones(tensor, places, samples, pieces)
    with _waits.copying(pieces.spans()):
        body = pieces.join(alike[-1].stop)
    for tensor, places in placed:
        if not tensor.has_lines:
            _write(tensor, places, body, samples)
    num_replaced = iter(samples.replaced.reshape(len(chunk.steps), -1).sum(axis=1).tolist())
    for some in alike:
        some.write_heads(body, num_replaced)
    return body


def frames_nbytes(plan: Plan, epoch: int, rank: int, steps: range) -> int | None:
    """Returns the bytes of the frames of these steps, or None if they depend on the rows."""
    if not plan.has_fixed_shapes:
        return None
    layout = plan.largest_layout
    heads = wire.Heads(plan.address(epoch, rank), layout)
    return sum(len(some) * (len(heads.head(some[0])) + layout.nbytes) for some in of_one_width(steps))


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
            f"a batch of these {size:,} samples and of what travels with them is {nbytes:,} bytes; the limit is "
            f"{MAX_BATCH_BYTES:,}. Lower batch_size, or let fewer columns travel."
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
        for array, own in places.parts(body, of_kind[tensor.kind](tensor, samples)):
            array[...] = own.reshape(array.shape)


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
    found = [b""] * samples.count
    for block, lines, rows in samples.rows():
        for line, row in zip(lines.tolist(), rows.tolist(), strict=True):
            found[line] = block.columns[name][row].as_buffer().to_pybytes()
    return found
