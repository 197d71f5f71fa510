"""Gathering: the blocks that some batches need, and the samples that are cut from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

import numpy as np

from penstock_server.batches.plan import MemberSpans, Plan
from penstock_server.batches.replacement import usable_rows
from penstock_server.batches.samples import LoadedBlock, Samples
from penstock_server.blocks.block import Block
from penstock_server.blocks.on_demand import PickedRows, RowsFuture
from penstock_server.blocks.store import Asked
from penstock_server.order.arrays import IntArray, by_value, distinct, in_order, places_in
from penstock_server.order.packing import STREAM, Spans

_CHUNK_BYTES = 8 << 20  # assembled at a time; beyond a few MiB only memory grows
_CHUNK_STORED = 64 << 20  # bytes of the rows that it is made of, uncut: where they are not cached, all are in memory
_CHUNK_SPANS = 1 << 17  # likewise: each takes some 300 bytes meanwhile, however short it is


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some batches of one rank and epoch that are made at a time."""

    plan: Plan
    epoch: int
    rank: int
    steps: range
    needs: list[MemberSpans]

    def mapped(self) -> list[Block] | None:
        """The blocks of all needs, if all of them are mapped into memory already."""
        found: list[Block] = []
        for need in self.needs:
            blocks = need.member.blocks.mapped(need.blocks)
            if blocks is None:
                return None
            found += blocks
        return found

    def request(self) -> list[Asked | RowsFuture]:
        """The blocks of all needs, or futures of them, or of the rows that are needed of a block that is not cached."""
        return [found for need in self.needs for found in _request(need)]

    def read_ahead(self) -> None:
        """Has those blocks loaded in the background that the job will need next."""
        self.plan.read_ahead(self.epoch, self.steps[-1])

    def forget(self, futures: Sequence[Future[Any]]) -> None:
        """Gives up futures that `request` gave: blocks that nobody else waits for are not made."""
        self.plan.members[0].blocks.forget(futures)


def steps_per_chunk(plan: Plan) -> int:
    """How many batches are made at a time: one at least."""
    limits = (_CHUNK_BYTES / plan.step_nbytes, _CHUNK_SPANS / plan.step_spans, _CHUNK_STORED / plan.step_stored)
    return max(1, int(min(limits)))


def chunks(plan: Plan, epoch: int, rank: int, steps: range) -> Iterator[Chunk]:
    """The steps in chunks of a few MiB.

    Raises StepOutOfRange, RankOutOfRange: the epoch has no such batch.
    """
    num_chunks = -(-len(steps) // steps_per_chunk(plan))
    size = -(-len(steps) // num_chunks)  # all of one size: a short last one would cost as much as the others
    for start in range(0, len(steps), size):
        some = steps[start : start + size]
        yield Chunk(plan, epoch, rank, some, plan.spans(epoch, rank, some))


def load(chunk: Chunk) -> Sequence[Block | PickedRows]:
    """The blocks of a chunk, or the rows that it needs of them, now. Raises what Blocks.get raises."""
    return chunk.mapped() or [found if isinstance(found, Block) else found.result() for found in chunk.request()]


def _request(need: MemberSpans) -> Sequence[Asked | RowsFuture]:
    blocks, spans = need.member.blocks, need.spans
    if spans.rows[0] == STREAM:  # which rows these are, the block tells
        return blocks.request(need.blocks)

    def rows() -> dict[int, IntArray]:
        return {index: distinct(spans.rows[mine]) for index, mine in by_value(spans.blocks)}

    return blocks.request_rows(need.blocks, rows, need.member.order_key.split)


def gather(chunk: Chunk, blocks: Sequence[Block | PickedRows]) -> Samples:
    """The samples of all batches of a chunk, batch by batch; `blocks` as `load` gives them.

    Raises BadRow: see usable_rows. Raises DatasetInvalid: too many rows are bad.
    """
    count = len(chunk.steps) * chunk.plan.spec.batch_size
    replaced = np.zeros(count, np.bool_)
    loaded: list[LoadedBlock] = []
    parts: list[Spans] = []
    rest = iter(blocks)
    for need in chunk.needs:
        member, indices, spans, own = need.member, need.blocks, need.spans, list(islice(rest, len(need.blocks)))
        if member.order_key.split != "all":
            selected = member.blocks.of_split
            split = member.order_key.split
            own = [selected(at, b, split) if isinstance(b, Block) else b for at, b in zip(indices, own, strict=True)]
        if member.order_key.has_stand_ins and any(isinstance(block, Block) and block.bad for block in own):
            found = dict(zip(indices, own, strict=True))
            spans = _with_stand_ins(need, found)
            replaced[spans.samples[(spans.rows != need.spans.rows) | (spans.blocks != need.spans.blocks)]] = True
            indices, own = map(list, zip(*sorted(found.items()), strict=True))
        numbers = len(loaded) + places_in(np.array(indices), spans.blocks)
        spans = spans._replace(rows=_rows_here(spans, dict(zip(indices, own, strict=True))), blocks=numbers)
        whole = [found if isinstance(found, Block) else found.block for found in own]
        loaded += map(LoadedBlock, repeat(member), repeat(chunk.plan.members.index(member)), indices, whole)
        parts.append(spans)
    return Samples(count, loaded, parts[0] if len(parts) == 1 else Spans(*in_order(parts)), replaced)


def _rows_here(spans: Spans, blocks: Mapping[int, Block | PickedRows]) -> IntArray:
    """The rows of spans by their numbers in what was loaded: of a block of which some rows were picked, among these."""
    if all(isinstance(block, Block) for block in blocks.values()):
        return spans.rows
    rows = spans.rows.copy()
    for index, mine in by_value(spans.blocks):
        if isinstance(picked := blocks[index], PickedRows):
            rows[mine] = np.searchsorted(picked.rows, rows[mine])
    return rows


def _with_stand_ins(need: MemberSpans, blocks: dict[int, Block | PickedRows]) -> Spans:
    """The spans with good rows in place of bad ones; the blocks that these are in are added."""
    # Again: to load these blocks may have shown more bad rows than max_bad_share allows.
    need.member.blocks.quarantine.check()
    rows, indices = need.spans.rows.copy(), need.spans.blocks.copy()
    for index, mine in by_value(need.spans.blocks):
        if isinstance(own := blocks[index], Block) and own.bad:
            other, block, good = usable_rows(need.member, index, own, need.spans.rows[mine])
            blocks[other], indices[mine], rows[mine] = block, other, good
    return need.spans._replace(blocks=indices, rows=rows)
