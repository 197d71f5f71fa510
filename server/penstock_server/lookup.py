"""Look-ups from a row: what it holds, and when an epoch shows it. Nothing is searched: the order is invertible."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from penstock_server.held import Served
from penstock_server.plan import Plan
from penstock_server.problems import RowOutOfRange
from penstock_server.snapshot import Snapshot
from penstock_server.store import Block


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One place of an epoch."""

    epoch: int
    step: int
    rank: int
    index: int


def show_row(served: Served, row: int) -> dict[str, Any]:
    """A row of a whole snapshot, counted over all shards in their order: its place, its tokens and its text.

    Raises RowOutOfRange: the dataset has fewer rows. Raises what a block raises that cannot be read.
    """
    snapshot = served.snapshot
    index, row_in_block = _locate(served.name, snapshot, row)
    [block] = served.blocks.get([index])
    at = snapshot.block(index)
    facts: dict[str, Any] = {"row": row, "shard": at.shard.path.name, "row_group": at.row_group}
    facts["row_in_group"] = at.first_row + row_in_block
    if row_in_block in block.bad:
        return facts | {"bad": block.bad[row_in_block]}
    tokenizer = snapshot.recipe.tokenizer
    for name, source, start, length in block.pieces(row_in_block):
        ids = source[start : start + length].tolist()
        if tokenizer:
            facts["text" if name == "tokens" else name] = tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
        facts["tokens" if name == "tokens" else f"{name}_tokens"] = ids
    return facts


def find_row(plan: Plan, row: int, epoch: int) -> list[dict[str, Any]]:
    """Every place at which an epoch shows a row or a part of it, in the order of steps; none if the tail drops it.

    Raises RowOutOfRange: the dataset has fewer rows. Raises what a block raises that cannot be read.
    """
    index, row_in_block = _locate(plan.dataset, plan.snapshot, row)
    [block] = plan.blocks.get([index])
    packing, order = plan.epoch(epoch)
    if plan.spec.packing == "rows":
        # A row also stands where bad rows gave way to it, and a bad row nowhere.
        held = [(number, number + 1) for number in _served_as(plan.snapshot, block, row_in_block)]
    else:
        start, stop = block.stream[row_in_block : row_in_block + 2].tolist()
        held = [(start, stop)] if stop > start else []
    found = []
    for start, stop in held:
        for position in order.positions(*packing.holding(index, start, stop)).tolist():
            found += [Occurrence(epoch, *place) for place in plan.schedule.locate(position)]
    return [asdict(occurrence) for occurrence in sorted(found, key=lambda o: (o.step, o.rank, o.index))]


def _served_as(snapshot: Snapshot, block: Block, row: int) -> list[int]:
    if not block.bad or snapshot.recipe.on_bad_row == "fail":
        return [row]
    if len(block.bad) == block.num_rows:
        return []
    return np.flatnonzero(block.substitutes == row).tolist()


def _locate(name: str, snapshot: Snapshot, row: int) -> tuple[int, int]:
    if not 0 <= row < snapshot.num_rows:
        raise RowOutOfRange(f"row {row} does not exist: {name} has {snapshot.num_rows:,} rows, 0 to {snapshot.num_rows - 1}.")
    return snapshot.locate(row)
