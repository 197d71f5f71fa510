"""The store: blocks of tokens, in the cache folder and mapped into memory. Made by whoever asks first, once for all.

A block is stored as an uncompressed Arrow IPC stream: one list of tokens a feature and row, and why a row is bad.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock_server.cache import CacheFolder
from penstock_server.encode import REASON
from penstock_server.order import IntArray
from penstock_server.packing import Piece
from penstock_server.read_ahead import ReadAhead

log = logging.getLogger("penstock.store")

_OPEN_BLOCKS = 4096  # maps held; a process may hold some 65,000
_TOUCH_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class TokenLists:
    """One list of tokens a row, end to end: row i is values[offsets[i]:offsets[i + 1]]."""

    values: npt.NDArray[np.unsignedinteger[Any]]
    offsets: IntArray


@dataclass(frozen=True)
class Block:
    """The tokens of one block's rows, as views of a memory map.

    `features` are "tokens", or "prompt" and "response". `bad` are the rows that cannot be used, with the reasons; they
    have no tokens.
    """

    num_rows: int
    features: dict[str, TokenLists]
    bad: dict[int, str]

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> Block:
        """The block that an encoded record batch holds."""
        reasons = batch.column(REASON)
        bad_rows = np.flatnonzero(reasons.is_valid().to_numpy(zero_copy_only=False))
        lists = {name: batch.column(name) for name in batch.schema.names if name != REASON}
        return cls(
            num_rows=batch.num_rows,
            features={
                name: TokenLists(column.values.to_numpy(zero_copy_only=True), column.offsets.to_numpy())
                for name, column in lists.items()
            },
            bad={int(row): reasons[int(row)].as_py() for row in bad_rows},
        )

    @cached_property
    def stream(self) -> IntArray:
        """Where each row starts in the block's stream of tokens, shape [num_rows + 1]: its features one behind the other."""
        starts: IntArray = np.sum([tokens.offsets for tokens in self.features.values()], axis=0, dtype=np.int64)
        return starts

    def pieces(self, row: int) -> list[Piece]:
        """The tokens of a row, a piece a feature."""
        found = []
        for name, tokens in self.features.items():
            start, stop = tokens.offsets[row : row + 2].tolist()
            found.append(Piece(name, tokens.values, start, stop - start))
        return found

    @cached_property
    def substitutes(self) -> IntArray:
        """For each row the row to serve in its place: itself, or the next good one, round the block's end if need be."""
        good = np.setdiff1d(np.arange(self.num_rows), np.fromiter(self.bad, np.int64, len(self.bad)))
        return good[np.searchsorted(good, np.arange(self.num_rows)) % len(good)]


# Gives (number, encoded rows) of each block of a row group for which its argument says that it is needed.
Decoder = Callable[[Callable[[int], bool]], Iterator[tuple[int, pa.RecordBatch]]]


@dataclass(slots=True)
class _Open:
    block: Block
    touched_at: float


class BlockStore:
    """The blocks of all datasets: in the cache folder, and the ones that are mapped into memory now.

    Loads are single flight: however many ask for a block, it is decoded once. Threads decode side by side; pyarrow and
    `tokenizers` release the GIL.
    """

    def __init__(self, cache: CacheFolder) -> None:
        self.cache = cache
        self.ahead = ReadAhead()
        self._threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="penstock-blocks")
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._num_evictions = 0
        self._checked_at = time.monotonic()
        self._loading: dict[str, Future[Block]] = {}
        self._groups: dict[str, tuple[threading.Lock, int]] = {}  # being decoded, and how many load from each

    def request(self, group: Sequence[str], number: int, decode: Decoder) -> Future[Block]:
        """The block `number` of a row group whose blocks have these keys, soon.

        What is not in the cache is made by `decode`, and its neighbours with it: the group has to be decoded from its
        start. The future raises whatever `decode` raises; the next request tries again.
        """
        key = group[number]
        with self._lock:
            if found := self._open.get(key):
                self._open.move_to_end(key)
                if found.touched_at < time.monotonic() - _TOUCH_SECONDS:
                    found.touched_at = time.monotonic()
                    self.cache.touch(key)  # else a block in constant use would look like the one used longest ago
                ready: Future[Block] = Future()
                ready.set_result(found.block)
                return ready
            if key not in self._loading:
                self._loading[key] = self._threads.submit(self._load, group, number, decode)
            return self._loading[key]

    def close(self) -> None:
        """Drops the loads that have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _load(self, group: Sequence[str], number: int, decode: Decoder) -> Block:
        key = group[number]
        try:
            with self._decoding(group[0]):
                return self._stored(key) or self._make(group, number, decode)
        finally:
            with self._lock:
                del self._loading[key]

    def _make(self, group: Sequence[str], number: int, decode: Decoder) -> Block:
        """Decodes the group and stores what the cache does not have; holds no more than one block of it at a time."""
        made: Block | None = None
        for other, batch in decode(lambda other: other == number or not self.cache.has(group[other])):
            self._store(group[other], batch)
            if other == number:
                # What is not kept by the cache is memory, and memory must not grow with the data: it is handed out once.
                made = self._stored(group[other]) or Block.of(batch)
        assert made is not None  # decode gives every block that it is told to
        pa.default_memory_pool().release_unused()  # Arrow keeps what it decoded into, in every thread anew
        return made

    @contextmanager
    def _decoding(self, group: str) -> Iterator[None]:
        """One decodes a row group at a time; who waited finds what was made."""
        with self._lock:
            lock, num_waiting = self._groups.get(group, (threading.Lock(), 0))
            self._groups[group] = (lock, num_waiting + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, num_waiting = self._groups.pop(group)
                if num_waiting > 1:
                    self._groups[group] = (lock, num_waiting - 1)

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
            if self._num_evictions == self.cache.num_evictions and time.monotonic() - self._checked_at < _TOUCH_SECONDS:
                return
            self._num_evictions, self._checked_at = self.cache.num_evictions, time.monotonic()
            keys = list(self._open)
        gone = [key for key in keys if not self.cache.has(key)]
        with self._lock:
            for key in gone:
                self._open.pop(key, None)

    def _store(self, key: str, batch: pa.RecordBatch) -> None:
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, batch.schema) as writer:
            writer.write_batch(batch)
        try:
            self.cache.write(key, memoryview(stream.getvalue()))
        except OSError as error:
            log.warning("the block cache cannot be written to: %s; blocks are decoded each time they are needed", error)
        self._let_go()
