"""Batches: the sequences of a chunk, written as the tensors of frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import wire
from penstock_server.batches.body import Outs, alike_frames, of_one_width
from penstock_server.batches.gather import Chunk, gather
from penstock_server.batches.plan import MAX_BATCH_BYTES, Plan
from penstock_server.batches.sequences import Runs, Sequences, Tokens
from penstock_server.batches.tensor import Tensor
from penstock_server.geometry.order import IntArray
from penstock_server.problems import BadParameter
from penstock_server.storage.block import Block
from penstock_server.storage.pages import Waits

Array = npt.NDArray[Any]
Texts = dict[str, list[bytes]]  # of each column of text or bytes, what travels with each sequence

_waits = Waits()  # of this process, whatever it serves


def frames(chunk: Chunk, blocks: Sequence[Block]) -> bytearray:
    """The frames of a chunk, one behind the other, from the blocks it needs. Raises BadRow: see usable_rows."""
    plan, sequences = chunk.plan, gather(chunk, blocks)
    texts = {tensor.name: _texts(tensor.name, sequences) for tensor in plan.tensors if tensor.is_ragged}
    alike = list(alike_frames(plan.address(chunk.epoch, chunk.rank, 0), chunk.steps, _layouts(plan, sequences, texts)))
    body = bytearray(alike[-1].stop)
    for number, tensor in enumerate(plan.tensors):
        _fill(tensor, Outs(body, [some.out(body, number) for some in alike]), sequences, texts, plan.pad_id)
    num_substituted = iter(sequences.substituted.reshape(len(chunk.steps), -1).sum(axis=1).tolist())
    for some in alike:
        for step, (head, payload) in zip(some.steps, some.cut(memoryview(body)), strict=True):
            head[:] = some.heads.head(step, wire.digest(payload), next(num_substituted))
    return body


def frames_nbytes(plan: Plan, epoch: int, rank: int, steps: range) -> int | None:
    """The length of the frames of these steps, or None where it depends on the rows."""
    if not plan.has_fixed_shapes:
        return None
    layout = plan.largest_layout
    heads = wire.Heads(plan.address(epoch, rank, 0), layout)
    return sum(len(some) * (len(heads.head(some[0])) + layout.nbytes) for some in of_one_width(steps))


def _layouts(plan: Plan, sequences: Sequences, texts: Texts) -> list[wire.Layout]:
    size = plan.spec.batch_size
    num_batches = sequences.count // size
    if plan.has_fixed_shapes:
        return [plan.largest_layout] * num_batches
    widths = [_widths(plan, tensor, sequences, texts) for tensor in plan.tensors]
    made = []
    for batch in zip(*widths, strict=True):
        shapes = [(t.name, t.dtype, t.shape(size, width)) for t, width in zip(plan.tensors, batch, strict=True)]
        made.append(wire.Layout.of(shapes))
    if (nbytes := max(layout.nbytes for layout in made)) > MAX_BATCH_BYTES:
        raise BadParameter(
            f"a batch of these {size:,} sequences and of what travels with them is {nbytes:,} bytes; the limit is "
            f"{MAX_BATCH_BYTES:,}. Lower batch_size, or let fewer columns travel."
        )
    return made


def _widths(plan: Plan, tensor: Tensor, sequences: Sequences, texts: Texts) -> list[int]:
    """The width of a tensor's lines, of each batch."""
    num_batches = sequences.count // plan.spec.batch_size
    if tensor.is_ragged:
        widths = np.array([len(text) for text in texts[tensor.name]]).reshape(num_batches, -1).sum(axis=1)
    elif tensor.kind not in ("tokens", "mask") or plan.has_fixed_widths:
        widths = np.full(num_batches, tensor.longest)
    else:
        longest = sequences.lengths(tensor).reshape(num_batches, -1).max(axis=1)
        multiple = int(plan.spec.pad) if plan.spec.pad.isdigit() else 1
        widths = -(-longest // multiple) * multiple
    of_batches: list[int] = widths.tolist()
    return of_batches


def _fill(tensor: Tensor, outs: Outs, sequences: Sequences, texts: Texts, pad_id: int) -> None:
    """Writes a tensor of every batch."""
    if tensor.kind in ("tokens", "mask"):
        _pad(outs, sequences.lengths(tensor), pad_id if tensor.kind == "tokens" else 0)
        if tensor.kind == "tokens":
            _copy(outs, sequences.runs(tensor), sequences.tokens(tensor.feature))
        else:
            _mark(outs, sequences.runs(tensor))
    elif tensor.is_ragged:
        rest = iter(texts[tensor.name])
        size = sequences.count // sum(map(len, outs.arrays))
        for out in outs.frames():
            wire.pack_texts(list(islice(rest, size)), out)
    else:
        of_kind = {"count": _counts, "starts": _starts, "column": _numbers}
        for array, own in outs.parts(of_kind[tensor.kind](tensor, sequences)):
            array[...] = own.reshape(array.shape)


def _copy(outs: Outs, runs: Runs, tokens: list[Tokens]) -> None:
    out, begins = outs.arrays[0], outs.begins(runs.lines, runs.offsets)
    starts, lengths = runs.starts, runs.lengths
    target: Any = memoryview(outs.body)
    values: list[Any]
    if all(own.dtype == out.dtype for own in tokens):
        # Lines are short, so what counts is what a slice costs: one of bytes takes half of the time of an array's.
        values = [own.view(np.uint8).data for own in tokens]
        starts, lengths = starts * out.itemsize, lengths * out.itemsize
    else:
        target, values, begins = np.frombuffer(outs.body, out.dtype), list(tokens), begins // out.itemsize
    columns = (runs.held, starts, starts + lengths, begins, begins + lengths)
    with _waits.copying(_spans(tokens, runs)):
        for held, start, stop, at, end in zip(*(column.tolist() for column in columns), strict=True):
            target[at:end] = values[held][start:stop]


def _spans(tokens: list[Tokens], runs: Runs) -> Iterator[tuple[int, int]]:
    """Address and bytes of each run."""
    first = np.array([own.ctypes.data for own in tokens])[runs.held]
    size = np.array([own.itemsize for own in tokens])[runs.held]
    yield from zip((first + runs.starts * size).tolist(), (runs.lengths * size).tolist(), strict=True)


def _mark(outs: Outs, runs: Runs) -> None:
    target, begins = np.frombuffer(outs.body, np.uint8), outs.begins(runs.lines, runs.offsets)
    columns = (runs.learned, begins, begins + runs.lengths)
    for learned, at, end in zip(*(column.tolist() for column in columns), strict=True):
        target[at:end] = learned


def _pad(outs: Outs, lengths: IntArray, value: int) -> None:
    """Fills batches that have padding as a whole, before their lines are written: line by line takes several times as long."""
    shortest = lengths.reshape(-1, outs.arrays[0].shape[1]).min(axis=1).tolist()
    for out, length in zip(outs.frames(), shortest, strict=True):
        if length < out.shape[1]:
            out.fill(value)


def _counts(tensor: Tensor, sequences: Sequences) -> Array:
    return sequences.lengths(tensor)


def _starts(tensor: Tensor, sequences: Sequences) -> Array:
    begins = np.zeros((sequences.count, tensor.longest), np.bool_)
    begins[sequences.documents.sequences, sequences.documents.offsets()] = True
    lengths = sequences.lengths(tensor)
    short = np.flatnonzero(lengths < tensor.longest)
    begins[short, lengths[short]] = True
    return np.packbits(begins, axis=1, bitorder="little")


def _numbers(tensor: Tensor, sequences: Sequences) -> Array:
    numbers = np.empty((sequences.count, *tensor.item), tensor.dtype)
    for block, lines, rows in sequences.rows():
        numbers[lines] = block.numbers[tensor.name][rows]
    return numbers


def _texts(name: str, sequences: Sequences) -> list[bytes]:
    found = [b""] * sequences.count
    for block, lines, rows in sequences.rows():
        for line, row in zip(lines.tolist(), rows.tolist(), strict=True):
            found[line] = block.columns[name][row].as_buffer().to_pybytes()
    return found
