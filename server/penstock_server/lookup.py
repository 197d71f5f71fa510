"""Look-ups of a row: its content, and the steps of an epoch that show it. The order is invertible, so nothing is searched."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from penstock.text import counted
from penstock_server.batches.assemble import rows_replaced_by
from penstock_server.batches.member import Member
from penstock_server.batches.plan import Plan
from penstock_server.batches.text_view import shown_columns
from penstock_server.blocks.block import Block
from penstock_server.catalog.dataset import OpenSnapshot
from penstock_server.catalog.snapshot import Snapshot
from penstock_server.order.arrays import IntArray
from penstock_server.problems import BadParameter, RowOutOfRange
from penstock_server.schemas.batches import OccurrenceInfo, QuarantineInfo

_MAX_OCCURRENCES = 1000  # in one answer
_MAX_TURNS = 10_000  # likewise; each is an object
_MAX_TOKENS = 1 << 20  # of a row
# Limits on the passes that a mixture's epoch makes over a dataset; each pass is planned to locate the row in it.
_MIN_PASSES, _MAX_PASSES, _MAX_POOLS = 8, 100, 1 << 22


def show_row(opened: OpenSnapshot, row: int) -> dict[str, Any]:
    """Return the fields of RowInfo for a row of a snapshot. Raises RowOutOfRange, and what Blocks.get raises."""
    snapshot = opened.snapshot
    index, stored = _locate(opened.name, snapshot, row)
    [block] = opened.blocks.get([index])
    at = snapshot.block(index)
    facts: dict[str, Any] = {
        "row": row,
        "shard": at.shard.path.name,
        "row_group": at.row_group,
        "row_in_group": at.first_row + stored,
    }
    number = _number(block, stored)
    if number is None:
        assert snapshot.recipe.filter
        return facts | {"filtered_by": f"filter: {snapshot.recipe.filter.text}"}
    if number in block.bad:
        return facts | {"bad": block.bad[number]}
    shard_split = snapshot.split_of_block(index)
    is_held_out = shard_split == "train" and block.is_validation(number, snapshot.validation)
    facts["split"] = "validation" if is_held_out else shard_split
    for name, feature in block.features.items():
        prefix = "" if name == "tokens" else f"{name}_"
        turns = feature.row(number, _MAX_TOKENS)
        ids = [token for turn, _ in turns for token in turn]
        facts |= {f"{prefix}{key}": text for key, text in _text(snapshot, ids).items()}
        if feature.turns:
            facts[f"{prefix}turns"] = [
                {"in_loss": in_loss, "num_tokens": len(turn)} | _text(snapshot, turn) for turn, in_loss in turns[:_MAX_TURNS]
            ]
        facts[f"{prefix}num_tokens"] = int(feature.tokens.lengths[number])
        facts[f"{prefix}num_loss_tokens"] = feature.num_loss_tokens(number)
        facts[f"{prefix}tokens"] = ids
    return facts | ({"columns": shown_columns(block, number)} if block.columns else {})


def show_quarantine(opened: OpenSnapshot, start: int, limit: int) -> QuarantineInfo:
    """Return `limit` known bad rows after the first `start`, and all bad row groups. After counting, all are known."""
    opened.index.lengths.read()  # as `penstock prepare` may have counted
    quarantine = opened.blocks.quarantine
    if opened.index.lengths.is_ready:
        for index in np.flatnonzero(opened.index.lengths.get().per_block("all").bad_rows).tolist():
            if quarantine.is_full:
                break
            if not quarantine.has_met(index):  # a restart forgets reasons, but not where to find them
                opened.blocks.get([index])
    return {
        "num_bad_rows": quarantine.num_bad_rows,
        "complete": opened.index.lengths.is_ready,
        "on_bad_row": opened.snapshot.recipe.on_bad_row,
        "rows": quarantine.rows()[start : start + limit],
        "row_groups": quarantine.groups(),
    }


def find_row(plan: Plan, dataset: str, row: int, epoch: int) -> list[OccurrenceInfo]:
    """Return every place where an epoch shows a row of a dataset or a part of it, in the order of steps; it may be empty.

    An epoch of a mixture may repeat a dataset, even without end: only the first hundred passes count, fewer for a large
    dataset. The answer has at most the first thousand places: a step of many ranks may show a small dataset a million times.

    Raises RowOutOfRange. Raises BadParameter: the dataset is a mixture. Raises what Blocks.get raises.
    """
    names = [member.name for member in plan.members]
    if dataset not in names:
        raise BadParameter(
            f"{dataset} is a mixture; rows belong to its datasets: {', '.join(names)}. Name one of them in the URL, with "
            f"mix={plan.spec.mix}."
        )
    plan.check_epoch(epoch)
    at = names.index(dataset)
    member = plan.members[at]
    index, stored = _locate(dataset, member.snapshot, row)
    [block] = member.blocks.get([index], member.order_key.split)
    number = _number(block, stored)
    if number is None:  # left out by the filter, or of the other split
        return []
    places: list[tuple[int, int, int]] = []
    most = max(_MIN_PASSES, min(_MAX_PASSES, _MAX_POOLS // member.snapshot.num_blocks))
    for own_epoch in islice(plan.own_epochs(at, epoch), most):
        own = _positions(member, block, index, number, own_epoch)
        for position in plan.positions_of(at, epoch, own, own_epoch, _MAX_OCCURRENCES).tolist():
            places += islice(plan.schedule.locate(position), _MAX_OCCURRENCES)
    found = sorted(places)[:_MAX_OCCURRENCES]
    return [{"epoch": epoch, "step": step, "rank": rank, "index": index} for step, rank, index in found]


def _positions(member: Member, block: Block, index: int, row: int, epoch: int) -> IntArray:
    """Return the positions of a row of a block in an epoch of its dataset."""
    packing, order = member.epoch(epoch)
    if member.order_key.replaces_bad_rows:
        places = [(at, number) for at, rows in rows_replaced_by(member, index, block, row) for number in rows.tolist()]
        found = [packing.holding(at, number, 0, 0) for at, number in places]
    else:
        start, stop = block.stream[row : row + 2].tolist()
        found = [packing.holding(index, row, start, stop)] if row not in block.bad else []
    return np.concatenate([np.zeros(0, np.int64), *(order.positions(*samples) for samples in found)])


def _number(block: Block, stored: int) -> int | None:
    """Return the number in the block of the row stored as `stored`; None if the block does not have it."""
    found = np.flatnonzero(block.stored_rows == stored).tolist()
    return found[0] if found else None


def _text(snapshot: Snapshot, ids: list[int]) -> dict[str, str]:
    return {"text": snapshot.recipe.decode(ids)} if snapshot.recipe.tokenizer else {}


def _locate(name: str, snapshot: Snapshot, row: int) -> tuple[int, int]:
    if not 0 <= row < snapshot.num_rows:
        raise RowOutOfRange(
            f"row {row} does not exist: {name} has {counted(snapshot.num_rows, 'row')}, 0 to {snapshot.num_rows - 1}."
        )
    return snapshot.locate(row)
