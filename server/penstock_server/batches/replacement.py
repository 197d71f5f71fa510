"""Replacement: maps a bad row to the good row served in its place, and the inverse.

The next good row of the block replaces a bad row; the search wraps at the block's end. If a block has no good row, the rows of
the next block with one replace its rows; the search wraps at the dataset's end and skips blocks without a row of the split. So
the geometry of an epoch does not change, and the row at each position depends only on the data.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.urls import dataset_path
from penstock_server.batches.member import Member
from penstock_server.blocks.block import Block
from penstock_server.order.arrays import IntArray
from penstock_server.problems import BadRow

_MAX_BLOCKS = 64  # blocks searched for a good row; a longer stretch without one makes the data useless


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
    for other in _neighbours(member, index, 1):
        found = _of_split(member, other)
        if found.has_good:
            return other, found, found.replacements[rows % found.num_rows]
    address = member.snapshot.block(index)
    raise BadRow(
        f"{member.snapshot.name}: no row of row group {address.row_group} in {address.shard.path.name} can be used, nor "
        f"any in the row groups after it: there is nothing to serve in its place. GET {dataset_path(member.name)}/quarantine "
        f"lists the rows with the reasons; mend the shards, or move them out of the folder."
    )


def stands_for(member: Member, index: int, block: Block, row: int) -> Iterator[tuple[int, IntArray]]:
    """Yields, by block, the rows that a row of block `index` is served for, including itself."""
    if row in block.bad:
        return
    if member.snapshot.recipe.on_bad_row == "fail":
        yield index, np.array([row])
        return
    yield index, np.flatnonzero(block.replacements == row)
    for other in _neighbours(member, index, -1):
        found = _of_split(member, other)
        if found.has_good:
            return
        yield other, np.flatnonzero(block.replacements[np.arange(found.num_rows) % block.num_rows] == row)


def _neighbours(member: Member, index: int, step: int) -> list[int]:
    """Returns the blocks with rows of the split after a block (step 1) or before it (step -1), on the ring of blocks."""
    with_rows = np.flatnonzero(member.index.rows_per_block(member.order_key.split))
    at = int(np.searchsorted(with_rows, index))
    turns = np.arange(1, min(_MAX_BLOCKS, len(with_rows) - 1) + 1)
    neighbours: list[int] = with_rows[(at + step * turns) % len(with_rows)].tolist()
    return neighbours


def _of_split(member: Member, index: int) -> Block:
    [block] = member.blocks.get([index], member.order_key.split)
    return block
