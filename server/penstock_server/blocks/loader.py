"""Blocks: the unit of caching, a row group or a part of a very large one. Each is tokenized once, stored and mapped.

Snapshot --read a row group--> rows --encode--> tokens --store--> Block
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import cached_property, partial
from itertools import islice

import numpy as np
import pyarrow as pa

from penstock_server.blocks.block import Block
from penstock_server.blocks.cache import SPARE
from penstock_server.blocks.decode import RowGroupReader
from penstock_server.blocks.quarantine import Quarantine
from penstock_server.blocks.shared import SharedStore
from penstock_server.blocks.store import Asked, BlockStore
from penstock_server.catalog.snapshot import BlockAddress, Snapshot
from penstock_server.machine import map_ordered, num_cores
from penstock_server.monitoring.stages import StageClock
from penstock_server.order.arrays import IntArray, by_value, distinct
from penstock_server.recipes import encode
from penstock_server.recipes.recipe import Rows
from penstock_server.recipes.split import is_validation
from penstock_server.recipes.text import lacks_separator

_LOADED_TOGETHER = 8  # blocks requested at a time in a pass over a dataset
_FIRST_ROWS = 16  # rows checked for a separator between prompt and response
_SAMPLED_BLOCKS, _SAMPLED_ROWS = 4, 64  # blocks, and rows of each, sampled to estimate the bytes of all blocks in the cache
_SMALL_SAMPLE_BYTES = 256 << 10  # smaller samples take whole blocks, since the bytes beside the rows matter then
_MAX_AHEAD = 1 << 12  # blocks passed to read-ahead at a time
_HEAD_BYTES = 1000  # estimated bytes of a stored block beside its rows


class Blocks:
    """The blocks of one snapshot, by their index in it."""

    def __init__(self, snapshot: Snapshot, store: BlockStore) -> None:
        self._snapshot, self._store = snapshot, store
        self._reader = RowGroupReader(snapshot, store.footers)
        self.names, self.cache, self.ahead, self.shared = self._reader.names, store.cache, store.ahead, store.shared
        self.num_threads = store.num_threads
        self.quarantine = Quarantine(snapshot)
        self._correction: float | None = None  # factor on the estimate from the footers; None before `sample`

    def request(self, indices: Sequence[int]) -> list[Asked]:
        """Returns the blocks at these indices in [0, num_blocks), or futures that raise what `get` raises."""
        blocks = self._store.request(self._reader, indices)
        return [self._noted(index, block) for index, block in zip(indices, blocks, strict=True)]

    def request_rows(self, indices: Sequence[int], blocks: IntArray, rows: IntArray, split: str) -> list[Asked]:
        """As `request`, for rows[i] of block blocks[i], or of its split: only these are tokenized if it is not cached."""
        if self._snapshot.recipe.kind == "tokens":  # encoding all rows of ids takes little time beside decoding them
            return self.request(indices)
        mapped = self._store.maps.known([self.names.of(index) for index in indices])
        cold = {index for index, block in zip(indices, mapped, strict=True) if not (block or self.is_stored(index))}
        self._store.metrics.cache_misses.inc(len(cold))
        wanted = {index: distinct(rows[of_block]) for index, of_block in by_value(blocks) if index in cold} if cold else {}
        futures = self._store.rows.request(self._reader, wanted, split)
        stored = iter(self._store.request(self._reader, [index for index in indices if index not in futures]))
        return [self._noted(index, futures.get(index) or next(stored)) for index in indices]

    def mapped(self, indices: Sequence[int]) -> list[Block] | None:
        """Returns the blocks at these indices if all are mapped, or can be mapped without reading; the common case."""
        blocks = [block for block in self._store.maps.known([self.names.of(index) for index in indices]) if block]
        if len(blocks) < len(indices):
            return None
        for index, block in zip(indices, blocks, strict=True):
            if block.bad:  # the block may have been mapped for another snapshot
                self.quarantine.note_block(index, block)
        self._store.metrics.cache_hits.inc(len(blocks))
        return blocks

    def get(self, indices: Sequence[int], split: str = "all") -> list[Block]:
        """Returns the blocks at these indices, with the rows of one split. Raises what RowGroupReader raises."""
        requested = zip(indices, self.request(indices), strict=True)
        return [self.of_split(index, self._wait(index, block), split) for index, block in requested]

    def each(self, indices: Sequence[int]) -> Generator[Block, None, None]:
        """Yields the blocks at these ascending indices. Raises what `get` raises.

        One thread decodes a row group, which may have very many blocks. So up to one row group per core is decoded in
        parallel, if the cache can keep them.
        """
        num_groups = min(num_cores(), self.cache.budget_bytes // max(1, 2 * self._snapshot.largest_group_bytes))
        next_groups = deque(self._snapshot.begins_of_groups(indices))
        requested = dict[int, Asked]()
        for number, index in enumerate(indices):
            while next_groups and next_groups[0] <= index:
                next_groups.popleft()
            ahead = (*indices[number : number + _LOADED_TOGETHER], *islice(next_groups, max(0, num_groups - 1)))
            requested |= {other: self.request([other])[0] for other in ahead if other not in requested}
            yield self._wait(index, requested.pop(index))

    def share(self, shared: SharedStore, group: int) -> Iterator[Block]:
        """Yields the blocks of a row group, each after the shared store has it; one at a time is in memory.

        Raises what RowGroupReader raises, and OSError of the store.
        """
        addresses = [self._snapshot.block(index) for index in self._snapshot.blocks_of_group(group)]
        with closing(self._reader.blocks(addresses[0])) as decoded:

            def make(at: BlockAddress) -> pa.RecordBatch:
                parts = next(parts for other, parts in decoded if other.number == at.number)
                return self._reader.encode_block(parts, at, StageClock("decode"))

            for at in addresses:
                yield self._store.maps.share(shared, self.names.of(at.index), partial(make, at))

    def of_split(self, index: int, block: Block, split: str) -> Block:
        """Returns the rows of one split in the block at an index; picked rows are of the split already."""
        if block.picked is not None:
            return block
        return self._store.splits.of(block, self._snapshot.select_in(index, split), self._snapshot.validation)

    @cached_property
    def lacks_separator(self) -> bool:
        """Whether the prompts and responses of the first rows run together. Raises what `get` raises, and ValueError."""
        recipe = self._snapshot.recipe
        if recipe.kind != "prompt_response" or recipe.transform:
            return False
        with closing(self._reader.blocks(self._snapshot.block(0))) as blocks:
            _, parts = next(blocks)
            rows = Rows(next(parts).rows.slice(0, _FIRST_ROWS), recipe)
            if recipe.encoder:
                return recipe.encoder.lacks_separator(rows.stored.select(recipe.encoded_columns))
            return lacks_separator(rows)

    @property
    def expected_bytes(self) -> IntArray:
        """Estimated bytes of each block in the cache, shape [num_blocks], from the footers: about four bytes per token."""
        corrected: IntArray = (self._bytes_by_footers * (self._correction or 1.0)).astype(np.int64)
        return corrected

    @property
    def _bytes_by_footers(self) -> IntArray:
        snapshot = self._snapshot
        token_bytes = np.dtype(snapshot.token_dtype).itemsize
        nbytes = snapshot.bytes_per_block * token_bytes // 4 if snapshot.recipe.tokenizer else snapshot.bytes_per_block
        with_rows: IntArray = nbytes + snapshot.rows_per_block * encode.bytes_beside(snapshot.recipe) + _HEAD_BYTES
        return with_rows

    def sample(self) -> None:
        """Corrects `expected_bytes` by the bytes of some rows of a few blocks. Raises what `get` raises."""
        if self._correction is not None:
            return
        expected, num_rows = self._bytes_by_footers, self._snapshot.rows_per_block
        # Spread over the dataset: its shards may come from several sources.
        with_rows = np.flatnonzero(num_rows)
        indices = with_rows[np.unique(np.linspace(0, len(with_rows) - 1, _SAMPLED_BLOCKS, dtype=np.int64))]
        # With a filter, the number of rows in a block is unknown, so rows cannot be requested by number.
        if self._snapshot.recipe.filter or self._snapshot.bytes_per_block[indices].sum() <= _SMALL_SAMPLE_BYTES:
            requested = self.request(indices.tolist())
        else:
            rows = np.linspace(0, num_rows[indices] - 1, _SAMPLED_ROWS, dtype=np.int64)
            requested = self.request_rows(indices.tolist(), np.tile(indices, _SAMPLED_ROWS), rows.reshape(-1), "all")
        taken = predicted = 0.0
        for index, asked in zip(indices.tolist(), requested, strict=True):
            block = asked.result() if isinstance(asked, Future) else asked
            taken += block.nbytes
            predicted += expected[index] * (1 if block.picked is None else block.num_rows / num_rows[index])
        self._correction = taken / max(1.0, predicted)

    @cached_property
    def rates(self) -> tuple[float, float]:
        """Measured tokens, and bytes of columns, per second that all threads make into blocks, from some rows of a few blocks.

        Raises what `get` raises.
        """
        with_rows, num_tokens, num_bytes, spent = np.flatnonzero(self._snapshot.rows_per_block), 0.0, 0.0, 0.0
        for index in with_rows[np.unique(np.linspace(0, len(with_rows) - 1, _SAMPLED_BLOCKS, dtype=np.int64))].tolist():
            at, began_at = self._snapshot.block(index), time.perf_counter()
            rows = self._reader.block(at)
            decoding = time.perf_counter() - began_at
            taken = rows.take(np.arange(min(_SAMPLED_ROWS, len(rows.numbers))))
            if not num_tokens:
                self._reader.encode(taken, at)  # not measured: it may start the processes that tokenize
            began_at = time.perf_counter()
            block = Block.of(self._reader.encode(taken, at))
            # All columns are read, be it for few rows that the filter keeps.
            scale = len(rows.numbers) / max(1, len(taken.numbers))
            spent += decoding + scale * (time.perf_counter() - began_at)
            num_tokens += scale * sum(int(feature.tokens.lengths.sum()) for feature in block.features.values())
            num_bytes += float(self._snapshot.bytes_per_block[index])
        return max(1.0, num_tokens / spent * self._store.num_threads), max(1.0, num_bytes / spent * self._store.num_threads)

    def is_stored(self, index: int) -> bool:
        """Returns whether a block is in the cache."""
        return self.cache.has(self.names.of(index))

    def read_ahead(self, job: Hashable, position: int, needed: Sequence[tuple[int, int]], *, by_rows: bool) -> None:
        """Makes the blocks that a job needs next in the background, as far as the cache has room for them.

        `needed` are (block, position that needs it), ascending, after the job's position. With `by_rows`, requests for single
        rows of a block are served until then.
        """
        needed = needed[:_MAX_AHEAD]
        nbytes = self.expected_bytes[[block for block, _ in needed]]
        # Without room for a new block, and for what its eviction frees beside it, these blocks would evict each other.
        room = self.cache.budget_bytes - self.cache.budget_bytes // SPARE - int(nbytes.max(initial=0))
        needed = needed[: int((np.cumsum(nbytes) <= room).sum())]
        self._store.maps.known([self.names.of(block) for block, _ in needed])  # or blocks that wait would look long unused
        self.ahead.want(job, position, needed, self.finish if by_rows else self._load)

    def finish(self, index: int) -> None:
        """Completes a block in the cache; requests may tokenize single rows of it meanwhile."""
        block = None
        if self._snapshot.recipe.kind != "tokens" and not self.is_stored(index):
            block = self._store.rows.finish(self._reader, self._snapshot.block(index))
        if block:
            self.quarantine.note_block(index, block)
        else:
            self._load(index)

    def _load(self, index: int) -> None:
        with self._store.loading_ahead:
            self.get([index])

    def rows_by_hash(self, advance: Callable[[int], None]) -> IntArray:
        """Counts the rows of each block that the hash keeps and holds out, shape [2, num_blocks].

        Reads only the columns that the filter and the split need, if any; shards in parallel. Raises what `get` raises.
        """
        counts, numbers = [], range(len(self._snapshot.shards))
        for shard, of_shard in enumerate(map_ordered(self._store.threads, self._store.num_threads, self._count_rows, numbers)):
            counts.append(of_shard)
            advance(self._snapshot.blocks_of_shard(shard).stop)
        return np.concatenate(counts, axis=1)

    def _count_rows(self, shard: int) -> IntArray:
        indices = self._snapshot.blocks_of_shard(shard)
        counts = np.zeros((2, len(indices)), np.int64)
        for address, hashes in self._reader.split_hashes(shard):
            num_validation = int(is_validation(hashes, self._snapshot.validation).sum())
            counts[:, address.index - indices.start] = len(hashes) - num_validation, num_validation
        return counts

    def _wait(self, index: int, block: Asked) -> Block:
        loaded = block if isinstance(block, Block) else block.result()
        self.quarantine.note_block(index, loaded)  # a waiter may wake before the callback of the future runs
        return loaded

    def _noted(self, index: int, block: Asked) -> Asked:
        """Records the bad rows of a block in the quarantine, as soon as it is loaded; returns `block`."""
        if isinstance(block, Block):
            self.quarantine.note_block(index, block)
        else:
            block.add_done_callback(partial(self.quarantine.note_load, index))
        return block
