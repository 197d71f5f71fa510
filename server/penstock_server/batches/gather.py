"""Gathering: the blocks that some batches need, and the sequences that are cut from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from penstock_server.batches.member import Member
from penstock_server.batches.plan import Plan
from penstock_server.batches.sequence import Part, TokenSequence
from penstock_server.batches.stand_ins import usable_rows
from penstock_server.geometry.packing import STREAM, Spans, by_value
from penstock_server.storage.block import Block, Cut

_CHUNK_BYTES = 4 << 20  # assembled at a time; beyond a few MiB only memory grows


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


def gather(chunk: Chunk, blocks: Sequence[Block]) -> list[list[TokenSequence]]:
    """The sequences of each batch of a chunk, batch_size each. Raises BadRow: see usable_rows."""
    size = chunk.plan.spec.batch_size
    made = [TokenSequence() for _ in range(len(chunk.steps) * size)]
    rest = iter(blocks)
    for need in chunk.needs:
        split = need.member.order.split
        found = {index: need.member.blocks.of_split(next(rest), split) for index in need.blocks}
        spans = _with_stand_ins(made, need, found) if need.member.order.has_stand_ins else need.spans
        _add(made, need.member, spans, found)
    return [made[start : start + size] for start in range(0, len(made), size)]


def _with_stand_ins(made: list[TokenSequence], need: Need, blocks: dict[int, Block]) -> Spans:
    """The spans with good rows in place of bad ones; the blocks that these are in are added."""
    spans, rows, indices = need.spans, need.spans.rows.copy(), need.spans.blocks.copy()
    for index, mine in by_value(spans.blocks):
        if not blocks[index].bad:
            continue
        indices[mine], block, rows[mine] = usable_rows(need.member, index, blocks[index], spans.rows[mine])
        blocks[int(indices[mine[0]])] = block
    for sequence in spans.sequences[(rows != spans.rows) | (indices != spans.blocks)].tolist():
        made[sequence].substituted = True
    return spans._replace(blocks=indices, rows=rows)


def _add(made: list[TokenSequence], member: Member, spans: Spans, blocks: dict[int, Block]) -> None:
    """Cuts the spans block by block, and adds them to their sequences in their own order."""
    cuts: list[Cut | None] = [None] * len(spans.blocks)
    for index, mine in by_value(spans.blocks):
        rows, starts, stops = (values[mine] for values in (spans.rows, spans.starts, spans.stops))
        # Of one packing all spans are of the stream, or none is.
        found = blocks[index].cut_stream(starts, stops) if rows[0] == STREAM else blocks[index].cut_rows(rows, starts, stops)
        for at, cut in zip(mine.tolist(), found, strict=True):
            cuts[at] = cut
    for sequence, index, row, cut in zip(*(c.tolist() for c in spans[:3]), cuts, strict=True):
        assert cut  # every span is of a block
        line = made[sequence]
        line.parts.append(Part(member, blocks[index], index, cut.start, cut.stop))
        if row != STREAM:
            line.row = (blocks[index], row)
        for name, pieces in cut.pieces.items():
            line.pieces.setdefault(name, []).extend(pieces)
