"""Blocks: the unit of caching, a row group or a part of a very large one. Each is tokenized once, stored and mapped.

Snapshot --read a row group--> rows --encode--> tokens --store--> Block
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from penstock_server.blocks.block import Block
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.decode import BlockNames, RowGroupReader, first_rows, hashes_of_shard
from penstock_server.blocks.on_demand import PickedRows, RowsFuture
from penstock_server.blocks.quarantine import Quarantine
from penstock_server.blocks.store import Asked, BlockStore
from penstock_server.catalog.snapshot import Snapshot
from penstock_server.machine import num_cores
from penstock_server.order.arrays import IntArray
from penstock_server.recipes import encode
from penstock_server.recipes.recipe import Rows
from penstock_server.recipes.split import is_validation
from penstock_server.recipes.text import have_bare_borders

_Found = TypeVar("_Found", Asked, "Asked | RowsFuture")

_LOADED_TOGETHER = 8  # blocks requested at a time in a pass over a dataset
_KNOWN_NAMES = 1 << 15  # names of blocks; computing one takes longer than copying a row
_FIRST_ROWS = 16  # rows checked for a separator between prompt and response
_LOOKED_AT, _LOOKED_AT_ROWS = 4, 64  # blocks, and rows of each, sampled to estimate the bytes of all blocks in the cache
_LOOKED_AT_BYTES = 256 << 10  # bytes of text; smaller samples take whole blocks, since the bytes beside the rows matter then
_MAX_AHEAD = 1 << 12  # blocks passed to read-ahead at a time
_HEAD_BYTES = 1000  # estimated bytes of a stored block beside its rows


class Blocks:
    """The blocks of one snapshot, by their index in it."""

    def __init__(self, snapshot: Snapshot, store: BlockStore) -> None:
        self._snapshot = snapshot
        self._store = store
        self.quarantine = Quarantine(snapshot)
        self.names = BlockNames(snapshot)
        self._reader = RowGroupReader(snapshot)
        self._known_name = lru_cache(_KNOWN_NAMES)(self.names.of)
        self._correction: float | None = None  # factor on the estimate from the footers; None before `look`

    def request(self, indices: Sequence[int]) -> list[Asked]:
        """Returns the blocks at these indices in [0, num_blocks), or futures that raise what `get` raises."""
        known = self._store.maps.known([self._known_name(index) for index in indices])
        return [self._noted(index, block or self._ask(index)) for index, block in zip(indices, known, strict=True)]

    def request_rows(
        self, indices: Sequence[int], rows: Callable[[], Mapping[int, IntArray]], split: str
    ) -> list[Asked | RowsFuture]:
        """As `request`, for some rows of each block: only these are tokenized if the block is not cached.

        `rows()` returns their numbers in each block, or in its split, ascending.
        """
        names = {index: self._known_name(index) for index in indices}
        known = dict(zip(indices, self._store.maps.known([*names.values()]), strict=True))
        cold = [index for index, block in known.items() if block is None and not self._store.cache.has(names[index])]
        if self._snapshot.recipe.tokenizer is None:  # encoding all rows of ids takes little time beside decoding them
            cold = []
        futures = dict[int, RowsFuture]()
        if cold:
            wanted = rows()
            futures = self._store.rows.request(self._reader, names, {index: wanted[index] for index in cold}, split)
        return [self._noted(index, futures.get(index) or block or self._ask(index)) for index, block in known.items()]

    def mapped(self, indices: Sequence[int]) -> list[Block] | None:
        """Returns the blocks at these indices if all are mapped, or can be mapped without reading; the common case."""
        blocks = [block for block in self._store.maps.known([self._known_name(index) for index in indices]) if block]
        if len(blocks) < len(indices):
            return None
        for index, block in zip(indices, blocks, strict=True):
            if block.bad:  # the block may have been mapped for another snapshot
                self.quarantine.look_in(index, block)
        return blocks

    def get(self, indices: Sequence[int], split: str = "all") -> list[Block]:
        """Returns the blocks at these indices in [0, num_blocks), with the rows of one split.

        Raises ShardUnreadable: a shard cannot be decoded.  Raises ShardUnavailable, OutOfMemory: a retry may succeed.
        Raises SnapshotGone: a shard is no longer the file whose footer was read.
        """
        asked = zip(indices, self.request(indices), strict=True)
        return [self.of_split(index, self._wait(index, found), split) for index, found in asked]

    def each(self, indices: Sequence[int]) -> Generator[Block, None, None]:
        """Yields the blocks at these ascending indices. Raises what `get` raises.

        One thread decodes a row group, which may have very many blocks. So it decodes up to one row group per core in
        parallel, if the cache can keep them.
        """
        num_groups = min(num_cores(), self.cache.budget_bytes // max(1, 2 * self._snapshot.largest_group_bytes))
        next_groups = deque(self._snapshot.begins_of_groups(indices))
        asked = dict[int, Asked]()
        try:
            for number, index in enumerate(indices):
                while next_groups and next_groups[0] <= index:
                    next_groups.popleft()
                for wanted in (*indices[number : number + _LOADED_TOGETHER], *islice(next_groups, max(0, num_groups - 1))):
                    if wanted not in asked:
                        [asked[wanted]] = self.request([wanted])
                yield self._wait(index, asked.pop(index))
        finally:
            self.forget(found for found in asked.values() if isinstance(found, Future))

    def forget(self, futures: Iterable[Future[Any]]) -> None:
        """Releases futures, of any snapshot, since all share one store; see BlockStore.forget."""
        for future in futures:
            if isinstance(future, RowsFuture):
                future.cancel()
            else:
                self._store.forget(future)

    def of_split(self, index: int, block: Block, split: str) -> Block:
        """Returns the rows of one split in the block at an index."""
        return self._store.splits.of(block, self._snapshot.select_in(index, split), self._snapshot.validation)

    @property
    def expected_bytes(self) -> IntArray:
        """Estimated bytes of each block in the cache, shape [num_blocks], from the footers: about four bytes per token.

        Index.bytes_per_block returns exact bytes after counting.
        """
        corrected: IntArray = (self._bytes_by_footers * (self._correction or 1.0)).astype(np.int64)
        return corrected

    @property
    def _bytes_by_footers(self) -> IntArray:
        snapshot = self._snapshot
        token_bytes = np.dtype(snapshot.token_dtype).itemsize
        nbytes = snapshot.bytes_per_block * token_bytes // 4 if snapshot.recipe.tokenizer else snapshot.bytes_per_block
        found: IntArray = nbytes + snapshot.rows_per_block * encode.bytes_beside(snapshot.recipe) + _HEAD_BYTES
        return found

    def look(self) -> None:
        """Corrects `expected_bytes` by the bytes of some rows of a few blocks. Raises what `get` raises."""
        if self._correction is not None:
            return
        expected = self._bytes_by_footers
        # Spread over the dataset: its shards may come from several sources.
        looked_at: list[int] = np.unique(np.linspace(0, len(expected) - 1, _LOOKED_AT, dtype=np.int64)).tolist()
        num_rows = self._snapshot.rows_per_block

        def some_rows() -> dict[int, IntArray]:
            spread = {i: np.linspace(0, num_rows[i] - 1, _LOOKED_AT_ROWS, dtype=np.int64) for i in looked_at}
            return {i: np.unique(rows[rows >= 0]) for i, rows in spread.items()}

        # With a filter, the number of rows in a block is unknown, so rows cannot be requested by number.
        is_small = int(self._snapshot.bytes_per_block[looked_at].sum()) <= _LOOKED_AT_BYTES
        is_whole = is_small or self._snapshot.recipe.filter is not None
        asked = self.request(looked_at) if is_whole else self.request_rows(looked_at, some_rows, "all")
        taken = predicted = 0.0
        for index, found in zip(looked_at, asked, strict=True):
            picked = found.result() if isinstance(found, Future) else found
            block = picked.block if isinstance(picked, PickedRows) else picked
            taken += block.nbytes
            predicted += expected[index] * (block.num_rows / max(1, num_rows[index]) if isinstance(picked, PickedRows) else 1.0)
        self._correction = taken / max(1.0, predicted)

    @cached_property
    def have_bare_borders(self) -> bool:
        """Whether the prompts and responses of the first rows run together.

        Raises what `get` raises. Raises ValueError: the tokenizer fails.
        """
        recipe = self._snapshot.recipe
        if recipe.kind != "prompt_response" or recipe.transform:
            return False
        return have_bare_borders(Rows.of(first_rows(self._snapshot, _FIRST_ROWS), recipe))

    @property
    def cache(self) -> CacheFolder:
        """Cache folder with the blocks of all datasets."""
        return self._store.cache

    def is_stored(self, index: int) -> bool:
        """Returns whether a block is in the cache."""
        return self._store.cache.has(self.names.of(index))

    def read_ahead(
        self, job: Hashable, position: int, count: int, ahead: Callable[[], list[tuple[int, int]]], *, by_rows: bool
    ) -> None:
        """Makes the blocks that a job needs next in the background; see ReadAhead.want.

        `ahead()` returns (block, position that needs it) after the job's position, exact for `count` positions. Blocks that the
        cache has no room for are skipped. `by_rows`: until then the job requests single rows of a block.
        """

        def affordable() -> list[tuple[int, int]]:
            wanted = ahead()[:_MAX_AHEAD]
            fits = np.cumsum(self.expected_bytes[[block for block, _ in wanted]]) <= self._store.cache.budget_bytes
            return wanted[: int(fits.sum())]

        self._store.ahead.want(job, position, count, affordable, self._finish if by_rows else self._load)

    def _finish(self, index: int) -> None:
        """Completes a block in the cache; requests may tokenize single rows of it meanwhile."""
        name = self._known_name(index)
        if (
            self._snapshot.recipe.tokenizer is None
            or self._store.cache.has(name)
            or not (block := self._store.rows.finish(self._reader, self._snapshot.block(index), name))
        ):
            self._load(index)
        else:
            self.quarantine.look_in(index, block)

    def _load(self, index: int) -> None:
        with self._store.loading_ahead:
            self.get([index])

    def rows_of_shards(self, get_further: Callable[[], None] = lambda: None) -> Iterator[IntArray]:
        """Yields, by shard, the rows of each block that the hash keeps and holds out, shape [2, blocks of the shard].

        Reads only the columns that the filter and the split need, if any, and calls `get_further` after each block.
        Raises what `get` raises.
        """
        return self._store.map_ordered(partial(self._count_rows, get_further), range(len(self._snapshot.shards)))

    def _count_rows(self, get_further: Callable[[], None], shard: int) -> IntArray:
        indices = self._snapshot.blocks_of_shard(shard)
        counts = np.zeros((2, len(indices)), np.int64)
        for address, hashes in hashes_of_shard(self._snapshot, shard):
            num_validation = int(is_validation(hashes, self._snapshot.validation).sum())
            counts[:, address.index - indices.start] = len(hashes) - num_validation, num_validation
            get_further()
        return counts

    def _wait(self, index: int, found: Asked) -> Block:
        block = found if isinstance(found, Block) else found.result()
        self.quarantine.look_in(index, block)  # a waiter may wake before the callback of the future runs
        return block

    def _ask(self, index: int) -> Asked:
        at = self._snapshot.block(index)
        return self._store.request(self.names.of_group(at), at.number, partial(self._reader.blocks, at))

    def _noted(self, index: int, found: _Found) -> _Found:
        """Records the bad rows of a block in the quarantine, as soon as it is loaded; returns `found`."""
        if isinstance(found, Block):
            self.quarantine.look_in(index, found)
        else:
            found.add_done_callback(partial(self.quarantine.look_at, index))
        return found
