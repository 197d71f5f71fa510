"""Mapped blocks: reads and writes blocks in the cache folder, and hints to the kernel how their maps are read.

A block is stored as an uncompressed Arrow IPC stream of what `encode` makes.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import RawIOBase

import pyarrow as pa

from penstock_server.blocks.block import Block
from penstock_server.blocks.cache import CacheFolder
from penstock_server.files import Piece
from penstock_server.logs import Seldom

log = logging.getLogger("penstock.maps")

_OPEN_BLOCKS = 1 << 13  # maps held, each in 3 KB of memory, more with bad rows
_TOUCH_SECONDS = 10.0
_LIBC = ctypes.CDLL(None)  # Python's madvise works only on mmap objects, and each keeps a descriptor open
_THIS_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # macOS counts the whole process
PAGE_BYTES = mmap.PAGESIZE
_MANY_WAITS = 16
_ADVISED_COPIES = 64


@dataclass(slots=True)
class _Open:
    block: Block
    touched_at: float


class Maps:
    """Blocks of a cache folder by key, with the most recently used ones mapped. For all threads."""

    def __init__(self, cache: CacheFolder) -> None:
        self.cache = cache
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._checked_at = time.monotonic()
        self._warnings = Seldom()

    def __len__(self) -> int:
        return len(self._open)

    def known(self, keys: Sequence[str]) -> list[Block | None]:
        """Returns the blocks of these keys; None for blocks never mapped here, which must be read first."""
        now = time.monotonic()
        with self._lock:  # once for all keys: under contention, taking the lock costs more than the work under it
            opened = [self._open.get(key) for key in keys]
            # Order by use only needs a resolution of _TOUCH_SECONDS.
            long_ago = [
                key for key, known in zip(keys, opened, strict=True) if known and known.touched_at < now - _TOUCH_SECONDS
            ]
            for key in long_ago:
                self._open.move_to_end(key)
                self._open[key].touched_at = now
        # Touch the files: otherwise a block in constant use would look least recently used. Drop maps of files that another
        # process removed: they hold disk space that no budget counts.
        for key in long_ago:
            if not self.cache.touch(key):
                with self._lock:
                    self._open.pop(key, None)
        return [
            known.block if known else self._map(key, self.cache.read_again(key))
            for key, known in zip(keys, opened, strict=True)
        ]

    def read(self, key: str) -> Block | None:
        """Returns a stored block, and reads its file if it was never mapped here; None if it is not stored or damaged."""
        return self._map(key, self.cache.read(key))

    def write(self, key: str, batch: pa.RecordBatch) -> int:
        """Stores a block. Returns its bytes, or 0 if the cache does not keep it."""
        stream = _Pieces()
        with pa.ipc.new_stream(stream, batch.schema) as writer:
            writer.write_batch(batch)
        try:
            return sum(map(len, stream.pieces)) if self.cache.write(key, *stream.pieces) else 0
        except OSError as error:
            if self._warnings.is_due():
                log.warning("the block cache cannot be written to: %s; blocks are decoded each time they are needed", error)
            return 0
        finally:
            self.let_go()

    def _map(self, key: str, content: pa.Buffer | None) -> Block | None:
        if content is None:
            return None
        if content.size:  # otherwise the kernel reads up to megabytes around each row, and evicts pages that others need
            _advise(content.address, content.size, mmap.MADV_RANDOM)
        try:
            block = Block.of(pa.ipc.open_stream(content).read_next_batch())
        except MemoryError:
            raise
        except (pa.ArrowException, KeyError, StopIteration) as error:
            log.warning("the cached block %s is damaged and will be made again: %s", key, error)
            self.cache.drop(key)
            return None
        with self._lock:
            self._open[key] = _Open(block, time.monotonic())
            while len(self._open) > _OPEN_BLOCKS:
                self._open.popitem(last=False)
        return block

    def let_go(self) -> None:
        """Closes the maps of evicted files: until then they hold disk space that the budget no longer counts."""
        with self._lock:
            while self.cache.evicted:
                self._open.pop(self.cache.evicted.popleft(), None)
            if time.monotonic() - self._checked_at < _TOUCH_SECONDS:
                return
            self._checked_at = time.monotonic()
            keys = list(self._open)
        gone = [key for key in keys if not self.cache.has(key)]  # removed by another process
        with self._lock:
            for key in gone:
                self._open.pop(key, None)


class _Pieces(RawIOBase):
    """Pieces of a written stream, not joined, since that would copy every block once more."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def writable(self) -> bool:
        """Returns True; pyarrow requires it."""
        return True

    def write(self, piece: Piece) -> int:
        """Keeps a piece: a buffer that pyarrow has written from, or a copy of a few bytes."""
        self.pieces.append(piece)
        return len(piece)


class Waits:
    """Announces copies from maps to the kernel, after a copy had to wait for the disk.

    The kernel then reads all pages at a time, not one by one. The hints take longer than a copy that does not wait.
    """

    def __init__(self) -> None:
        self._num_to_advise = 0  # number of copies still to announce

    @contextmanager
    def copying(self, spans: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Wraps a copy that reads these spans, (address, nbytes) each."""
        if self._num_to_advise:
            self._num_to_advise -= 1
            for address, nbytes in spans:
                within = address % PAGE_BYTES
                _advise(address - within, within + nbytes, mmap.MADV_WILLNEED)
        before = _num_waits()
        yield
        if _num_waits() - before >= _MANY_WAITS:
            self._num_to_advise = _ADVISED_COPIES


def _advise(address: int, nbytes: int, advice: int) -> None:
    _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)  # errors are ignored: it is only advice


def _num_waits() -> int:
    """Returns the number of page reads that this thread has waited for."""
    return resource.getrusage(_THIS_THREAD).ru_majflt
