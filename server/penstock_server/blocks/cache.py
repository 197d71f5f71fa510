"""Block cache: sealed files within a byte budget, shared by any number of processes; blocks in use are mapped into memory.

The least recently used files are evicted first. The lock file holds the bytes in use and being written. A process locks it to
change them, and to evict files. A block is stored as an uncompressed Arrow IPC stream of what `encode` makes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import resource
import shutil
import struct
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import RawIOBase
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pyarrow as pa

from penstock_server.blocks.block import Block
from penstock_server.blocks.shared import SharedStore
from penstock_server.files import (
    ABANDONED_SECONDS,
    SEAL_BYTES,
    TEMPORARY,
    Damaged,
    Piece,
    identity_of,
    map_sealed,
    write_with_seal,
)
from penstock_server.logs import Seldom
from penstock_server.monitoring.metrics import Metrics

log = logging.getLogger("penstock.cache")

SUFFIX = ".block"
PACKED = "-bins-"  # in the names of files with the bins of a packing
_PACKED_SHARE = 4  # of the budget
_UNFINISHED = f"{SUFFIX}{TEMPORARY}"
_LOCK_FILE = ".lock"
_COUNT = struct.Struct("<q")
SPARE = 32  # eviction frees a 32nd at once, since it scans all files to find the oldest
_OPEN_BLOCKS = 1 << 13  # maps held, each in 3 KB of memory, more with bad rows
_KNOWN_FILES = 1 << 18  # identities of verified files, of some 60 bytes each: a terabyte of blocks
_TOUCH_SECONDS = 10.0
_LIBC = ctypes.CDLL(None)  # Python's madvise works only on mmap objects, and each keeps a descriptor open
_THIS_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # macOS counts the whole process
PAGE_BYTES = mmap.PAGESIZE
_MANY_WAITS = 16
_ADVISED_COPIES = 64


class CacheFolder:
    """A folder of at most `budget_bytes`; None means half of the free space on its disk.

    Several processes may use one folder; they should have the same budget. Raises OSError: the folder cannot be used.
    """

    def __init__(self, folder: Path, budget_bytes: int | None = None, metrics: Metrics | None = None) -> None:
        self.folder, self.metrics = folder, metrics or Metrics()
        self.failure: str | None = None  # why the last file could not be stored; None if the only reason is lack of room
        self.evicted: deque[str] = deque()  # names of files that this process evicted; Maps takes them and closes its maps
        self.parsed: WeakValueDictionary[Path, Any] = WeakValueDictionary()  # counts in use, shared by all snapshots
        self._sound = set[int]()  # files with a verified seal, at most _KNOWN_FILES
        self._used = 0  # bytes in use, for the holder of the lock
        self._threads = threading.Lock()
        self._warnings = Seldom()
        with self._locked():
            self._recount()
            free = shutil.disk_usage(folder).free
            self.budget_bytes = (free + self._used) // 2 if budget_bytes is None else budget_bytes
            if self._used > self.budget_bytes:
                self._evict(self.budget_bytes)

    @property
    def remedy(self) -> str:
        """Advice for a folder without room."""
        return "Raise --cache-bytes" if self.room_bytes == self.budget_bytes else "Free disk space"

    @property
    def room_bytes(self) -> int:
        """Bytes of blocks that it can hold now: its budget, or less if the disk is full."""
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError:
            return self.budget_bytes
        return min(self.budget_bytes, self.used_bytes + free)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files in the folder, as counted by all processes; 0 if its disk fails."""
        try:
            return _parse_count((self.folder / _LOCK_FILE).read_bytes())
        except OSError:
            return 0

    def read(self, name: str) -> pa.Buffer | None:
        """Maps the bytes stored under a name, valid after its eviction; None without them, or if they were damaged."""
        try:
            body = map_sealed(self._path(name), self._sound)
            if len(self._sound) > _KNOWN_FILES:
                self._sound.pop()  # one, not all: a forgotten file is read as a whole when it is mapped again
        except Damaged as damage:
            log.warning("%s", damage)
            self.metrics.cache_corrupt_blocks.inc()
            self.drop(name)
            return None
        except OSError as error:
            if self._warnings.is_due():
                log.warning("%s cannot be read: %s", self._path(name), error)
            return None
        if body is not None:
            self.touch(name)
        return body

    def read_again(self, name: str) -> pa.Buffer | None:
        """Maps a file that `read` has verified, without reading it. None if it is gone or not known to be sound."""
        return self.read(name) if identity_of(self._path(name)) in self._sound else None

    def has(self, name: str) -> bool:
        """Returns whether a file of that name appears to exist; only `read` verifies its seal."""
        return os.path.exists(self._path(name))  # noqa: PTH110 - Path.exists raises if the disk fails

    def touch(self, name: str) -> bool:
        """Marks a file as used now. Returns False if it no longer exists."""
        try:
            os.utime(self._path(name))
        except FileNotFoundError:  # evicted, perhaps by another process
            return False
        except OSError:  # a folder that became read-only
            pass
        return True

    def write(self, name: str, *pieces: Piece) -> bool:
        """Stores pieces of bytes under a name. Returns False, and stores nothing, if the budget or the disk has no room.

        Raises OSError: the folder can no longer be written to.
        """
        nbytes = sum(map(len, pieces)) + SEAL_BYTES
        if nbytes > self.budget_bytes:
            return False
        path = self._path(name)
        # Not mkstemp: its files are private to one user, and servers of several users may share a folder.
        temporary = self.folder / f"{uuid.uuid4().hex}{_UNFINISHED}"
        try:
            if not self._reserve(temporary, nbytes):
                return False
            with temporary.open("r+b") as file:
                write_with_seal(file, pieces, path.name)
            with self._locked():
                self._used -= _size(path)  # another process may have stored the same file meanwhile
                self._sound.discard(identity_of(path))
                temporary.replace(path)
            self.failure = None
            return True
        except BaseException as error:
            self._remove(temporary)
            if not isinstance(error, OSError):
                raise
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self.failure = error.strerror or str(error)
                raise
            if self._warnings.is_due():
                log.warning(
                    "%s: %s; older blocks are removed to make room. Jobs go on; blocks that do not fit are decoded each time "
                    "they are needed. Free disk space, or name another folder with --cache-dir.",
                    self.folder,
                    error.strerror,
                )
            with suppress(OSError), self._locked():
                self._evict(self._used - nbytes - self._used // SPARE)
            return False

    def make_room_for_packing(self, nbytes: int) -> None:
        """Removes the packings used longest ago, until all take a quarter of the budget with another one of `nbytes`.

        Raises OSError. A packing in use stays in memory.
        """
        with self._locked():
            packed = sorted(
                (entry.stat().st_mtime, entry.stat().st_size, entry.path)
                for entry in os.scandir(self.folder)
                if PACKED in entry.name
            )
            total = nbytes + sum(size for _, size, _ in packed)
            for _, size, path in packed:
                if total <= self.budget_bytes // _PACKED_SHARE:
                    break
                Path(path).unlink(missing_ok=True)
                total -= size
                self._used -= size

    def count_packing(self, path: Path) -> None:
        """Counts a file that was stored beside the blocks. Raises OSError."""
        with self._locked():
            self._used += _size(path)

    def _reserve(self, temporary: Path, nbytes: int) -> bool:
        """Creates a temporary file, which reserves its room on the disk and in the budget. Returns False without room."""
        with self._locked():
            if self._used + nbytes > self.budget_bytes:
                self._evict(self.budget_bytes - nbytes - self.budget_bytes // SPARE)
                if self._used + nbytes > self.budget_bytes:
                    return False
            handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(handle, 0, nbytes)
                else:  # macOS: a full disk raises when the bytes are written
                    os.ftruncate(handle, nbytes)
            except OSError:
                temporary.unlink()  # before it is counted
                raise
            finally:
                os.close(handle)
            self._used += nbytes
        return True

    def drop(self, name: str) -> None:
        """Removes a file; ignores OSError."""
        self._remove(self._path(name))

    def _remove(self, path: Path) -> None:
        with suppress(OSError), self._locked():
            self._unlink(path)

    def _evict(self, target_bytes: int) -> None:
        """Removes the least recently used files until at most `target_bytes` are in use."""
        for entry in sorted(self._recount(), key=lambda entry: entry.stat().st_mtime):
            if self._used <= target_bytes:
                return
            self._unlink(Path(entry.path))
            self.metrics.cache_evictions.inc()
            self.evicted.append(entry.name.removesuffix(SUFFIX))

    def _unlink(self, path: Path) -> None:
        self._sound.discard(identity_of(path))  # before its inode is another file's
        size = _size(path)
        path.unlink(missing_ok=True)
        self._used -= size

    def _recount(self) -> list[os.DirEntry[str]]:
        """Counts the bytes in the folder, also after a crash. Removes temporary files of crashes; returns the whole files."""
        self._used, whole = 0, []
        for entry in os.scandir(self.folder):
            if not (PACKED in entry.name or entry.name.endswith((SUFFIX, TEMPORARY))):
                continue
            try:
                stat = entry.stat()
            except FileNotFoundError:  # files of counts are written here without the lock
                continue
            if entry.name.endswith(TEMPORARY) and time.time() - stat.st_mtime > ABANDONED_SECONDS:
                Path(entry.path).unlink(missing_ok=True)
            elif PACKED in entry.name or entry.name.endswith((SUFFIX, _UNFINISHED)):  # other counts are outside the budget
                self._used += stat.st_size
                whole += [entry] * entry.name.endswith(SUFFIX)
        return whole

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks the folder for this process and thread; writes the count back at the end, unless an error is raised."""
        # Opened each time: an operator may have removed the folder.
        self.folder.mkdir(parents=True, exist_ok=True)
        file = os.open(self.folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with self._threads:  # on network disks a lock excludes other processes, not other threads
                fcntl.flock(file, fcntl.LOCK_EX)
                if content := os.pread(file, _COUNT.size, 0):
                    self._used = _parse_count(content)
                else:
                    self._recount()
                yield
                os.pwrite(file, _COUNT.pack(self._used), 0)
        finally:
            os.close(file)  # releases the lock

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"


def _parse_count(content: bytes) -> int:
    return int(_COUNT.unpack(content.ljust(_COUNT.size, b"\0"))[0])


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class Maps:
    """Blocks of a cache folder by key, with the most recently used ones mapped; others may be in a shared store.

    For all threads.
    """

    def __init__(self, cache: CacheFolder, shared: SharedStore | None = None) -> None:
        self.cache, self.shared = cache, shared
        self._lock = threading.Lock()
        self._open = OrderedDict[str, tuple[Block, float]]()  # each with the time of its last touch
        self._checked_at = time.monotonic()
        self._warnings = Seldom()

    def __len__(self) -> int:
        return len(self._open)

    def known(self, keys: Sequence[str]) -> list[Block | None]:
        """Returns the blocks of these keys; None for blocks never mapped here, which must be read first."""
        now = time.monotonic()
        with self._lock:  # once for all keys: under contention, taking the lock costs more than the work under it
            blocks = [self._open.get(key, (None, now)) for key in keys]
            # Order by use only needs a resolution of _TOUCH_SECONDS.
            long_ago = [key for key, (_, touched_at) in zip(keys, blocks, strict=True) if touched_at < now - _TOUCH_SECONDS]
            for key in long_ago:
                self._keep(key, self._open[key][0])
        # Touch the files: otherwise a block in constant use would look least recently used. Drop maps of files that another
        # process removed: they hold disk space that no budget counts.
        self._close(key for key in long_ago if not self.cache.touch(key))
        return [block or self._map(key, self.cache.read_again(key)) for key, (block, _) in zip(keys, blocks, strict=True)]

    def read(self, key: str) -> Block | None:
        """Returns a stored block, and reads its file if it was never mapped here; None if it is not stored or damaged.

        A block that only the shared store has is stored here, too.
        """
        block = self._map(key, self.cache.read(key))
        if block is None and self.shared and (body := self.shared.get(f"{key}{SUFFIX}")) is not None:
            # Not kept without a file: thousands of blocks fit into the address space, not into memory.
            block = (self._map(key, self.cache.read(key)) if self._store(key, [body]) else None) or _parse(pa.py_buffer(body))
        return block

    def write(self, key: str, batch: pa.RecordBatch) -> int:
        """Stores a block. Returns its bytes, or 0 if the cache does not keep it."""
        pieces = _pieces(batch)
        if self.shared:
            self.shared.put(f"{key}{SUFFIX}", pieces)
        return sum(map(len, pieces)) if self._store(key, pieces) else 0

    def share(self, shared: SharedStore, key: str, make: Callable[[], pa.RecordBatch]) -> Block:
        """Returns a block that the shared store has from then on: from there, from the cache, or made. Raises OSError."""
        name = f"{key}{SUFFIX}"
        if (body := shared.get(name)) is not None:
            return _parse(pa.py_buffer(body))
        if (content := self.cache.read(key)) is not None:
            shared.write(name, [content])
            return _parse(content)
        batch = make()
        shared.write(name, _pieces(batch))
        return Block.of(batch)

    def _store(self, key: str, pieces: Sequence[Piece]) -> bool:
        try:
            return self.cache.write(key, *pieces)
        except OSError as error:
            if self._warnings.is_due():
                log.warning("the block cache cannot be written to: %s; blocks are decoded each time they are needed", error)
            return False
        finally:
            self.let_go()

    def _map(self, key: str, content: pa.Buffer | None) -> Block | None:
        if content is None:
            return None
        if content.size:  # otherwise the kernel reads up to megabytes around each row, and evicts pages that others need
            _advise(content.address, content.size, mmap.MADV_RANDOM)
        try:
            block = _parse(content)
        except MemoryError:
            raise
        except (pa.ArrowException, KeyError, StopIteration) as error:
            log.warning("the cached block %s is damaged and will be made again: %s", key, error)
            self.cache.metrics.cache_corrupt_blocks.inc()
            self.cache.drop(key)
            return None
        with self._lock:
            self._keep(key, block)
            while len(self._open) > _OPEN_BLOCKS:
                self._open.popitem(last=False)
        return block

    def _keep(self, key: str, block: Block) -> None:
        self._open[key] = block, time.monotonic()
        self._open.move_to_end(key)

    def _close(self, keys: Iterable[str]) -> None:
        for key in keys:
            with self._lock:
                self._open.pop(key, None)

    def let_go(self) -> None:
        """Closes the maps of evicted files: until then they hold disk space that the budget no longer counts."""
        with suppress(IndexError):
            while True:
                self._close([self.cache.evicted.popleft()])
        if time.monotonic() - self._checked_at >= _TOUCH_SECONDS:
            self._checked_at = time.monotonic()
            with self._lock:
                keys = list(self._open)
            self._close([key for key in keys if not self.cache.has(key)])  # removed by another process


def _parse(content: pa.Buffer) -> Block:
    return Block.of(pa.ipc.open_stream(content).read_next_batch())


def _pieces(batch: pa.RecordBatch) -> list[Piece]:
    stream = _Pieces()
    with pa.ipc.new_stream(stream, batch.schema) as writer:
        writer.write_batch(batch)
    return stream.pieces


class _Pieces(RawIOBase):
    """Pieces of a written stream. They are not joined: that would copy each block once more."""

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
