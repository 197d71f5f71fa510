"""Cache folder: sealed files within a byte budget, evicted least recently used first, shared by any number of processes.

All processes share one count of the bytes in use and being written. One process at a time evicts files.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import shutil
import struct
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from penstock_server.checksummed import (
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

_NAME = ".lock"
_NUMBER = struct.Struct("<q")
_PATIENCE_SECONDS = 30.0  # wait for the lock: a stopped holder would block all others
_POLL_SECONDS = 0.002


@dataclass(slots=True)
class Used:
    """Bytes in use; the holder of the lock may change them."""

    bytes: int


class SharedCount:
    """Count of one folder, for any number of threads. Raises OSError: its file cannot be created."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads = threading.Lock()
        self._patience_seconds = _PATIENCE_SECONDS
        self._file = self._open()
        weakref.finalize(self, os.close, self._file).atexit = False  # threads may use it until then

    @property
    def bytes(self) -> int:
        """The count written by the last holder of the lock."""
        return int(_NUMBER.unpack(os.pread(self._file, _NUMBER.size, 0).ljust(_NUMBER.size, b"\0"))[0])

    def now(self) -> float:
        """Returns the time of the clock that sets the folder's mtimes; a file server's may differ from ours by minutes."""
        os.utime(self._file)
        return os.fstat(self._file).st_mtime

    @contextmanager
    def held(self, recount: Callable[[], int]) -> Iterator[Used]:
        """Locks the folder for this process and thread; writes the count back at the end, unless an error is raised.

        `recount` returns the bytes if the file is new. Raises OSError: another process has held the lock for thirty seconds;
        until it releases the lock, later calls raise at once.
        """
        with self._threads:  # the file lock belongs to the process, so it does not exclude its other threads
            self._follow()
            deadline = time.monotonic() + self._patience_seconds
            while not self._has_locked():
                if time.monotonic() >= deadline:
                    self._patience_seconds = 0.0  # otherwise each block would wait as long
                    raise OSError(errno.EBUSY, "another process holds it, and may have been stopped", str(self._folder))
                time.sleep(_POLL_SECONDS)
            self._patience_seconds = _PATIENCE_SECONDS
            try:
                is_new = not os.fstat(self._file).st_size
                used = Used(recount() if is_new else self.bytes)
                yield used
                os.pwrite(self._file, _NUMBER.pack(used.bytes), 0)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _open(self) -> int:
        return os.open(self._folder / _NAME, os.O_RDWR | os.O_CREAT, 0o666)

    def _follow(self) -> None:
        """Reopens the lock file if the folder was removed: other processes then lock and count in a new file."""
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._file), (self._folder / _NAME).stat()):
                return
        self._folder.mkdir(parents=True, exist_ok=True)
        opened = self._open()
        os.dup2(opened, self._file)
        os.close(opened)

    def _has_locked(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


log = logging.getLogger("penstock.cache")

_SUFFIX = ".block"
_UNFINISHED = f"{_SUFFIX}{TEMPORARY}"
_NEWS = 0.9  # a budget reduced by less than 10 % is not logged again
_KNOWN_FILES = 1 << 18  # files with a verified seal, some 60 bytes each: a terabyte of blocks
_LOOK_SECONDS = 30.0  # interval of checks for free space after a full disk lowered the budget
_FUTURE_SECONDS = 60.0  # a file's mtime may be this far ahead of the folder's clock
_SPARE = 32  # eviction frees a 32nd of the budget at once, since it scans all files to find the oldest


class CacheFolder:
    """A folder of at most `budget_bytes`; None means half of the free space on its disk.

    Several processes may use one folder; they should have the same budget. Raises OSError: the folder cannot be used.
    """

    def __init__(self, folder: Path, budget_bytes: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.failure: str | None = None  # why the last file could not be stored; None if the only reason is lack of room
        self.evicted: deque[str] = deque()  # names of files that this process evicted; Maps takes them and closes its maps
        self._sound = Sound(_KNOWN_FILES)
        self._count = SharedCount(folder)
        with self._locked() as used:
            used.bytes = self._recount()
            free = shutil.disk_usage(folder).free
            self.budget_bytes = (free + used.bytes) // 2 if budget_bytes is None else budget_bytes
            self.configured_bytes = self.budget_bytes  # a full disk lowers budget_bytes for a time
            self._told_bytes = math.inf  # the budget last logged
            self._look_at = math.inf
            if used.bytes > self.budget_bytes:
                self._evict(used, self.budget_bytes)

    @property
    def remedy(self) -> str:
        """Advice for a folder without room: its budget may be small, or lowered by a full disk."""
        return "Raise --cache-bytes" if self.room_bytes == self.configured_bytes else "Free disk space"

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
            return self._count.bytes
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
        if time.monotonic() >= self._look_at:
            self._grow()
        if nbytes > self.budget_bytes:
            return False
        path = self._path(name)
        # Not mkstemp: its files are private to one user, and servers of several users may share a folder.
        temporary = self.folder / f"{uuid.uuid4().hex}{_UNFINISHED}"
        is_reserved = False
        try:
            is_reserved = self._reserve(temporary, nbytes)
            if not is_reserved:
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
            self._release(temporary, is_counted=is_reserved)
            if not isinstance(error, OSError):
                raise
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self.failure = error.strerror or str(error)
                raise
            self._shrink(error)
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
            finally:
                os.close(handle)
            used.bytes += nbytes
        return True

    def _release(self, temporary: Path, *, is_counted: bool) -> None:
        """Removes a temporary file, if it exists, even if the count cannot be updated; the next recount corrects the count."""
        with suppress(OSError):
            try:
                if is_counted:
                    with self._locked() as used:
                        used.bytes -= _size(temporary)
                        temporary.unlink(missing_ok=True)  # another process may have removed it as abandoned
            finally:
                temporary.unlink(missing_ok=True)

    def drop(self, name: str) -> None:
        """Removes a file; ignores OSError."""
        path = self._path(name)
        self._sound.forget(path)
        with suppress(OSError), self._locked() as used:
            size = _size(path)
            path.unlink(missing_ok=True)
            used.bytes -= size

    def _shrink(self, error: OSError) -> None:
        """Lowers the budget to the bytes in use after the disk filled up; jobs go on with fewer cached blocks."""
        self.budget_bytes = min(self.budget_bytes, self.used_bytes)
        self._look_at = time.monotonic() + _LOOK_SECONDS
        if self.budget_bytes >= _NEWS * self._told_bytes:
            return  # logged already: on a disk that others keep full every block fails
        self._told_bytes = self.budget_bytes
        has_no_files = self._has_no_files()
        log.warning(
            "%s: %s; the budget of the block cache is lowered to %s bytes. Jobs go on; blocks that do not fit are decoded "
            "each time they are needed. %s, or name another folder with --cache-dir.",
            self.folder,
            "its disk can hold no more files (inodes)" if has_no_files else error.strerror,
            f"{self.budget_bytes:,}",
            "Remove files from it" if has_no_files else "Free disk space",
        )

    def _has_no_files(self) -> bool:
        """Returns whether the disk has no free inodes; some file systems do not report them."""
        stat = os.statvfs(self.folder)
        return stat.f_files > 0 and stat.f_favail == 0

    def _grow(self) -> None:
        """Raises the budget again, by half of the free space, up to the configured budget."""
        self.folder.mkdir(parents=True, exist_ok=True)  # an operator who freed the disk may have removed it
        free = 0 if self._has_no_files() else shutil.disk_usage(self.folder).free
        room = self.used_bytes + free // 2
        self.budget_bytes = max(self.budget_bytes, min(self.configured_bytes, room))
        self._look_at = math.inf if self.budget_bytes == self.configured_bytes else time.monotonic() + _LOOK_SECONDS
        if _NEWS * self.budget_bytes > self._told_bytes:
            log.warning("%s has room again; the budget of the block cache is %s bytes", self.folder, f"{self.budget_bytes:,}")
            self._told_bytes = math.inf if self.budget_bytes == self.configured_bytes else self.budget_bytes

    def _evict(self, used: Used, target_bytes: int) -> None:
        """Removes the least recently used files until at most `target_bytes` are in use."""
        used.bytes = self._recount()  # also corrects the count after a crashed process
        # Only files: unlinking a directory of such a name would fail and end the eviction.
        entries = [entry for entry in os.scandir(self.folder) if entry.name.endswith(_SUFFIX) and entry.is_file()]
        latest = self.now() + _FUTURE_SECONDS

        def used_at(entry: os.DirEntry[str]) -> float:
            # A future mtime comes from a wrong clock. Taken as most recent, the file would stay while files in use are evicted.
            seconds = entry.stat().st_mtime
            return seconds if seconds <= latest else 0.0

        for entry in sorted(entries, key=used_at):
            if used.bytes <= target_bytes:
                return
            used.bytes -= entry.stat().st_size
            self._sound.forget(Path(entry.path))
            Path(entry.path).unlink(missing_ok=True)
            self.evicted.append(entry.name.removesuffix(_SUFFIX))

    def _recount(self) -> int:
        """Counts the bytes in the folder, and removes temporary files of crashed processes."""
        total = 0
        now = self.now()
        for entry in os.scandir(self.folder):
            if not entry.name.endswith((_SUFFIX, TEMPORARY)):
                continue
            try:
                stat = entry.stat()
            except FileNotFoundError:  # files of counts are written here without the lock
                continue
            if entry.name.endswith(TEMPORARY) and now - stat.st_mtime > ABANDONED_SECONDS:
                Path(entry.path).unlink(missing_ok=True)
            elif entry.name.endswith((_SUFFIX, _UNFINISHED)):  # files of counts, sometimes gigabytes, are outside the budget
                total += stat.st_size
        return total

    def now(self) -> float:
        """Returns the time of the clock that sets the mtimes of the folder's files. Raises OSError: its disk fails."""
        return self._count.now()

    def _locked(self) -> AbstractContextManager[Used]:
        return self._count.held(self._recount)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
