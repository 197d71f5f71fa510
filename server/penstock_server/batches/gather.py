"""Gathering: loads the blocks of some batches, and cuts the samples from them."""

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

_CHUNK_BYTES = 8 << 20  # assembled at a time; more than a few MiB only takes memory
_CHUNK_STORED = 64 << 20  # bytes of its uncut rows: without the cache, all are in memory
_CHUNK_SPANS = 1 << 17  # likewise: each takes some 300 bytes, however short


@dataclass(frozen=True, slots=True)
class Chunk:
    """Batches of one rank and epoch that are made together."""

    plan: Plan
    epoch: int
    rank: int
    steps: range
    needs: list[MemberSpans]

    def mapped(self) -> list[Block] | None:
        """Returns the blocks of all needs if all are mapped into memory; None otherwise."""
        found: list[Block] = []
        for need in self.needs:
            blocks = need.member.blocks.mapped(need.blocks)
            if blocks is None:
                return None
            found += blocks
        return found

    def request(self) -> list[Asked | RowsFuture]:
        """Returns, for all needs, blocks, futures of blocks, or futures of the needed rows of uncached blocks."""
        return [found for need in self.needs for found in _request(need)]

    def read_ahead(self) -> None:
        """Loads the blocks that the job will need next in the background."""
        self.plan.read_ahead(self.epoch, self.steps[-1])

    def forget(self, futures: Sequence[Future[Any]]) -> None:
        """Releases futures of `request`: blocks without other waiters are not made."""
        self.plan.members[0].blocks.forget(futures)


def steps_per_chunk(plan: Plan) -> int:
    """Returns the number of batches made at a time, at least 1."""
    limits = (_CHUNK_BYTES / plan.step_nbytes, _CHUNK_SPANS / plan.step_spans, _CHUNK_STORED / plan.step_stored)
    return max(1, int(min(limits)))


def chunks(plan: Plan, epoch: int, rank: int, steps: range) -> Iterator[Chunk]:
    """Yields the steps in chunks of a few MiB.

    Raises StepOutOfRange, RankOutOfRange: the epoch has no such batch.
    """
    num_chunks = -(-len(steps) // steps_per_chunk(plan))
    size = -(-len(steps) // num_chunks)  # equal sizes: a short last chunk would cost as much as the others
    for start in range(0, len(steps), size):
        some = steps[start : start + size]
        yield Chunk(plan, epoch, rank, some, plan.spans(epoch, rank, some))


def load(chunk: Chunk) -> Sequence[Block | PickedRows]:
    """Loads the blocks of a chunk, or the rows that it needs, now. Raises what Blocks.get raises."""
    return chunk.mapped() or [found if isinstance(found, Block) else found.result() for found in chunk.request()]


def _request(need: MemberSpans) -> Sequence[Asked | RowsFuture]:
    blocks, spans = need.member.blocks, need.spans
    if spans.rows[0] == STREAM:  # only the block has the offsets of its rows
        return blocks.request(need.blocks)

    def rows() -> dict[int, IntArray]:
        return {index: distinct(spans.rows[mine]) for index, mine in by_value(spans.blocks)}

    return blocks.request_rows(need.blocks, rows, need.member.order_key.split)


def gather(chunk: Chunk, blocks: Sequence[Block | PickedRows]) -> Samples:
    """Returns the samples of all batches of a chunk, batch by batch; `blocks` as `load` returns them.

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
    """Returns the row numbers of spans in the loaded blocks; for PickedRows, the numbers among the picked rows."""
    if all(isinstance(block, Block) for block in blocks.values()):
        return spans.rows
    rows = spans.rows.copy()
    for index, mine in by_value(spans.blocks):
        if isinstance(picked := blocks[index], PickedRows):
            rows[mine] = np.searchsorted(picked.rows, rows[mine])
    return rows


def _with_stand_ins(need: MemberSpans, blocks: dict[int, Block | PickedRows]) -> Spans:
    """Replaces bad rows in the spans with good ones; adds the blocks of these to `blocks`."""
    # Again: loading these blocks may have found more bad rows than max_bad_share allows.
    need.member.blocks.quarantine.check()
    rows, indices = need.spans.rows.copy(), need.spans.blocks.copy()
    for index, mine in by_value(need.spans.blocks):
        if isinstance(own := blocks[index], Block) and own.bad:
            other, block, good = usable_rows(need.member, index, own, need.spans.rows[mine])
            blocks[other], indices[mine], rows[mine] = block, other, good
    return need.spans._replace(blocks=indices, rows=rows)
