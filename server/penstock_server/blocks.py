"""Blocks: the unit of caching, a row group or a part of a very large one. Each is tokenized once, stored and mapped.

    Snapshot --read a row group--> rows --encode--> tokens --store--> Block

A block's name in the store is a hash of all that its tokens depend on, so a changed shard or recipe finds no old block.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Hashable, Iterable
from concurrent.futures import Future
from errno import ESTALE
from functools import partial
from hashlib import blake2b

import pyarrow as pa
import pyarrow.parquet as pq

from penstock_server import encode
from penstock_server.order import IntArray
from penstock_server.problems import BadRow, ShardUnavailable, ShardUnreadable, SnapshotGone
from penstock_server.shard import Shard, date_of, shard_changed
from penstock_server.snapshot import BlockAddress, Snapshot
from penstock_server.store import Block, BlockStore

log = logging.getLogger("penstock.blocks")

EncodedBlocks = Generator[tuple[int, pa.RecordBatch], None, None]

_FORMAT = 1  # of the stored blocks: a change here rebuilds them


class Blocks:
    """The blocks of one snapshot, by their index in it."""

    def __init__(self, snapshot: Snapshot, store: BlockStore) -> None:
        self._snapshot = snapshot
        self._store = store
        self._identity = json.dumps(
            [_FORMAT, snapshot.recipe.identity, snapshot.token_dtype, snapshot.token_bound], sort_keys=True
        )

    @property
    def identity(self) -> str:
        """A name for the tokens of all blocks: they depend on nothing else."""
        shards = [_identity_of(shard) for shard in self._snapshot.shards]
        return blake2b(json.dumps([shards, self._identity]).encode(), digest_size=16).hexdigest()

    def request(self, indices: Iterable[int]) -> list[Future[Block]]:
        """The blocks at these indices, each in [0, num_blocks), soon. The futures raise what `get` raises."""
        addresses = [self._snapshot.block(index) for index in indices]
        return [self._store.request(self._keys(at), at.number, partial(self._read, at)) for at in addresses]

    def get(self, indices: Iterable[int]) -> list[Block]:
        """The blocks at these indices, each in [0, num_blocks).

        Raises ShardUnreadable: a shard cannot be decoded.  Raises ShardUnavailable: its storage fails.
        Raises SnapshotGone: a shard is no longer the one whose footer was read.
        """
        return [future.result() for future in self.request(indices)]

    def read_ahead(self, job: Hashable, window: int, indices: Callable[[], list[int]]) -> None:
        """Has blocks loaded in the background that a job needs next; see ReadAhead.want."""

        def affordable() -> list[int]:
            wanted = indices()
            nbytes = sum(self._snapshot.block(index).nbytes for index in wanted)
            # As large again is what the job needs now: loading both into less room would evict the one for the other.
            return wanted if 2 * nbytes <= self._store.cache.budget_bytes else []

        self._store.ahead.want(job, window, affordable, lambda index: self.get([index]))

    def usable_rows(self, block: Block, index: int, rows: IntArray) -> IntArray:
        """The rows to serve for these rows of block `index`: themselves, or neighbours where the recipe substitutes.

        Raises BadRow: a row cannot be used and the recipe does not substitute, or the block has no usable row at all.
        """
        bad = [row for row in rows.tolist() if row in block.bad] if block.bad else []
        if not bad:
            return rows
        if len(block.bad) == block.num_rows or self._snapshot.recipe.on_bad_row == "fail":
            raise self._bad_row(block, index, bad[0])
        return block.substitutes[rows]

    def check_bad_rows(self, block: Block, index: int) -> None:
        """Raises BadRow: block `index` has one, and the recipe does not allow to do without it."""
        if block.bad and self._snapshot.recipe.on_bad_row == "fail":
            raise self._bad_row(block, index, min(block.bad))

    def _bad_row(self, block: Block, index: int, row: int) -> BadRow:
        address, name = self._snapshot.block(index), self._snapshot.folder.name
        place = f"row {address.first_row + row} of row group {address.row_group} in {address.shard.path.name}"
        first = f"{name}: {place} {block.bad[row]}"
        if len(block.bad) == block.num_rows:
            return BadRow(f"{first}, and so is every one of the {block.num_rows:,} rows beside it. Mend the shard.")
        return BadRow(
            f"{first}; {len(block.bad):,} of the {block.num_rows:,} rows beside it cannot be used. Mend the shard, or "
            f'set on_bad_row = "substitute" in {self._snapshot.folder / "penstock.toml"} to serve a neighbour in '
            f"place of each: that changes no other batch, so a run can go on where it stopped."
        )

    def _keys(self, address: BlockAddress) -> list[str]:
        """The names in the cache of all blocks of the row group that a block is of."""
        parts = [*_identity_of(address.shard), address.row_group, address.rows_per_block, self._identity]
        group = blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
        return [f"{group}-{number}" for number in range(len(self._snapshot.blocks_of_group(address.group)))]

    def _read(self, address: BlockAddress, needed: Callable[[int], bool]) -> EncodedBlocks:
        """Decodes and encodes the blocks of a row group, one at a time, from its start."""
        try:
            yield from self._decode(address, needed)
        except OSError as error:
            if error.errno is None:  # pyarrow's word for a damaged file, too
                raise self._unreadable(address, error) from error
            raise ShardUnavailable(
                f"{self._snapshot.folder.name}: {address.shard.path} cannot be read now: {error.strerror}. The client tries "
                f"again; if it stays so, mend the storage or its permissions."
            ) from error
        except (pa.ArrowException, ValueError) as error:
            raise self._unreadable(address, error) from error

    def _decode(self, address: BlockAddress, needed: Callable[[int], bool]) -> EncodedBlocks:
        shard, snapshot = address.shard, self._snapshot
        opened = date_of(shard)
        if shard_changed(shard):
            raise SnapshotGone(
                f"snapshot {snapshot.fingerprint} is gone: {shard.path.name} changed since the server read it. Put the old "
                f"file back, or restart the server and begin a new run."
            )
        expected = [int(snapshot.rows_per_block[index]) for index in snapshot.blocks_of_group(address.group)]
        # Page by page: a row group of gigabytes must not be in memory as a whole.
        with pq.ParquetFile(shard.path, buffer_size=1 << 20, pre_buffer=False) as file:
            batches = file.iter_batches(address.rows_per_block, [address.row_group], list(snapshot.recipe.columns))
            for number, num_rows in enumerate(expected):
                batch = next(batches, None)
                rows = file.schema_arrow.empty_table() if batch is None else pa.Table.from_batches([batch])
                if rows.num_rows != num_rows:
                    raise ValueError(f"block {number} has {rows.num_rows} rows, not {num_rows}")
                if needed(number):
                    rows.validate()
                    if date_of(shard) != opened:  # rewritten in place: what was just read may be of either file
                        raise OSError(ESTALE, "it is being written to")
                    yield number, self._encode(address, rows)

    def _encode(self, address: BlockAddress, rows: pa.Table) -> pa.RecordBatch:
        snapshot = self._snapshot
        batch = encode.encode(rows, snapshot.recipe, snapshot.token_dtype, snapshot.token_bound)
        num_bad = batch.num_rows - batch.column(encode.REASON).null_count
        if num_bad:
            policy = snapshot.recipe.on_bad_row
            then = "neighbours are served in their place" if policy == "substitute" else "batches that hold one fail"
            log.warning("%s, row group %d: %d rows cannot be used; %s", address.shard.path, address.row_group, num_bad, then)
        return batch

    def _unreadable(self, address: BlockAddress, error: Exception) -> ShardUnreadable:
        reason = " ".join(str(error).split()).rstrip(".")
        return ShardUnreadable(
            f"{self._snapshot.folder.name}: row group {address.row_group} of {address.shard.path.name} cannot be read: "
            f"{reason}. Batches that need it fail until the shard is mended; move it out of the folder to train without it."
        )


def _identity_of(shard: Shard) -> list[str | int]:
    # By path and date too: the shard's digest is of samples.
    return [str(shard.path.absolute()), shard.size_bytes, shard.mtime_ns, shard.digest]
