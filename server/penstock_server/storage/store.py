"""The store: blocks of tokens, in the cache folder and mapped into memory. Made by whoever asks first, once for all.

A block is stored as an uncompressed Arrow IPC stream of what `encode` makes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from penstock_server.problems import Problem
from penstock_server.storage.block import Block
from penstock_server.storage.cache import CacheFolder
from penstock_server.storage.read_ahead import ReadAhead

log = logging.getLogger("penstock.store")

_OPEN_BLOCKS = 1 << 12  # maps held: to map one reads it once, for its digest; but what a split takes of one is memory
_TOUCH_SECONDS = 10.0


# Gives (number, encoded rows) of each block of a row group for which its argument says that it is needed.
Decoder = Callable[[Callable[[int], bool]], Generator[tuple[int, pa.RecordBatch], None, None]]


@dataclass(slots=True)
class _Open:
    block: Block
    touched_at: float


class BlockStore:
    """The blocks of all datasets: in the cache folder, and the ones that are mapped into memory now.

    However many ask for blocks of a row group, one thread decodes it for all of them. Threads decode row groups side by
    side; pyarrow and `tokenizers` release the GIL.
    """

    def __init__(self, cache: CacheFolder, num_threads: int | None = None) -> None:
        self.cache = cache
        self.ahead = ReadAhead()
        self._threads = ThreadPoolExecutor(num_threads or os.cpu_count() or 1, thread_name_prefix="penstock-blocks")
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._checked_at = time.monotonic()
        self._wanted: dict[str, dict[int, Future[Block]]] = {}  # of each row group that is being decoded
        self._askers: dict[Future[Block], int] = {}  # how many wait for each of those

    def request(self, group: Sequence[str], number: int, decode: Decoder) -> Future[Block]:
        """The block `number` of a row group whose blocks have these keys, soon.

        What is stored is mapped at once, in the caller's thread. What is not is made by `decode`, with all that is asked
        for of the same row group, and its neighbours if the cache can keep them: the group is decoded from its start. The
        future raises whatever `decode` raises; the next request tries again.
        """
        key = group[number]
        if found := self.mapped([key]):
            return _ready(found[0])
        if block := self._stored(key):
            return _ready(block)
        with self._lock:
            wanted = self._wanted.get(group[0])
            if wanted is None:
                wanted = self._wanted[group[0]] = {}
                self._threads.submit(self._make, group, wanted, decode)
            future = wanted.setdefault(number, Future())
            self._askers[future] = self._askers.get(future, 0) + 1
            return future

    def forget(self, future: Future[Block]) -> None:
        """One of those who asked no longer wants the block; a load that nobody wants any more is dropped."""
        with self._lock:
            if future not in self._askers:  # it is being answered, and what is cancelled now could not be
                return
            self._askers[future] -= 1
            if self._askers[future] > 0:
                return
            del self._askers[future]
            for wanted in self._wanted.values():
                for number in [number for number, other in wanted.items() if other is future]:
                    del wanted[number]
        future.cancel()

    def mapped(self, keys: Sequence[str]) -> list[Block] | None:
        """The blocks of these keys, if all of them are mapped into memory now."""
        blocks, long_ago = [], []
        now = time.monotonic()
        with self._lock:
            for key in keys:
                found = self._open.get(key)
                if found is None:
                    break
                self._open.move_to_end(key)
                blocks.append(found.block)
                if found.touched_at < now - _TOUCH_SECONDS:
                    found.touched_at = now
                    long_ago.append(key)
        # Else a block in constant use would look like the one used longest ago; and what another process has removed would
        # hold disk space, that no budget counts, for as long as it is mapped.
        for key in long_ago:
            if not self.cache.touch(key):
                with self._lock:
                    self._open.pop(key, None)
        return blocks if len(blocks) == len(keys) else None

    def close(self) -> None:
        """Drops the loads that have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _make(self, group: Sequence[str], wanted: dict[int, Future[Block]], decode: Decoder) -> None:
        """Makes what is wanted of a row group, also what comes to be wanted meanwhile, and leaves nothing unanswered.

        Holds no more than one block at a time; what the cache does not keep is handed out once.
        """
        while asked := self._still_wanted(group, wanted):
            try:
                # Who asked while the last of this group was being stored may have missed it.
                found = {number: self._stored(group[number]) for number in asked}
                for number, block in found.items():
                    if block and (future := self._take(wanted, number)):
                        future.set_result(block)
                if missing := [number for number in asked if not found[number]]:
                    self._decode_once(group, wanted, missing, decode)
            except BaseException as error:
                for number in asked:
                    if future := self._take(wanted, number):
                        future.set_exception(error)

        if not self._wanted:
            pa.default_memory_pool().release_unused()  # what was decoded into; until then it is decoded into again

    def _still_wanted(self, group: Sequence[str], wanted: dict[int, Future[Block]]) -> list[int]:
        with self._lock:
            if not wanted:
                del self._wanted[group[0]]  # from here on a request begins anew
            return list(wanted)

    def _take(self, wanted: dict[int, Future[Block]], number: int) -> Future[Block] | None:
        with self._lock:
            future = wanted.pop(number, None)
            if future:
                self._askers.pop(future, None)
            return future

    def _decode_once(self, group: Sequence[str], wanted: dict[int, Future[Block]], asked: list[int], decode: Decoder) -> None:
        last, keeps, served = max(asked), True, False

        def needed(number: int) -> bool:
            # Neighbours come along with what is wanted, never for its sake once it was forgotten.
            keeps_neighbours = keeps and (served or bool(wanted))
            return number in wanted or (keeps_neighbours and not self.cache.has(group[number]))

        batches = decode(needed)
        try:
            for number, batch in batches:
                nbytes = self._store(group[number], batch)
                # Neighbours are worth their tokenizing only if the whole group has room beside what else is in use.
                keeps = keeps and 0 < 2 * nbytes * len(group) <= self.cache.budget_bytes
                if future := self._take(wanted, number):
                    served = True
                    future.set_result(self._stored(group[number]) or Block.of(batch))
                if (number >= last and not keeps) or not (served or wanted):
                    return
        except Problem as problem:
            if any(number in wanted for number in asked):
                raise
            log.warning("what was asked for is served, but not all of its row group can be: %s", problem)
        finally:
            batches.close()

    def _stored(self, key: str) -> Block | None:
        content = self.cache.read(key)
        if content is None:
            return None
        block = Block.of(pa.ipc.open_stream(content).read_next_batch())
        with self._lock:
            self._open[key] = _Open(block, time.monotonic())
            while len(self._open) > _OPEN_BLOCKS:
                self._open.popitem(last=False)
        return block

    def _let_go(self) -> None:
        """Closes the maps of evicted files: until then they hold disk space that the budget no longer counts."""
        with self._lock:
            while self.cache.evicted:
                self._open.pop(self.cache.evicted.popleft(), None)
            if time.monotonic() - self._checked_at < _TOUCH_SECONDS:
                return
            self._checked_at = time.monotonic()
            keys = list(self._open)
        gone = [key for key in keys if not self.cache.has(key)]  # by another process
        with self._lock:
            for key in gone:
                self._open.pop(key, None)

    def _store(self, key: str, batch: pa.RecordBatch) -> int:
        """Stores a block. Returns its bytes, or 0 if the cache does not keep it."""
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, batch.schema) as writer:
            writer.write_batch(batch)
        content = memoryview(stream.getvalue())
        try:
            return content.nbytes if self.cache.write(key, content) else 0
        except OSError as error:
            log.warning("the block cache cannot be written to: %s; blocks are decoded each time they are needed", error)
            return 0
        finally:
            self._let_go()


def _ready(block: Block) -> Future[Block]:
    future: Future[Block] = Future()
    future.set_result(block)
    return future
