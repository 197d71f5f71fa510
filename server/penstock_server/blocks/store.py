"""The store: blocks of tokens, mapped if they are stored, and made if not: once, however many ask for them.

Of a row group it is known what is wanted (a future a block), and whether a thread makes it:

request    a mapped block is given at once; of another a future, the same for all who ask, and a mapper looks for it
_find      a mapper answers it from the cache folder, or has the row group made, unless that is under way
_make      a thread decodes the row group, and answers what is wanted of it, also what comes to be wanted meanwhile
forget     who asked has left: a future that nobody waits for is given up, and what nobody wants is not made
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
from penstock_server.blocks.maps import Maps
from penstock_server.blocks.on_demand import RowsOnDemand
from penstock_server.blocks.read_ahead import ReadAhead
from penstock_server.blocks.splits import Splits
from penstock_server.machine import num_cores
from penstock_server.map_ordered import map_ordered
from penstock_server.problems import OutOfMemory, Problem

log = logging.getLogger("penstock.store")

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")

DECODED_BYTES = 1 << 30  # of rows that are decoded and wait to be tokenized, where no setting says otherwise
_AHEAD_SHARE = 2  # of the threads load ahead, one at least: the others are for what is asked for now
_MAPPERS = 4  # threads for what is asked for now; to map a block is to read it, and a disk reads faster for several


# A block that was asked for: itself where it is mapped, since a future takes 1.4 KB, and a crowd asks for tens of thousands.
Asked = Block | Future[Block]

# Gives (number, encoded rows) of each block of a row group for which its argument says that it is needed.
Decoder = Callable[[Callable[[int], bool]], Generator[tuple[int, pa.RecordBatch], None, None]]


@dataclass(slots=True)
class _Wanted:
    """What is wanted of a row group, by the numbers of its blocks."""

    futures: dict[int, Future[Block]] = field(default_factory=dict)
    is_under_way: bool = False  # a thread decodes it


@dataclass(slots=True)
class _Load:
    """Where a future belongs that is not answered yet, and how many wait for it."""

    wanted: _Wanted
    number: int
    num_askers: int = 0


class BlockStore:
    """The blocks of all datasets: in the cache folder, and the ones that are mapped into memory now.

    However many ask for blocks of a row group, one thread decodes it for all of them. Threads decode row groups side by side;
    pyarrow and `tokenizers` release the GIL.
    """

    def __init__(self, cache: CacheFolder, num_threads: int | None = None, decoded_bytes: int = DECODED_BYTES) -> None:
        self.cache, self.maps = cache, Maps(cache)
        self.splits = Splits()
        self._num_threads = num_threads or num_cores()
        self.rows = RowsOnDemand(self.maps, decoded_bytes, self._num_threads)
        self.ahead = ReadAhead(self._num_threads)
        num_ahead = max(1, self._num_threads // _AHEAD_SHARE)
        self.loading_ahead = threading.Semaphore(num_ahead)  # for whole blocks, which nobody waits for
        self._mappers = ThreadPoolExecutor(_MAPPERS + num_ahead, thread_name_prefix="penstock-map")
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="penstock-blocks")
        self._lock = threading.Lock()
        self._wanted: dict[str, _Wanted] = {}  # by the key of the first block, of each row group of which something is wanted
        self._loads: dict[Future[Block], _Load] = {}  # of each future that is not answered yet

    def request(self, group: Sequence[str], number: int, decode: Decoder) -> Asked:
        """The block `number` of a row group whose blocks have these keys, or a future of it.

        What is stored is mapped, by threads that do nothing else. What is not is made by `decode`, with all that is asked
        for of the same row group, and its neighbours if the cache can keep them: the group is decoded from its start. The
        future raises whatever `decode` raises; the next request tries again.
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
        """Gives up a block, once for each time it was asked for; a load that nobody wants any more is dropped."""
        with self._lock:
            load = self._loads.get(future)
            if load is None:  # it is being answered, and what is cancelled now could not be
                return
            load.num_askers -= 1
            if load.num_askers > 0:
                return
            del self._loads[future]
            del load.wanted.futures[load.number]
        future.cancel()

    def map_ordered(self, make: Callable[[_Item], _Made], items: Iterable[_Item]) -> Iterator[_Made]:
        """What `make` gives for each item, in turn; as many are made at a time as there are threads. Raises what it raises."""
        return map_ordered(self._threads, self._num_threads, make, items)

    def close(self) -> None:
        """Drops the loads that have not begun."""
        self._mappers.shutdown(wait=False, cancel_futures=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.rows.close()

    def _find(self, group: Sequence[str], number: int, wanted: _Wanted, decode: Decoder) -> None:
        """Maps a block if it is stored, and has it made if not."""
        with self._answering(wanted, [number]):
            if self._missing(group, wanted, [number]):
                with self._lock:
                    if number in wanted.futures and not wanted.is_under_way:
                        self._threads.submit(self._make, group, wanted, decode)
                        wanted.is_under_way = True  # not before: if no thread can be started, nobody may rely on it
        with self._lock:
            self._end(group, wanted)

    def _make(self, group: Sequence[str], wanted: _Wanted, decode: Decoder) -> None:
        """Makes what is wanted of a row group, also what comes to be wanted meanwhile, and leaves nothing unanswered.

        Holds no more than one block at a time; what the cache does not keep is handed out once.
        """
        while asked := self._still_wanted(group, wanted):
            with self._answering(wanted, asked):
                # What was stored between a request's look for it and now is not to be made again.
                if missing := self._missing(group, wanted, asked):
                    self._decode_once(group, wanted, missing, decode)

        if not self._wanted:
            pa.default_memory_pool().release_unused()  # what was decoded into; until then it is decoded into again

    @contextmanager
    def _answering(self, wanted: _Wanted, asked: list[int]) -> Iterator[None]:
        """Answers the blocks asked for that have no answer yet with the error that is raised meanwhile."""
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
        """Hands out those of the blocks asked for that are stored; the numbers of the others that are still wanted."""
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
        """The blocks of a row group that are wanted by now; if there is none, the row group is no longer being made."""
        with self._lock:
            wanted.is_under_way = bool(wanted.futures)
            self._end(group, wanted)
            return list(wanted.futures)

    def _end(self, group: Sequence[str], wanted: _Wanted) -> None:
        """Forgets a row group of which nothing is wanted any more: a request begins anew. To be called with the lock."""
        if not wanted.futures and not wanted.is_under_way and self._wanted.get(group[0]) is wanted:
            del self._wanted[group[0]]

    def _take(self, wanted: _Wanted, number: int) -> Future[Block] | None:
        """The future of a block, for the caller to answer; None: it was answered, or given up."""
        with self._lock:
            future = wanted.futures.pop(number, None)
            if future:
                self._loads.pop(future, None)
            return future

    def _hand_out(self, key: str, wanted: _Wanted, number: int, batch: pa.RecordBatch) -> bool:
        """Gives a block that was just made to who waits for it, if anyone does, and keeps hold of nothing."""
        block = self.maps.read(key) or Block.of(batch)  # first: what it raises is to reach who waits
        future = self._take(wanted, number)
        if future:
            future.set_result(block)
        return future is not None

    def _decode_once(self, group: Sequence[str], wanted: _Wanted, asked: list[int], decode: Decoder) -> None:
        """Decodes a row group from its start, as far as need be, and hands out what is wanted of it.

        Its other blocks are made and stored, too, if the cache can keep all of them.
        """
        last, keeps, served = max(asked), True, False

        def needed(number: int) -> bool:
            if number in asked and number in wanted.futures:
                return True
            # No neighbours where all that was wanted has been given up.
            keeps_neighbours = keeps and (served or bool(wanted.futures))
            # A stored block need not be made: whoever came to want it since is about to be given it from the cache.
            return (number in wanted.futures or keeps_neighbours) and not self.cache.has(group[number])

        batches = decode(needed)
        try:
            for number, batch in batches:
                nbytes = self.maps.write(group[number], batch)
                # Neighbours are worth their tokenizing only if the whole group has room beside what else is in use.
                keeps = keeps and 0 < 2 * nbytes * len(group) <= self.cache.budget_bytes
                if number in wanted.futures:
                    served = self._hand_out(group[number], wanted, number, batch) or served
                with self._lock:
                    last = max([last, *wanted.futures])  # what came to be wanted further on need not begin anew
                if (number >= last and not keeps) or not (served or wanted.futures):
                    return
        except Problem as problem:
            if any(number in wanted.futures for number in asked):
                raise
            log.warning("what was asked for is served; reading on in its row group failed: %s", problem)
        finally:
            batches.close()
