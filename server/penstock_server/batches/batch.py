"""Batches: the sequences of a chunk, written as the tensors of frames."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

from penstock import wire
from penstock_server.batches.gather import Chunk, gather
from penstock_server.batches.plan import MAX_BATCH_BYTES, Plan
from penstock_server.batches.sequence import TokenSequence
from penstock_server.geometry.packing import fill, fill_bits, fill_learned
from penstock_server.problems import BadParameter
from penstock_server.storage.block import Block

Texts = dict[str, list[bytes]]  # of each column of text or bytes, what travels with each sequence of a batch

_STEP_WIDTHS = (0, 1 << 7, 1 << 8, 1 << 16, 1 << 32, 1 << 64)  # msgpack spells a step longer from each of these on


def frames(chunk: Chunk, blocks: Sequence[Block]) -> bytearray:
    """The frames of a chunk, one behind the other, from the blocks it needs. Raises BadRow: see Blocks.usable_rows."""
    plan = chunk.plan
    batches = gather(chunk, blocks)
    addresses = [plan.address(chunk.epoch, chunk.rank, step) for step in chunk.steps]
    texts = [_texts(plan, batch) for batch in batches]
    layouts = [_layout(plan, batch, own) for batch, own in zip(batches, texts, strict=True)]
    heads = [len(wire.encode_header(address, layout)) for address, layout in zip(addresses, layouts, strict=True)]
    body = bytearray(sum(heads) + sum(layout.nbytes for layout in layouts))
    view, end = memoryview(body), 0
    for batch, own, address, layout, head in zip(batches, texts, addresses, layouts, heads, strict=True):
        start, end = end + head, end + head + layout.nbytes
        payload = view[start:end]
        _fill(plan, batch, own, layout, payload)
        substituted = sum(sequence.substituted for sequence in batch)
        view[start - head : start] = wire.encode_header(address, layout, wire.digest(payload), substituted)
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
            head = wire.encode_header(plan.address(epoch, rank, alike[0]), layout)
            total += len(alike) * (len(head) + layout.nbytes)
    return total


def _widths(plan: Plan, batch: Sequence[TokenSequence], texts: Texts) -> Iterator[int]:
    """The width of each tensor's lines in a batch."""
    for tensor in plan.tensors:
        if tensor.is_ragged:
            yield sum(map(len, texts[tensor.name]))
        elif tensor.kind not in ("tokens", "mask") or plan.has_fixed_widths:
            yield tensor.longest
        else:
            longest = max(sum(piece.length for piece in sequence.line(tensor)) for sequence in batch)
            multiple = int(plan.spec.pad) if plan.spec.pad.isdigit() else 1
            yield -(-longest // multiple) * multiple


def _layout(plan: Plan, batch: Sequence[TokenSequence], texts: Texts) -> wire.Layout:
    if plan.has_fixed_shapes:
        return plan.largest_layout
    shapes = [t.shape(len(batch), width) for t, width in zip(plan.tensors, _widths(plan, batch, texts), strict=True)]
    layout = wire.Layout.of([(t.name, t.dtype, shape) for t, shape in zip(plan.tensors, shapes, strict=True)])
    if layout.nbytes > MAX_BATCH_BYTES:
        raise BadParameter(
            f"a batch of these {len(batch):,} sequences and of what travels with them is {layout.nbytes:,} bytes; the limit is "
            f"{MAX_BATCH_BYTES:,}. Lower batch_size, or let fewer columns travel."
        )
    return layout


def _fill(plan: Plan, batch: Sequence[TokenSequence], texts: Texts, layout: wire.Layout, payload: memoryview) -> None:
    views = layout.views(payload)
    for tensor in plan.tensors:
        out = views[tensor.name]
        if tensor.kind == "tokens":
            fill(out, [sequence.line(tensor) for sequence in batch], plan.pad_id)
        elif tensor.kind == "mask":
            fill_learned(out, [sequence.line(tensor) for sequence in batch])
        elif tensor.kind == "count":
            out[:] = [sum(piece.length for piece in sequence.line(tensor)) for sequence in batch]
        elif tensor.kind == "starts":
            fill_bits(out, [sequence.document_starts(tensor.longest) for sequence in batch])
        elif tensor.is_ragged:
            wire.pack_texts(texts[tensor.name], out)
        else:
            for line, (block, row) in enumerate(_rows(batch)):
                out[line] = block.numbers[tensor.name][row]


def _texts(plan: Plan, batch: Sequence[TokenSequence]) -> Texts:
    return {
        tensor.name: [block.columns[tensor.name][row].as_buffer().to_pybytes() for block, row in _rows(batch)]
        for tensor in plan.tensors
        if tensor.is_ragged
    }


def _rows(batch: Sequence[TokenSequence]) -> Iterator[tuple[Block, int]]:
    for sequence in batch:
        assert sequence.row  # columns travel with packing=rows only
        yield sequence.row
