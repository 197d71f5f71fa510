"""Reader of row groups as blocks of one snapshot: rows of each block, and tokens of some or all rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator

import pyarrow as pa
import pyarrow.compute as pc

from penstock.printable import printable
from penstock.text import counted
from penstock_server.blocks.decode import reading, rows_of_group
from penstock_server.recipes import encode
from penstock_server.recipes.encode import REASON, Selected
from penstock_server.recipes.split_hashes import Place
from penstock_server.snapshots.snapshot import BlockAddress, Snapshot

log = logging.getLogger("penstock.blocks")


class RowGroupReader:
    """Reads the row groups of one snapshot, block by block. Its methods raise what `decode.reading` raises."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    def rows(
        self, address: BlockAddress, is_needed: Callable[[int], bool] = lambda _: True
    ) -> Generator[tuple[BlockAddress, Selected, bool], None, None]:
        """Reads the rows that the recipe keeps, block by block, from the start of a row group.

        Yields (block, rows, whether these are its last). A block whose rows have very many values comes in several parts.
        Calls `is_needed(number)` before each block, and skips the block if the result is false.
        """
        snapshot, recipe = self.snapshot, self.snapshot.recipe
        needs_block = False
        with reading(snapshot, address):
            # A transform may need all rows of a block.
            for at, first, rows in rows_of_group(snapshot, address, recipe.read_columns, in_portions=not recipe.transform):
                needs_block = needs_block if first else is_needed(at.number)
                if needs_block:
                    place = Place(at.place.shard, at.place.first_row + first)
                    yield at, Selected.of(rows, recipe, place, first), first + rows.num_rows == at.num_rows

    def encode(self, rows: Selected, address: BlockAddress) -> pa.RecordBatch:
        """Encodes rows of blocks with the same `token_bound`; errors name the row group of `address`."""
        with reading(self.snapshot, address):
            return encode.encode(rows, self.snapshot.recipe, self.snapshot.token_dtype, self.token_bound(address))

    def token_bound(self, address: BlockAddress) -> int:
        """Returns the exclusive upper bound of token ids in a block; larger ids make a row bad."""
        return self.snapshot.bound_in(address.shard)

    def blocks(
        self, address: BlockAddress, is_needed: Callable[[int], bool]
    ) -> Generator[tuple[int, pa.RecordBatch], None, None]:
        """Yields (number, tokens) of each block of a row group, from the group's start; `is_needed` as in `rows`."""
        parts = list[pa.RecordBatch]()
        for at, rows, is_last in self.rows(address, is_needed):
            parts.append(self.encode(rows, at))
            if is_last:
                batch = pa.concat_batches(parts) if len(parts) > 1 else parts[0]
                parts.clear()
                self.warn_of_bad_rows(at, batch)
                yield at.number, batch

    def warn_of_bad_rows(self, address: BlockAddress, batch: pa.RecordBatch) -> None:
        """Logs the number of unusable rows of an encoded block."""
        reasons = pc.drop_null(batch.column(REASON))
        if len(reasons):
            first = f"the first: {printable(reasons[0].as_py())}"
            policy = self.snapshot.recipe.on_bad_row
            then = "neighbours are served in their place" if policy == "replace" else "batches that hold one fail"
            rows_of = f"{address.shard.path}, row group {address.row_group}"
            log.warning("%s: %s cannot be used (%s); %s", rows_of, counted(len(reasons), "row"), first, then)
