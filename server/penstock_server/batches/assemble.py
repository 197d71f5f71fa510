"""Assembling: loads the blocks of some batches, replaces bad rows, and cuts the samples from the blocks.

The next good row of the block replaces a bad row; the search wraps at the block's end. If a block has no good row, the rows of
the next block with one replace its rows; the search wraps at the dataset's end and skips blocks without a row of the split. So
the geometry of an epoch does not change, and the row at each position depends only on the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat

import numpy as np

from penstock.wire.names import dataset_path
from penstock_server.batches.member import Member
from penstock_server.batches.plan import MemberSpans, Plan
from penstock_server.batches.samples import LoadedBlock, Samples
from penstock_server.blocks.block import Block
from penstock_server.blocks.store import Asked
from penstock_server.order.arrays import IntArray, by_value, in_order, places_in
from penstock_server.order.packing import STREAM, Spans
from penstock_server.problems import BadRow

_CHUNK_BYTES = 8 << 20  # assembled at a time; more than a few MiB only takes memory
_CHUNK_STORED = 64 << 20  # bytes that its rows take in the shards: without the cache, all are in memory at once
_CHUNK_SPANS = 1 << 17  # likewise: each takes some 300 bytes, however short
_MAX_BLOCKS = 64  # blocks searched for a good row; a longer stretch without one makes the data useless


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
        mapped: list[Block] = []
        for need in self.needs:
            blocks = need.member.blocks.mapped(need.blocks)
            if blocks is None:
                return None
            mapped += blocks
        return mapped

    def request(self) -> list[Asked]:
        """Returns, for all needs, blocks, or futures of blocks; of uncached blocks the needed rows alone are tokenized."""
        requested: list[Asked] = []
        for need in self.needs:
            blocks, spans = need.member.blocks, need.spans
            if spans.rows[0] == STREAM:  # only the block has the offsets of its rows
                requested += blocks.request(need.blocks)
            else:
                requested += blocks.request_rows(need.blocks, spans.blocks, spans.rows, need.member.order_key.split)
        return requested

    def read_ahead(self) -> None:
        """Loads the blocks that the job will need next in the background."""
        self.plan.read_ahead(self.epoch, self.steps[-1])


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
        part = steps[start : start + size]
        yield Chunk(plan, epoch, rank, part, plan.spans(epoch, rank, part))


def load(chunk: Chunk) -> list[Block]:
    """Loads the blocks of a chunk, or the rows that it needs, now. Raises what Blocks.get raises."""
    return [block if isinstance(block, Block) else block.result() for block in chunk.request()]


def gather(chunk: Chunk, blocks: Sequence[Block]) -> Samples:
    """Returns the samples of all batches of a chunk, batch by batch; `blocks` as `load` returns them.

    Raises BadRow: see usable_rows. Raises DatasetInvalid: too many rows are bad.
    """
    count = len(chunk.steps) * chunk.plan.spec.batch_size
    replaced = np.zeros(count, np.bool_)
    loaded: list[LoadedBlock] = []
    parts: list[Spans] = []
    rest = iter(blocks)
    for need in chunk.needs:
        member, indices, spans, needed = need.member, need.blocks, need.spans, list(islice(rest, len(need.blocks)))
        if (split := member.order_key.split) != "all":
            selected = member.blocks.of_split
            needed = [selected(at, block, split) for at, block in zip(indices, needed, strict=True)]
        if member.order_key.replaces_bad_rows and any(block.bad for block in needed):
            by_index = dict(zip(indices, needed, strict=True))
            spans = _with_replacements(need, by_index)
            replaced[spans.samples[(spans.rows != need.spans.rows) | (spans.blocks != need.spans.blocks)]] = True
            indices, needed = map(list, zip(*sorted(by_index.items()), strict=True))
        numbers = len(loaded) + places_in(np.array(indices), spans.blocks)
        spans = spans._replace(rows=_rows_here(spans, dict(zip(indices, needed, strict=True))), blocks=numbers)
        loaded += map(LoadedBlock, repeat(member), repeat(chunk.plan.members.index(member)), indices, needed)
        parts.append(spans)
    return Samples(count, loaded, parts[0] if len(parts) == 1 else Spans(*in_order(parts)), replaced)


def _rows_here(spans: Spans, blocks: Mapping[int, Block]) -> IntArray:
    """Returns the row numbers of spans in the loaded blocks; for picked rows, the numbers among these."""
    if all(block.picked is None for block in blocks.values()):
        return spans.rows
    rows = spans.rows.copy()
    for index, mine in by_value(spans.blocks):
        if (picked := blocks[index].picked) is not None:
            rows[mine] = np.searchsorted(picked, rows[mine])
    return rows


def _with_replacements(need: MemberSpans, blocks: dict[int, Block]) -> Spans:
    """Replaces bad rows in the spans with good ones; adds the blocks of these to `blocks`."""
    # Again: loading these blocks may have found more bad rows than max_bad_share allows.
    need.member.blocks.quarantine.check()
    rows, indices = need.spans.rows.copy(), need.spans.blocks.copy()
    for index, mine in by_value(need.spans.blocks):
        if (block := blocks[index]).bad:
            other, good_block, good_rows = usable_rows(need.member, index, block, need.spans.rows[mine])
            blocks[other], indices[mine], rows[mine] = good_block, other, good_rows
    return need.spans._replace(blocks=indices, rows=rows)


def usable_rows(member: Member, index: int, block: Block, rows: IntArray) -> tuple[int, Block, IntArray]:
    """Returns the rows to serve for rows of block `index`, shape of `rows`, and their block.

    Raises BadRow: one of them is bad, and the recipe does not replace bad rows, or no good row is near.
    """
    bad = [row for row in rows.tolist() if row in block.bad]
    if not bad:
        return index, block, rows
    if member.snapshot.recipe.on_bad_row == "fail":
        raise member.blocks.quarantine.bad_row(block, index, bad[0])
    if block.has_good:
        return index, block, block.replacements[rows]
    for other, neighbour in _neighbours(member, index, 1):
        if neighbour.has_good:
            return other, neighbour, neighbour.replacements[rows % neighbour.num_rows]
    address = member.snapshot.block(index)
    raise BadRow(
        f"{member.snapshot.name}: no row of row group {address.row_group} in {address.shard.path.name} can be used, nor "
        f"any in the row groups after it: there is nothing to serve in its place. GET {dataset_path(member.name)}/quarantine "
        f"lists the rows with the reasons. Repair the shards, or move them out of the folder."
    )


def rows_replaced_by(member: Member, index: int, block: Block, row: int) -> Iterator[tuple[int, IntArray]]:
    """Yields, by block, the rows that a row of block `index` is served for, including itself."""
    if row in block.bad:
        return
    if member.snapshot.recipe.on_bad_row == "fail":
        yield index, np.array([row])
        return
    yield index, np.flatnonzero(block.replacements == row)
    for other, neighbour in _neighbours(member, index, -1):
        if neighbour.has_good:
            return
        yield other, np.flatnonzero(block.replacements[np.arange(neighbour.num_rows) % block.num_rows] == row)


def _neighbours(member: Member, index: int, step: int) -> Iterator[tuple[int, Block]]:
    """Yields the blocks with rows of the split after a block (step 1) or before it (step -1), on the ring of blocks."""
    with_rows = np.flatnonzero(member.index.rows_per_block(member.order_key.split))
    at = int(np.searchsorted(with_rows, index))
    turns = np.arange(1, min(_MAX_BLOCKS, len(with_rows) - 1) + 1)
    for other in with_rows[(at + step * turns) % len(with_rows)].tolist():
        [block] = member.blocks.get([other], member.order_key.split)
        yield other, block
