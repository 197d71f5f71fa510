"""Row groups as the blocks of one snapshot: the rows of each block, and the tokens of some of them or of all."""

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
        """The rows that the recipe keeps of each block of a row group, from the group's start.

        Yields (block, rows, whether they are its last). A block whose rows hold very many values comes in several parts.
        `is_needed(number)` is called before each block; blocks for which it returns false are left out.
        """
        snapshot, recipe = self.snapshot, self.snapshot.recipe
        needs_block = False
        with reading(snapshot, address):
            # A transform may look at the rows of a whole block.
            for at, first, rows in rows_of_group(snapshot, address, recipe.read_columns, in_portions=not recipe.transform):
                needs_block = needs_block if first else is_needed(at.number)
                if needs_block:
                    place = Place(at.place.shard, at.place.first_row + first)
                    yield at, Selected.of(rows, recipe, place, first), first + rows.num_rows == at.num_rows

    def encode(self, rows: Selected, address: BlockAddress) -> pa.RecordBatch:
        """The tokens of rows, of blocks with the same `token_bound`; errors name the row group of `address`."""
        with reading(self.snapshot, address):
            return encode.encode(rows, self.snapshot.recipe, self.snapshot.token_dtype, self.token_bound(address))

    def token_bound(self, address: BlockAddress) -> int:
        """Token ids of a block that are not below this make a bad row."""
        return self.snapshot.bound_in(address.shard)

    def blocks(
        self, address: BlockAddress, is_needed: Callable[[int], bool]
    ) -> Generator[tuple[int, pa.RecordBatch], None, None]:
        """The tokens of each block of a row group as (number, tokens), from the group's start; `is_needed` as in `rows`."""
        parts = list[pa.RecordBatch]()
        for at, rows, is_last in self.rows(address, is_needed):
            parts.append(self.encode(rows, at))
            if is_last:
                batch = pa.concat_batches(parts) if len(parts) > 1 else parts[0]
                parts.clear()
                self.warn_of_bad_rows(at, batch)
                yield at.number, batch

    def warn_of_bad_rows(self, address: BlockAddress, batch: pa.RecordBatch) -> None:
        """Logs how many rows of an encoded block cannot be used."""
        reasons = pc.drop_null(batch.column(REASON))
        if len(reasons):
            first = f"the first: {printable(reasons[0].as_py())}"
            policy = self.snapshot.recipe.on_bad_row
            then = "neighbours are served in their place" if policy == "replace" else "batches that hold one fail"
            rows_of = f"{address.shard.path}, row group {address.row_group}"
            log.warning("%s: %s cannot be used (%s); %s", rows_of, counted(len(reasons), "row"), first, then)
