"""Batches: the sequences of a plan, gathered from blocks and written as frames; and where each sequence comes from."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock import wire
from penstock_server.order import IntArray
from penstock_server.packing import Piece, Spans, fill, fill_mask, truncate
from penstock_server.plan import Plan, Tensor
from penstock_server.snapshot import Snapshot
from penstock_server.store import Block

_CHUNK_BYTES = 4 << 20  # assembled at a time; beyond a few MiB only memory grows
_STEP_WIDTHS = (0, 1 << 7, 1 << 8, 1 << 16, 1 << 32, 1 << 64)  # msgpack spells a step longer from each of these on


@dataclass(frozen=True, slots=True)
class Source:
    """The row of a sequence. `row` counts from the start of its row group; [start, stop) are the row's tokens in it."""

    shard: str
    row_group: int
    row: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens [start, stop) of the stream of block `index`; see Block.stream."""

    block: Block
    index: int
    start: int
    stop: int

    def sources(self, snapshot: Snapshot) -> Iterator[Source]:
        """The rows that the part runs over; a bad row has no tokens, so it is none of them."""
        stream, at = self.block.stream, snapshot.block(self.index)
        for row in range(int(np.searchsorted(stream, self.start, side="right")) - 1, self.block.num_rows):
            begin, end = stream[row : row + 2].tolist()
            if begin >= self.stop:
                return
            first, last = max(self.start, begin) - begin, min(self.stop, end) - begin
            if last > first:
                yield Source(at.shard.path.name, at.row_group, at.first_row + row, first, last)


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One line of a batch before it is written: its tokens, still in their blocks, and the parts they come from."""

    pieces: list[Piece]
    parts: list[Part]

    def sources(self, snapshot: Snapshot) -> list[Source]:
        """The rows it is made of."""
        return [source for part in self.parts for source in part.sources(snapshot)]

    def line(self, tensor: Tensor) -> list[Piece]:
        """The pieces that a line of this tensor is made of, or counts."""
        return [piece for piece in self.pieces if piece.feature in tensor.features]

    def num_tokens(self, tensor: Tensor) -> int:
        """The length of a line of this tensor, without padding."""
        return sum(piece.length for piece in self.line(tensor))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some batches of one rank and epoch that are made at a time.

    Part i of their sequences lies in block `needed[place[i]]`; `spans` says which part of it.
    """

    plan: Plan
    epoch: int
    rank: int
    steps: range
    needed: list[int]
    place: IntArray
    spans: Spans

    def request(self) -> list[Future[Block]]:
        """The blocks that are needed, soon; and then, in the background, those that the job will need next."""
        futures = self.plan.blocks.request(self.needed)
        self.plan.read_ahead(self.epoch, self.rank, self.steps[-1])
        return futures


def chunks(plan: Plan, epoch: int, rank: int, steps: range) -> Iterator[Chunk]:
    """The steps in chunks of a few MiB.

    Raises StepOutOfRange, RankOutOfRange: the epoch has no such batch.
    """
    steps_per_chunk = max(1, _CHUNK_BYTES // plan.largest_layout.nbytes)
    for start in range(0, len(steps), steps_per_chunk):
        part = steps[start : start + steps_per_chunk]
        spans = plan.spans(epoch, rank, part)
        needed, place = np.unique(spans.blocks, return_inverse=True)
        yield Chunk(plan, epoch, rank, part, needed.tolist(), place, spans)


def frames(chunk: Chunk, blocks: Sequence[Block]) -> bytearray:
    """The frames of a chunk, one behind the other, from the blocks it needs. Raises BadRow: see Blocks.usable_rows."""
    plan = chunk.plan
    batches = gather(chunk, blocks)
    addresses = [plan.address(chunk.epoch, chunk.rank, step) for step in chunk.steps]
    layouts = [_layout(plan, batch) for batch in batches]
    heads = [len(wire.encode_header(address, layout)) for address, layout in zip(addresses, layouts, strict=True)]
    body = bytearray(sum(heads) + sum(layout.nbytes for layout in layouts))
    view, end = memoryview(body), 0
    for batch, address, layout, head in zip(batches, addresses, layouts, heads, strict=True):
        start, end = end + head, end + head + layout.nbytes
        payload = view[start:end]
        _fill(plan, batch, layout, payload)
        view[start - head : start] = wire.encode_header(address, layout, wire.digest(payload))
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


def gather(chunk: Chunk, blocks: Sequence[Block]) -> list[list[TokenSequence]]:
    """The sequences of each batch of a chunk, batch_size each. Raises BadRow: see Blocks.usable_rows."""
    size = chunk.plan.spec.batch_size
    made = _rows(chunk, blocks) if chunk.plan.spec.packing == "rows" else _slices(chunk, blocks)
    return [made[start : start + size] for start in range(0, len(made), size)]


def _rows(chunk: Chunk, blocks: Sequence[Block]) -> list[TokenSequence]:
    """packing=rows: a row each, cut to length."""
    plan, rows = chunk.plan, chunk.spans.starts.copy()
    for at, (index, block) in enumerate(zip(chunk.needed, blocks, strict=True)):
        mine = chunk.place == at
        rows[mine] = plan.blocks.usable_rows(block, index, rows[mine])
    return [_row(plan, blocks[at], chunk.needed[at], row) for at, row in zip(chunk.place.tolist(), rows.tolist(), strict=True)]


def _row(plan: Plan, block: Block, index: int, row: int) -> TokenSequence:
    spec, pieces, start = plan.spec, block.pieces(row), int(block.stream[row])
    if spec.task == "seq2seq":
        assert spec.target_len  # a plan's spec is resolved
        prompt, response = pieces
        cut = [*truncate([prompt], spec.seq_len), *truncate([response], spec.target_len)]
        length = prompt.length + cut[1].length
    else:
        cut = truncate(pieces, spec.seq_len)
        length = sum(piece.length for piece in cut)
    return TokenSequence(cut, [Part(block, index, start, start + length)])


def _slices(chunk: Chunk, blocks: Sequence[Block]) -> list[TokenSequence]:
    """packing=concat: a slice of the stream each, which may run over rows and blocks."""
    made = [TokenSequence([], []) for _ in range(len(chunk.steps) * chunk.plan.spec.batch_size)]
    spans = (chunk.spans.sequences, chunk.place, chunk.spans.starts, chunk.spans.stops)
    for number, at, start, stop in zip(*(span.tolist() for span in spans), strict=True):
        part = Part(blocks[at], chunk.needed[at], start, stop)
        made[number].parts.append(part)
        made[number].pieces.extend(_pieces(part))
    return made


def _pieces(part: Part) -> Iterator[Piece]:
    block = part.block
    if len(block.features) == 1:  # the stream itself, whatever rows it runs over
        [(name, tokens)] = block.features.items()
        yield Piece(name, tokens.values, part.start, part.stop - part.start)
        return
    first_row = int(np.searchsorted(block.stream, part.start, side="right")) - 1
    last_row = int(np.searchsorted(block.stream, part.stop, side="left"))
    for row in range(first_row, last_row):
        begin = int(block.stream[row])
        yield from _cut(block.pieces(row), part.start - begin, part.stop - begin)


def _cut(pieces: Sequence[Piece], first: int, last: int) -> Iterator[Piece]:
    """Tokens [first, last) of the pieces, one behind the other."""
    for feature, source, start, length in pieces:
        low, high = max(first, 0), min(last, length)
        if high > low:
            yield Piece(feature, source, start + low, high - low)
        first, last = first - length, last - length


def _layout(plan: Plan, batch: Sequence[TokenSequence]) -> wire.Layout:
    if plan.has_fixed_shapes:
        return plan.largest_layout
    widths = [max(sequence.num_tokens(tensor) for sequence in batch) for tensor in plan.tensors]
    shapes = [t.shape(len(batch), width) for t, width in zip(plan.tensors, widths, strict=True)]
    return wire.Layout.of([(t.name, t.dtype, shape) for t, shape in zip(plan.tensors, shapes, strict=True)])


def _fill(plan: Plan, batch: Sequence[TokenSequence], layout: wire.Layout, payload: memoryview) -> None:
    views = layout.views(payload)
    for tensor in plan.tensors:
        out = views[tensor.name]
        if tensor.kind == "tokens":
            fill(out, [sequence.line(tensor) for sequence in batch], plan.snapshot.recipe.pad_id)
        elif tensor.kind == "mask":
            fill_mask(out, [sequence.pieces for sequence in batch], tensor.features)
        else:
            out[:] = [sequence.num_tokens(tensor) for sequence in batch]
