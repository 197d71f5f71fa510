"""Batches: the sequences of a chunk, written as the tensors of frames."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import wire
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
_STEP_WIDTHS = (0, 1 << 7, 1 << 8, 1 << 16, 1 << 32, 1 << 64)  # msgpack spells a step longer from each of these on


def frames(chunk: Chunk, blocks: Sequence[Block]) -> bytearray:
    """The frames of a chunk, one behind the other, from the blocks it needs. Raises BadRow: see usable_rows."""
    plan, sequences = chunk.plan, gather(chunk, blocks)
    texts = {tensor.name: _texts(tensor.name, sequences) for tensor in plan.tensors if tensor.is_ragged}
    addresses = [plan.address(chunk.epoch, chunk.rank, step) for step in chunk.steps]
    layouts = _layouts(plan, sequences, texts)
    heads = _heads(addresses, layouts)
    body = bytearray(sum(heads) + sum(layout.nbytes for layout in layouts))
    payloads = list(_payloads(memoryview(body), heads, layouts))
    views = [layout.views(payload) for layout, (_, payload) in zip(layouts, payloads, strict=True)]
    for tensor in plan.tensors:
        _fill(tensor, [view[tensor.name] for view in views], sequences, texts, plan.pad_id)
    num_substituted = sequences.substituted.reshape(len(addresses), -1).sum(axis=1).tolist()
    for address, layout, (head, payload), number in zip(addresses, layouts, payloads, num_substituted, strict=True):
        head[:] = wire.encode_head(address, layout, wire.digest(payload), number)
    return body


def frames_nbytes(plan: Plan, epoch: int, rank: int, steps: range) -> int | None:
    """The length of the frames of these steps, or None where it depends on the rows."""
    if not plan.has_fixed_shapes:
        return None
    layout = plan.largest_layout
    total = 0
    for low, high in pairwise(_STEP_WIDTHS):
        alike = steps[bisect_left(steps, low) : bisect_left(steps, high)]
        if alike:
            head = wire.encode_head(plan.address(epoch, rank, alike[0]), layout)
            total += len(alike) * (len(head) + layout.nbytes)
    return total


def _heads(addresses: list[wire.Address], layouts: list[wire.Layout]) -> list[int]:
    """The length of each header; most of a chunk's are alike."""
    known: dict[tuple[int, int], int] = {}
    heads = []
    for address, layout in zip(addresses, layouts, strict=True):
        alike = (id(layout), bisect_right(_STEP_WIDTHS, address.step))
        if alike not in known:
            known[alike] = len(wire.encode_head(address, layout))
        heads.append(known[alike])
    return heads


def _payloads(body: memoryview, heads: list[int], layouts: list[wire.Layout]) -> Iterator[tuple[memoryview, memoryview]]:
    """Header and payload of each frame in a body."""
    end = 0
    for head, layout in zip(heads, layouts, strict=True):
        start, end = end, end + head + layout.nbytes
        yield body[start : start + head], body[start + head : end]


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


def _fill(tensor: Tensor, outs: list[Array], sequences: Sequences, texts: Texts, pad_id: int) -> None:
    """Writes a tensor of every batch."""
    if tensor.kind in ("tokens", "mask"):
        _pad(outs, sequences.lengths(tensor), pad_id if tensor.kind == "tokens" else 0)
        if tensor.kind == "tokens":
            _copy(outs, sequences.runs(tensor), sequences.tokens(tensor.feature))
        else:
            _mark(outs, sequences.runs(tensor))
    elif tensor.is_ragged:
        size = sequences.count // len(outs)
        for number, out in enumerate(outs):
            wire.pack_texts(texts[tensor.name][number * size : (number + 1) * size], out)
    else:
        of_kind = {"count": _counts, "starts": _starts, "column": _numbers}
        values = of_kind[tensor.kind](tensor, sequences)
        for out, own in zip(outs, values.reshape(len(outs), len(values) // len(outs), *values.shape[1:]), strict=True):
            out[:] = own


def _copy(outs: list[Array], runs: Runs, tokens: list[Tokens]) -> None:
    flats: list[Any] = [out.reshape(-1) for out in outs]
    values: list[Any] = list(tokens)
    batches, targets = _targets(outs, runs)
    starts, lengths = runs.starts, runs.lengths
    if all(own.dtype == outs[0].dtype for own in tokens):
        # Lines are short, so what counts is what a slice costs: one of bytes takes half of the time of an array's.
        flats, values = (_bytes_of(arrays) for arrays in (flats, values))
        starts, lengths, targets = (count * outs[0].itemsize for count in (starts, lengths, targets))
    columns = (batches, runs.held, starts, starts + lengths, targets, targets + lengths)
    with _waits.copying(_spans(tokens, runs)):
        for batch, held, start, stop, at, end in zip(*(column.tolist() for column in columns), strict=True):
            flats[batch][at:end] = values[held][start:stop]


def _spans(tokens: list[Tokens], runs: Runs) -> Iterator[tuple[int, int]]:
    """Address and bytes of each run."""
    first = np.array([own.ctypes.data for own in tokens])[runs.held]
    size = np.array([own.itemsize for own in tokens])[runs.held]
    yield from zip((first + runs.starts * size).tolist(), (runs.lengths * size).tolist(), strict=True)


def _bytes_of(arrays: list[Array]) -> list[memoryview]:
    return [array.view(np.uint8).data for array in arrays]


def _mark(outs: list[Array], runs: Runs) -> None:
    flats = [out.reshape(-1) for out in outs]
    batches, targets = _targets(outs, runs)
    columns = (batches, runs.learned, targets, targets + runs.lengths)
    for batch, learned, at, end in zip(*(column.tolist() for column in columns), strict=True):
        flats[batch][at:end] = learned


def _targets(outs: list[Array], runs: Runs) -> tuple[IntArray, IntArray]:
    """The batch of each run, and where in all of its lines, one behind the other, the run goes."""
    batches, lines = np.divmod(runs.lines, len(outs[0]))
    widths = np.array([out.shape[1] for out in outs])
    return batches, lines * widths[batches] + runs.offsets


def _pad(outs: list[Array], lengths: IntArray, value: int) -> None:
    """Fills batches that have padding as a whole, before their lines are written: line by line takes several times as long."""
    shortest = lengths.reshape(len(outs), -1).min(axis=1).tolist()
    for out, length in zip(outs, shortest, strict=True):
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
