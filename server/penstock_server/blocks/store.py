"""Block store: maps cached blocks of tokens and decodes the others, once for all callers.

request   returns a mapped block at once; otherwise a future, shared by all callers
_find     a thread maps a stored block, or has its row group decoded
_decode   a thread decodes a row group, stores its blocks, and resolves their futures, including those requested meanwhile
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from penstock_server.blocks.block import Block
from penstock_server.blocks.cache import CacheFolder, Maps
from penstock_server.blocks.decode import ParsedFooters, RowGroupReader
from penstock_server.blocks.on_demand import BlockFuture, RowsOnDemand
from penstock_server.blocks.read_ahead import ReadAhead
from penstock_server.blocks.shared import SharedStore
from penstock_server.catalog.snapshot import BlockAddress
from penstock_server.machine import num_cores
from penstock_server.monitoring.metrics import Metrics
from penstock_server.monitoring.stages import StageClock
from penstock_server.problems import OutOfMemory
from penstock_server.recipes.encoders import Encoders
from penstock_server.recipes.split import Selection
from penstock_server.sources.registry import Sources

log = logging.getLogger("penstock.blocks")

DECODED_BYTES = 1 << 30  # default budget for rows that are decoded and wait to be tokenized
_AHEAD_SHARE = 2  # one thread in two loads ahead, at least one; the others serve requests
_MAPPERS = 4  # threads that serve requests; mapping reads the block, and a disk is faster with several readers
_SPLIT_BYTES = 256 << 20
_MIN_SPLIT_BYTES = 4096  # of Python objects per split

# A requested block: the block if it is mapped, else a future. A future takes 1.4 KB; many clients request tens of thousands.
Asked = Block | BlockFuture
_SplitKey = tuple[int, Selection, float]


@dataclass(slots=True, weakref_slot=True)
class _RowGroup:
    """Requested blocks of a row group, by number; it lives as long as a thread serves them."""

    futures: dict[int, BlockFuture] = field(default_factory=dict)
    is_decoding: bool = False
    clock: StageClock = field(default_factory=lambda: StageClock("read"))


class BlockStore:
    """Blocks of all datasets: those in the cache folder, and those mapped into memory now.

    One thread decodes a row group for all callers. Threads decode different row groups in parallel; pyarrow and `tokenizers`
    release the GIL. Raises OSError: the cache folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        budget_bytes: int | None = None,
        num_threads: int | None = None,
        decoded_bytes: int = DECODED_BYTES,
        shared: Path | str | None = None,
    ) -> None:
        self.metrics = Metrics()
        self.cache = CacheFolder(folder, budget_bytes, self.metrics)
        self.shared = SharedStore(shared, self.metrics) if shared else None
        self.maps = Maps(self.cache, self.shared)
        self.splits = Splits()
        self.footers = ParsedFooters()
        self.encoders = Encoders()
        self.sources = Sources(folder, self.metrics)
        self.num_threads = num_threads or num_cores()
        self.rows = RowsOnDemand(self.maps, decoded_bytes, self.num_threads)
        self.ahead = ReadAhead(self.num_threads)
        num_ahead = max(1, self.num_threads // _AHEAD_SHARE)
        self.loading_ahead = threading.Semaphore(num_ahead)  # for whole blocks that no request waits for
        self._mappers = ThreadPoolExecutor(_MAPPERS + num_ahead, thread_name_prefix="penstock-map")
        self.threads = ThreadPoolExecutor(self.num_threads, thread_name_prefix="penstock-blocks")
        self._lock = threading.Lock()
        self._groups = weakref.WeakValueDictionary[str, _RowGroup]()  # by name

    def request(self, reader: RowGroupReader, indices: Sequence[int]) -> list[Asked]:
        """Returns blocks of the reader's snapshot, or futures for those that are not mapped.

        A future raises what RowGroupReader raises; the next request retries. The neighbours of a block are made, too, if the
        cache can keep them, since a row group is decoded from its start.
        """
        mapped = self.maps.known([reader.names.of(index) for index in indices])
        self.metrics.cache_hits.inc(len(mapped) - mapped.count(None))
        return [block or self._future(reader, index) for index, block in zip(indices, mapped, strict=True)]

    def close(self) -> None:
        """Cancels the loads that have not begun."""
        self._mappers.shutdown(wait=False, cancel_futures=True)
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.rows.close()
        self.encoders.close()
        self.sources.close()
        if self.shared:
            self.shared.close()

    def _future(self, reader: RowGroupReader, index: int) -> BlockFuture:
        at = reader.snapshot.block(index)
        with self._lock:
            group = self._groups.setdefault(reader.names.of_group(at), _RowGroup())
            if at.number not in group.futures:
                self._mappers.submit(self._find, reader, at, group)  # first: it raises if no thread can be started
                group.futures[at.number] = BlockFuture(at, group.clock)
            return group.futures[at.number]

    def _find(self, reader: RowGroupReader, at: BlockAddress, group: _RowGroup) -> None:
        """Maps a stored block; has its row group decoded otherwise."""
        with self._failing(group, [at.number]):
            if self._map(reader, at, group):
                self.metrics.cache_hits.inc()
                return
            self.metrics.cache_misses.inc()
            with self._lock:
                if at.number in group.futures and not group.is_decoding:
                    self.threads.submit(self._decode, reader, at, group)
                    group.is_decoding = True
                    group.clock.enter("decode")

    def _decode(self, reader: RowGroupReader, first: BlockAddress, group: _RowGroup) -> None:
        """Makes the requested blocks of a row group, including those requested meanwhile, and resolves every future."""
        while wanted := self._wanted(group):
            with self._failing(group, wanted):
                self._make(reader, first, group, wanted)
        group.clock.enter("read")
        if len(self._groups) == 1:
            pa.default_memory_pool().release_unused()  # the buffers of decoding; until now decoding reused them

    @contextmanager
    def _observed(self, dataset: str, clock: StageClock) -> Iterator[None]:
        """Adds the time that a row group takes to the metrics."""
        before = clock.seconds()
        try:
            yield
        finally:
            after = clock.seconds()
            for stage, histogram in (("decode", self.metrics.decode_seconds), ("tokenize", self.metrics.tokenize_seconds)):
                if spent := after.get(stage, 0.0) - before.get(stage, 0.0):
                    histogram.labels(dataset).observe(spent)

    def _make(self, reader: RowGroupReader, first: BlockAddress, group: _RowGroup, wanted: list[int]) -> None:
        """Makes the requested blocks of a row group, unless they are stored by now, or another server makes them."""
        blocks = reader.snapshot.blocks_of_group(first.group)

        def find() -> set[int]:
            """Resolve the futures of stored blocks, and return the numbers of the others."""
            left = [number for number in wanted if number in group.futures]
            return {number for number in left if not self._map(reader, reader.snapshot.block(blocks[number]), group)}

        name = reader.names.of_group(first)
        while missing := find():
            if self.shared is None:
                self._decode_group(reader, first, group, missing)
                return
            with self.shared.claimed(name) as is_ours:
                if is_ours:
                    if missing := find():  # another server may have ended its claim since
                        self._decode_group(reader, first, group, missing)
                    return
            self.shared.wait(name, lambda: not find())

    def _decode_group(self, reader: RowGroupReader, first: BlockAddress, group: _RowGroup, missing: set[int]) -> None:
        """Decodes a row group up to the last requested block, one at a time; stores its other blocks if the cache keeps all."""
        blocks = reader.snapshot.blocks_of_group(first.group)
        keeps_neighbours = True
        with self._observed(reader.snapshot.name, group.clock), closing(reader.blocks(first)) as decoded:
            for at, parts in decoded:
                name = reader.names.of(at.index)
                is_useful = at.number in group.futures or keeps_neighbours
                if at.number in missing or (is_useful and not self.cache.has(name)):
                    batch = reader.encode_block(parts, at, group.clock)
                    nbytes = self.maps.write(name, batch)
                    # Neighbours are worth tokenizing only if the cache has room for the whole group beside other blocks in use.
                    keeps_neighbours = keeps_neighbours and 0 < 2 * nbytes * len(blocks) <= self.cache.budget_bytes
                    if at.number in group.futures:
                        self._resolve(group, at.number, self.maps.read(name) or Block.of(batch))
                with self._lock:
                    last = max(group.futures, default=-1)  # serve later requests in this pass, not in a new one
                if at.number >= last and not keeps_neighbours:
                    return

    def _map(self, reader: RowGroupReader, at: BlockAddress, group: _RowGroup) -> bool:
        """Resolves the future of a stored block. Returns False if the block is not stored."""
        block = self.maps.read(reader.names.of(at.index))
        if block is not None:
            self._resolve(group, at.number, block)
        return block is not None

    def _resolve(self, group: _RowGroup, number: int, block: Block) -> None:
        with self._lock:
            future = group.futures.pop(number, None)
        if future:
            future.set_result(block)

    @contextmanager
    def _failing(self, group: _RowGroup, numbers: list[int]) -> Iterator[None]:
        """Sets an error raised in the `with` block on the unresolved futures of these blocks."""
        try:
            yield
        except BaseException as error:
            failure = error
            if isinstance(error, MemoryError):
                failure = OutOfMemory("for a block of rows", error, "write smaller row groups")
            with self._lock:
                failed = [future for number in numbers if (future := group.futures.pop(number, None))]
            for future in failed:
                future.set_exception(failure)
            if not failed:
                log.warning("the requested blocks are served; reading on in their row group failed: %s", failure)

    def _wanted(self, group: _RowGroup) -> list[int]:
        """Returns the numbers of unresolved blocks; without any, the row group is no longer decoded."""
        with self._lock:
            group.is_decoding = bool(group.futures)
            return list(group.futures)


class Splits:
    """Least recently used splits of live blocks, within a budget: a block is mapped, but its splits are in memory."""

    def __init__(self, budget_bytes: int = _SPLIT_BYTES) -> None:
        self._budget_bytes, self.held_bytes = budget_bytes, 0
        self._lock = threading.RLock()  # reentrant: a block may be collected while this thread holds the lock
        # Weak references, so that evicted files can be unmapped; a split is dropped with its block.
        self._held = OrderedDict[_SplitKey, tuple[weakref.ref[Block], Block]]()

    def of(self, block: Block, selection: Selection, share: float) -> Block:
        """Returns the rows of one split as a block; the block itself if the split has all rows. See Block.selected."""
        if selection == "all":
            return block
        key = (id(block), selection, share)
        with self._lock:
            reference, split = self._held.get(key, (None, None))
            if split and reference and reference() is block:
                self._held.move_to_end(key)
                return split
        split = block.selected(selection, share)
        with self._lock:
            self._drop(key)
            self._held[key] = weakref.ref(block, lambda _: self._drop(key)), split
            self.held_bytes += _nbytes(split)
            while self.held_bytes > self._budget_bytes and len(self._held) > 1:
                self._drop(next(iter(self._held)))
        return split

    def _drop(self, key: _SplitKey) -> None:
        with self._lock:
            if held := self._held.pop(key, None):
                self.held_bytes -= _nbytes(held[1])


def _nbytes(split: Block) -> int:
    """Estimates the memory of a split, without the tokens, which it shares with the block."""
    lists = sum(len(feature) - feature.count(None) for feature in split.features.values())
    columns = sum(int(column.nbytes) for column in split.columns.values())
    return _MIN_SPLIT_BYTES + 8 * split.num_rows * (2 * lists + 4) + columns
