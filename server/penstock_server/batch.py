"""Batches: the sequences of a plan, gathered from blocks and written as frames; and where each sequence comes from."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock import wire
from penstock_server.blocks import Block
from penstock_server.order import IntArray
from penstock_server.packing import Piece, fill, truncate
from penstock_server.plan import Plan, Tensor

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
class TokenSequence:
    """One line of a batch before it is written: the tokens of each feature, cut to length, still in their block."""

    features: dict[str, Piece]
    source: Source

    def pieces(self, tensor: Tensor) -> list[Piece]:
        """What a line of this tensor is made of."""
        return [self.features[name] for name in tensor.features]

    def num_tokens(self, tensor: Tensor) -> int:
        """The length of a line of this tensor, without padding."""
        return sum(piece.length for piece in self.pieces(tensor))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some batches of one rank and epoch that are made at a time.

    Sequence i of them is row `rows[i]` of block `needed[place[i]]`.
    """

    plan: Plan
    epoch: int
    rank: int
    steps: range
    needed: list[int]
    place: IntArray
    rows: IntArray

    def request(self) -> list[Future[Block]]:
        """The blocks that are needed, soon."""
        return self.plan.blocks.request(self.needed)


def chunks(plan: Plan, epoch: int, rank: int, steps: range) -> Iterator[Chunk]:
    """The steps in chunks of a few MiB.

    Raises StepOutOfRange, RankOutOfRange: the epoch has no such batch.
    """
    steps_per_chunk = max(1, _CHUNK_BYTES // plan.largest_layout.nbytes)
    for start in range(0, len(steps), steps_per_chunk):
        part = steps[start : start + steps_per_chunk]
        blocks, rows = plan.sequences(epoch, rank, part)
        needed, place = np.unique(blocks, return_inverse=True)
        yield Chunk(plan, epoch, rank, part, needed.tolist(), place, rows)


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
    if plan.spec.pad != "seq_len":
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
    plan, rows = chunk.plan, chunk.rows.copy()
    for at, (index, block) in enumerate(zip(chunk.needed, blocks, strict=True)):
        mine = chunk.place == at
        rows[mine] = plan.blocks.usable_rows(block, index, rows[mine])
    sequences = [
        _sequence(plan, blocks[at], chunk.needed[at], row) for at, row in zip(chunk.place.tolist(), rows.tolist(), strict=True)
    ]
    size = plan.spec.batch_size
    return [sequences[start : start + size] for start in range(0, len(sequences), size)]


def _sequence(plan: Plan, block: Block, index: int, row: int) -> TokenSequence:
    whole = {}
    for name, tokens in block.features.items():
        start, stop = tokens.offsets[row : row + 2].tolist()
        whole[name] = Piece(tokens.values, start, stop - start)
    spec = plan.spec
    if spec.task == "seq2seq":
        assert spec.target_len  # a plan's spec is resolved
        [prompt], [response] = (
            truncate([whole["prompt"]], spec.seq_len),
            truncate([whole["response"]], spec.target_len),
        )
        cut = {"prompt": prompt, "response": response}
        stop = whole["prompt"].length + response.length
    else:
        cut = dict(zip(whole, truncate(list(whole.values()), spec.seq_len), strict=True))
        stop = sum(piece.length for piece in cut.values())
    at = plan.snapshot.block(index)
    return TokenSequence(cut, Source(at.shard.path.name, at.row_group, row, 0, stop))


def _layout(plan: Plan, batch: Sequence[TokenSequence]) -> wire.Layout:
    if plan.spec.pad == "seq_len":
        return plan.largest_layout
    widths = [max(sequence.num_tokens(tensor) for sequence in batch) for tensor in plan.tensors]
    shapes = [t.shape(len(batch), width) for t, width in zip(plan.tensors, widths, strict=True)]
    return wire.Layout.of([(t.name, t.dtype, shape) for t, shape in zip(plan.tensors, shapes, strict=True)])


def _fill(plan: Plan, batch: Sequence[TokenSequence], layout: wire.Layout, payload: memoryview) -> None:
    views = layout.views(payload)
    for tensor in plan.tensors:
        if tensor.longest is None:
            views[tensor.name][:] = [sequence.num_tokens(tensor) for sequence in batch]
        else:
            lines = [sequence.pieces(tensor) for sequence in batch]
            fill(views[tensor.name], lines, plan.snapshot.recipe.pad_id)
