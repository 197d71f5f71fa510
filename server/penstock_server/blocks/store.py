"""Block store: maps cached blocks of tokens and decodes the others, once for all callers.

For each row group, the store keeps one future per requested block, and whether a thread decodes the row group:

request    returns a mapped block at once; otherwise a future, shared by all callers, and a mapper looks the block up
_find      a mapper reads the block from the cache folder, or schedules the row group unless a thread decodes it already
_make      a thread decodes the row group, and resolves its futures, including those added meanwhile
forget     a caller left: a future without waiters is cancelled, and its block is not made
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow as pa

from penstock_server.blocks.block import Block
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.mmap import Maps
from penstock_server.blocks.on_demand import RowsOnDemand
from penstock_server.blocks.prefetch import ReadAhead
from penstock_server.blocks.splits import Splits
from penstock_server.machine import num_cores
from penstock_server.map_ordered import map_ordered
from penstock_server.problems import OutOfMemory, Problem

log = logging.getLogger("penstock.store")

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")

DECODED_BYTES = 1 << 30  # default budget for rows that are decoded and wait to be tokenized
_AHEAD_SHARE = 2  # one thread in two loads ahead, at least one; the others serve requests
_MAPPERS = 4  # threads that serve requests; mapping reads the block, and a disk is faster with several readers


# A requested block: the block if it is mapped, else a future. A future takes 1.4 KB; many clients request tens of thousands.
Asked = Block | Future[Block]

# Yields (number, encoded rows) for the blocks of a row group that its argument, a predicate on the number, accepts.
Decoder = Callable[[Callable[[int], bool]], Generator[tuple[int, pa.RecordBatch], None, None]]


@dataclass(slots=True)
class _Wanted:
    """Requested blocks of a row group, by block number."""

    futures: dict[int, Future[Block]] = field(default_factory=dict)
    is_under_way: bool = False  # a thread decodes it


@dataclass(slots=True)
class _Load:
    """Location and number of waiters of an unresolved future."""

    wanted: _Wanted
    number: int
    num_askers: int = 0


class BlockStore:
    """Blocks of all datasets: those in the cache folder, and those mapped into memory now.

    One thread decodes a row group for all callers. Threads decode different row groups in parallel; pyarrow and `tokenizers`
    release the GIL.
    """

    def __init__(self, cache: CacheFolder, num_threads: int | None = None, decoded_bytes: int = DECODED_BYTES) -> None:
        self.cache, self.maps = cache, Maps(cache)
        self.splits = Splits()
        self._num_threads = num_threads or num_cores()
        self.rows = RowsOnDemand(self.maps, decoded_bytes, self._num_threads)
        self.ahead = ReadAhead(self._num_threads)
        num_ahead = max(1, self._num_threads // _AHEAD_SHARE)
        self.loading_ahead = threading.Semaphore(num_ahead)  # for whole blocks that no request waits for
        self._mappers = ThreadPoolExecutor(_MAPPERS + num_ahead, thread_name_prefix="penstock-map")
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="penstock-blocks")
        self._lock = threading.Lock()
        self._wanted: dict[str, _Wanted] = {}  # row groups with requests, by the key of the first block
        self._loads: dict[Future[Block], _Load] = {}  # unresolved futures

    def request(self, group: Sequence[str], number: int, decode: Decoder) -> Asked:
        """Returns block `number` of the row group with these block keys, or a future.

        Dedicated threads map stored blocks. `decode` makes the others, together with all requested blocks of the row group.
        It also makes their neighbours if the cache can keep them, since the group is decoded from its start. The future
        raises whatever `decode` raises; the next request retries.
        """
        if found := self.maps.open_now(group[number]):
            return found
        with self._lock:
            wanted = self._wanted.setdefault(group[0], _Wanted())
            future = wanted.futures.get(number)
            if future is None:
                future = wanted.futures[number] = Future()
                self._loads[future] = _Load(wanted, number)
                try:
                    self._mappers.submit(self._find, group, number, wanted, decode)
                except RuntimeError:  # no thread can be started now
                    del wanted.futures[number], self._loads[future]
                    raise
            self._loads[future].num_askers += 1
            return future

    def forget(self, future: Future[Block]) -> None:
        """Releases a block, once per request for it; the last release drops the load."""
        with self._lock:
            load = self._loads.get(future)
            if load is None:  # it is being resolved; a cancelled future could not be
                return
            load.num_askers -= 1
            if load.num_askers > 0:
                return
            del self._loads[future]
            del load.wanted.futures[load.number]
        future.cancel()

    def map_ordered(self, make: Callable[[_Item], _Made], items: Iterable[_Item]) -> Iterator[_Made]:
        """Yields `make(item)` for each item in order, in parallel on all threads. Raises what `make` raises."""
        return map_ordered(self._threads, self._num_threads, make, items)

    def close(self) -> None:
        """Cancels the loads that have not begun."""
        self._mappers.shutdown(wait=False, cancel_futures=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.rows.close()

    def _find(self, group: Sequence[str], number: int, wanted: _Wanted, decode: Decoder) -> None:
        """Maps a stored block; schedules its row group otherwise."""
        with self._answering(wanted, [number]):
            if self._missing(group, wanted, [number]):
                with self._lock:
                    if number in wanted.futures and not wanted.is_under_way:
                        self._threads.submit(self._make, group, wanted, decode)
                        wanted.is_under_way = True  # not before: no caller may rely on a thread that could not be started
        with self._lock:
            self._end(group, wanted)

    def _make(self, group: Sequence[str], wanted: _Wanted, decode: Decoder) -> None:
        """Makes the requested blocks of a row group, including requests added meanwhile, and resolves every future.

        Holds at most one block at a time. A block that the cache does not keep is handed out once.
        """
        while asked := self._still_wanted(group, wanted):
            with self._answering(wanted, asked):
                # A block may have been stored since the request looked for it; do not make it again.
                if missing := self._missing(group, wanted, asked):
                    self._decode_once(group, wanted, missing, decode)

        if not self._wanted:
            pa.default_memory_pool().release_unused()  # the buffers of decoding; until now decoding reused them

    @contextmanager
    def _answering(self, wanted: _Wanted, asked: list[int]) -> Iterator[None]:
        """Sets an error raised in the `with` block on the unresolved futures of `asked`."""
        try:
            yield
        except BaseException as error:
            failure = error
            if isinstance(error, MemoryError):
                failure = OutOfMemory("for a block of rows", error, "write smaller row groups")
            for number in asked:
                if future := self._take(wanted, number):
                    future.set_exception(failure)

    def _missing(self, group: Sequence[str], wanted: _Wanted, asked: list[int]) -> list[int]:
        """Hands out the stored blocks in `asked`; returns the numbers of the others that still have waiters."""
        missing = []
        for number in asked:
            if number not in wanted.futures:
                continue
            block = self.maps.read(group[number])
            if block is None:
                missing.append(number)
            elif future := self._take(wanted, number):
                future.set_result(block)
        return missing

    def _still_wanted(self, group: Sequence[str], wanted: _Wanted) -> list[int]:
        """Returns the block numbers with waiters; if it returns no number, the row group is no longer being made."""
        with self._lock:
            wanted.is_under_way = bool(wanted.futures)
            self._end(group, wanted)
            return list(wanted.futures)

    def _end(self, group: Sequence[str], wanted: _Wanted) -> None:
        """Forgets a row group without requests, so that the next request starts anew. The caller holds the lock."""
        if not wanted.futures and not wanted.is_under_way and self._wanted.get(group[0]) is wanted:
            del self._wanted[group[0]]

    def _take(self, wanted: _Wanted, number: int) -> Future[Block] | None:
        """Returns the future of a block for the caller to resolve; None if it was resolved or released."""
        with self._lock:
            future = wanted.futures.pop(number, None)
            if future:
                self._loads.pop(future, None)
            return future

    def _hand_out(self, key: str, wanted: _Wanted, number: int, batch: pa.RecordBatch) -> bool:
        """Hands a new block to its waiters and keeps no reference. Returns whether it had waiters."""
        block = self.maps.read(key) or Block.of(batch)  # before the future is taken: waiters must get what this raises
        future = self._take(wanted, number)
        if future:
            future.set_result(block)
        return future is not None

    def _decode_once(self, group: Sequence[str], wanted: _Wanted, asked: list[int], decode: Decoder) -> None:
        """Decodes a row group from its start up to the last requested block, and hands out the requested blocks.

        It also makes and stores the other blocks if the cache can keep all of them.
        """
        last, keeps, served = max(asked), True, False

        def needed(number: int) -> bool:
            if number in asked and number in wanted.futures:
                return True
            # Make no neighbours once every request has been released.
            keeps_neighbours = keeps and (served or bool(wanted.futures))
            # A stored block need not be made: later requests for it are served from the cache.
            return (number in wanted.futures or keeps_neighbours) and not self.cache.has(group[number])

        batches = decode(needed)
        try:
            for number, batch in batches:
                nbytes = self.maps.write(group[number], batch)
                # Neighbours are worth tokenizing only if the cache has room for the whole group beside other blocks in use.
                keeps = keeps and 0 < 2 * nbytes * len(group) <= self.cache.budget_bytes
                if number in wanted.futures:
                    served = self._hand_out(group[number], wanted, number, batch) or served
                with self._lock:
                    last = max([last, *wanted.futures])  # serve later requests in this pass, not in a new one
                if (number >= last and not keeps) or not (served or wanted.futures):
                    return
        except Problem as problem:
            if any(number in wanted.futures for number in asked):
                raise
            log.warning("what was asked for is served; reading on in its row group failed: %s", problem)
        finally:
            batches.close()
