"""Batches: the sequences of a plan, gathered from blocks and written as frames; and where each sequence comes from."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock import wire
from penstock_server.batches.member import Member
from penstock_server.batches.plan import MAX_BATCH_BYTES, Plan
from penstock_server.batches.tensor import Tensor
from penstock_server.geometry.order import IntArray
from penstock_server.geometry.packing import STREAM, Piece, Spans, fill, fill_bits, fill_learned
from penstock_server.problems import BadParameter
from penstock_server.storage.block import Block

Texts = dict[str, list[bytes]]  # of each column of text or bytes, what travels with each sequence of a batch

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


class Part(NamedTuple):
    """Tokens [start, stop) of the stream of block `block_index` of a member; see Block.stream."""

    member: Member
    block: Block
    block_index: int
    start: int
    stop: int

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """The rows that the part runs over, each with its tokens [first, last) in it; a bad row has none."""
        stream = self.block.stream
        for row in range(int(np.searchsorted(stream, self.start, side="right")) - 1, self.block.num_rows):
            begin, end = stream[row : row + 2].tolist()
            if begin >= self.stop:
                return
            first, last = max(self.start, begin) - begin, min(self.stop, end) - begin
            if last > first:
                yield row, first, last

    def sources(self) -> Iterator[Source]:
        """Its rows, as they lie in the shard."""
        at = self.member.snapshot.block(self.block_index)
        for row, first, last in self.rows():
            number = at.first_row + int(self.block.rows[row])
            yield Source(at.shard.path.name, at.row_group, number, first, last)


@dataclass(slots=True)
class TokenSequence:
    """One line of a batch before it is written: its tokens, still in their blocks, and the parts they come from.

    pieces       of each feature
    row          block and row whose columns travel; None where a sequence is made of several rows
    substituted  whether it stands in for a row that cannot be used
    """

    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    row: tuple[Block, int] | None = None
    substituted: bool = False

    def line(self, tensor: Tensor) -> list[Piece]:
        """The pieces that a line of this tensor is made of, or counts."""
        pieces = self.pieces.get(tensor.feature, [])
        if tensor.turn:
            pieces = [piece for piece in pieces if piece.learned == (tensor.turn == "response")]
            # Spans are cut already, but a turn of them has a length of its own.
            return _cut(pieces, tensor.longest) if tensor.longest else pieces
        return pieces

    def document_starts(self, width: int) -> list[int]:
        """Where in its tokens a document begins, or the rest of one, and where the padding does."""
        starts, end = [], 0
        for part in self.parts:
            for _, first, last in part.rows():
                starts.append(end)
                end += last - first
        return [*starts, end] if end < width else starts


@dataclass(frozen=True, slots=True)
class Need:
    """What a chunk takes from one member: the blocks, and the spans of its sequences in them."""

    member: Member
    blocks: list[int]
    spans: Spans


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some batches of one rank and epoch that are made at a time."""

    plan: Plan
    epoch: int
    rank: int
    steps: range
    needs: list[Need]

    def request(self) -> list[Future[Block]]:
        """The blocks of all needs, soon; and then, in the background, those that the job will need next."""
        futures = [future for need in self.needs for future in need.member.blocks.request(need.blocks)]
        self.plan.read_ahead(self.epoch, self.rank, self.steps[-1])
        return futures

    def forget(self, futures: list[Future[Block]]) -> None:
        """Gives up what `request` gave: blocks that nobody else waits for are not made."""
        self.plan.members[0].blocks.forget(future for future in futures if not future.done())


def chunks(plan: Plan, epoch: int, rank: int, steps: range) -> Iterator[Chunk]:
    """The steps in chunks of a few MiB.

    Raises StepOutOfRange, RankOutOfRange: the epoch has no such batch.
    """
    steps_per_chunk = max(1, _CHUNK_BYTES // plan.step_nbytes)
    for start in range(0, len(steps), steps_per_chunk):
        some = steps[start : start + steps_per_chunk]
        needs = [
            Need(plan.members[found.member], np.unique(found.spans.blocks).tolist(), found.spans)
            for found in plan.spans(epoch, rank, some)
        ]
        yield Chunk(plan, epoch, rank, some, needs)


def load(chunk: Chunk) -> list[Block]:
    """The blocks of a chunk, now. Raises what Blocks.get raises."""
    return [block for need in chunk.needs for block in need.member.blocks.get(need.blocks)]


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


def gather(chunk: Chunk, blocks: Sequence[Block]) -> list[list[TokenSequence]]:
    """The sequences of each batch of a chunk, batch_size each. Raises BadRow: see Blocks.usable_rows."""
    size = chunk.plan.spec.batch_size
    made = [TokenSequence() for _ in range(len(chunk.steps) * size)]
    rest = iter(blocks)
    for need in chunk.needs:
        split = need.member.order.split
        found = {index: need.member.blocks.of_split(next(rest), split) for index in need.blocks}
        if need.member.order.packing == "rows" and need.member.order.long_rows == "truncate":
            _add_rows(made, need, found)
        else:
            _add_parts(made, need, found)
    return [made[start : start + size] for start in range(0, len(made), size)]


def _add_rows(made: list[TokenSequence], need: Need, blocks: dict[int, Block]) -> None:
    """A row each, or the row that stands in for it, cut to length."""
    spans, rows = need.spans, need.spans.rows.copy()
    for index, block in blocks.items():
        if not block.bad:
            continue
        mine = spans.blocks == index
        rows[mine] = need.member.blocks.usable_rows(block, index, rows[mine])
    for sequence in spans.sequences[rows != spans.rows].tolist():
        made[sequence].substituted = True
    by_block = np.argsort(spans.blocks, kind="stable")
    for mine in np.split(by_block, np.flatnonzero(np.diff(spans.blocks[by_block])) + 1):
        index = int(spans.blocks[mine[0]])
        _add(made, need, blocks[index], index, *(values[mine] for values in (spans.sequences, rows, spans.starts, spans.stops)))


def _add_parts(made: list[TokenSequence], need: Need, blocks: dict[int, Block]) -> None:
    """Parts of rows, or of a block's stream, which may run over rows, in their order."""
    for sequence, index, row, start, stop in zip(*(column.tolist() for column in need.spans), strict=True):
        block = blocks[index]
        if row != STREAM:
            _add(made, need, block, index, *(np.array([value]) for value in (sequence, row, start, stop)))
            continue
        [name] = block.features
        made[sequence].parts.append(Part(need.member, block, index, start, stop))
        made[sequence].pieces.setdefault(name, []).extend(block.pieces(start, stop))


def _add(made: list[TokenSequence], need: Need, block: Block, index: int, *spans: IntArray) -> None:
    """Adds spans of one block: sequences, rows, starts and stops; tokens [start, stop) of a row, cut at its end."""
    sequences, rows, starts, stops = spans
    begins, ends = block.stream[rows], np.minimum(stops, block.row_lengths[rows])
    cuts = {name: feature.cut(rows, starts, stops) for name, feature in block.features.items()}
    columns = (sequences, rows, begins + starts, begins + ends)
    for number, (sequence, row, start, stop) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        line = made[sequence]
        line.parts.append(Part(need.member, block, index, start, stop))
        line.row = (block, row)
        for name, pieces in cuts.items():
            line.pieces.setdefault(name, []).extend(pieces[number])


def _cut(pieces: Sequence[Piece], longest: int) -> list[Piece]:
    """The first `longest` tokens of the pieces, one behind the other."""
    kept, room = [], longest
    for piece in pieces:
        if room <= 0:
            break
        kept.append(piece if piece.length <= room else piece._replace(length=room))
        room -= piece.length
    return kept


def _widths(plan: Plan, batch: Sequence[TokenSequence], texts: Texts) -> Iterator[int]:
    """The width of each tensor's lines in a batch."""
    for tensor in plan.tensors:
        if tensor.is_ragged:
            yield sum(map(len, texts[tensor.name]))
        elif tensor.kind not in ("tokens", "mask") or plan.spec.pad == "seq_len" or plan.spec.packing != "rows":
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
