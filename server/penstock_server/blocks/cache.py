"""Cache folder: sealed files within a byte budget, evicted least recently used first, shared by any number of processes.

The lock file holds the bytes in use and being written. A process locks it to change them, and to evict files.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pyarrow as pa

from penstock_server.files import (
    ABANDONED_SECONDS,
    SEAL_BYTES,
    TEMPORARY,
    Damaged,
    Piece,
    Sound,
    is_there,
    map_sealed,
    write_with_seal,
)
from penstock_server.logs import Seldom

log = logging.getLogger("penstock.cache")

_SUFFIX = ".block"
_UNFINISHED = f"{_SUFFIX}{TEMPORARY}"
_LOCK_FILE = ".lock"
_COUNT = struct.Struct("<q")
_KNOWN_FILES = 1 << 18  # files with a verified seal, some 60 bytes each: a terabyte of blocks
_SPARE = 32  # eviction frees a 32nd at once, since it scans all files to find the oldest


@dataclass(slots=True)
class _Used:
    """Bytes in use; the holder of the lock may change them."""

    bytes: int


class CacheFolder:
    """A folder of at most `budget_bytes`; None means half of the free space on its disk.

    Several processes may use one folder; they should have the same budget. Raises OSError: the folder cannot be used.
    """

    def __init__(self, folder: Path, budget_bytes: int | None = None) -> None:
        self.folder = folder
        self.failure: str | None = None  # why the last file could not be stored; None if the only reason is lack of room
        self.evicted: deque[str] = deque()  # names of files that this process evicted; Maps takes them and closes its maps
        self.parsed: WeakValueDictionary[Path, Any] = WeakValueDictionary()  # counts in use, shared by all snapshots
        self._sound = Sound(_KNOWN_FILES)
        self._threads = threading.Lock()
        self._warnings = Seldom()
        with self._locked() as used:
            used.bytes = self._recount()
            free = shutil.disk_usage(folder).free
            self.budget_bytes = (free + used.bytes) // 2 if budget_bytes is None else budget_bytes
            if used.bytes > self.budget_bytes:
                self._evict(used, self.budget_bytes)

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
        """Maps the bytes stored under a name; None if the file does not exist, or was damaged and is now deleted.

        The map stays valid after the file is evicted.
        """
        try:
            body = map_sealed(self._path(name), self._sound)
        except Damaged as damage:
            log.warning("%s", damage)
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
        path = self._path(name)
        try:
            if not self._sound.has(path, path.stat()):
                return None
        except OSError:
            return None
        return self.read(name)

    def has(self, name: str) -> bool:
        """Returns whether a file of that name appears to exist; only `read` verifies its seal."""
        return is_there(self._path(name))

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
            with self._locked() as used:
                used.bytes -= _size(path)  # another process may have stored the same file meanwhile
                temporary.replace(path)
            self._sound.forget(path)
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
            with suppress(OSError), self._locked() as used:
                self._evict(used, used.bytes - nbytes - used.bytes // _SPARE)
            return False

    def _reserve(self, temporary: Path, nbytes: int) -> bool:
        """Creates a temporary file of this size, which reserves its room on the disk and in the budget.

        Returns False if files that others are writing now leave no room for it.
        """
        with self._locked() as used:
            if used.bytes + nbytes > self.budget_bytes:
                self._evict(used, self.budget_bytes - nbytes - self.budget_bytes // _SPARE)
                if used.bytes + nbytes > self.budget_bytes:
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
            used.bytes += nbytes
        return True

    def drop(self, name: str) -> None:
        """Removes a file; ignores OSError."""
        self._remove(self._path(name))

    def _remove(self, path: Path) -> None:
        self._sound.forget(path)
        with suppress(OSError), self._locked() as used:
            size = _size(path)
            path.unlink(missing_ok=True)
            used.bytes -= size

    def _evict(self, used: _Used, target_bytes: int) -> None:
        """Removes the least recently used files until at most `target_bytes` are in use."""
        used.bytes = self._recount()  # also corrects the count after a crashed process
        entries = [entry for entry in os.scandir(self.folder) if entry.name.endswith(_SUFFIX)]
        for entry in sorted(entries, key=lambda entry: entry.stat().st_mtime):
            if used.bytes <= target_bytes:
                return
            used.bytes -= entry.stat().st_size
            self._sound.forget(Path(entry.path))
            Path(entry.path).unlink(missing_ok=True)
            self.evicted.append(entry.name.removesuffix(_SUFFIX))

    def _recount(self) -> int:
        """Counts the bytes in the folder, and removes temporary files of crashed processes."""
        total = 0
        for entry in os.scandir(self.folder):
            if not entry.name.endswith((_SUFFIX, TEMPORARY)):
                continue
            try:
                stat = entry.stat()
            except FileNotFoundError:  # files of counts are written here without the lock
                continue
            if entry.name.endswith(TEMPORARY) and time.time() - stat.st_mtime > ABANDONED_SECONDS:
                Path(entry.path).unlink(missing_ok=True)
            elif entry.name.endswith((_SUFFIX, _UNFINISHED)):  # files of counts, sometimes gigabytes, are outside the budget
                total += stat.st_size
        return total

    @contextmanager
    def _locked(self) -> Iterator[_Used]:
        """Locks the folder for this process and thread; writes the count back at the end, unless an error is raised."""
        # Opened each time: an operator may have removed the folder.
        self.folder.mkdir(parents=True, exist_ok=True)
        file = os.open(self.folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with self._threads:  # on network disks a lock excludes other processes, not other threads
                fcntl.flock(file, fcntl.LOCK_EX)
                content = os.pread(file, _COUNT.size, 0)
                used = _Used(_parse_count(content) if content else self._recount())
                yield used
                os.pwrite(file, _COUNT.pack(used.bytes), 0)
        finally:
            os.close(file)  # releases the lock

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"


def _parse_count(content: bytes) -> int:
    return int(_COUNT.unpack(content.ljust(_COUNT.size, b"\0"))[0])


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
