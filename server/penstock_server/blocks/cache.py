"""The cache folder: files of bytes within a budget, least recently used out first, shared by any number of processes.

A file is sealed. The bytes in use, and those that are being written, are counted for all processes, and one at a time makes
room.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import time
import uuid
from collections import deque
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pyarrow as pa

from penstock_server.blocks.mmap_hints import expect_few
from penstock_server.blocks.shared_count import SharedCount, Used
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

log = logging.getLogger("penstock.cache")

_SUFFIX = ".block"
_UNFINISHED = f"{_SUFFIX}{TEMPORARY}"
_NEWS = 0.9  # a budget that is lowered by less is not worth another line in the log
_KNOWN_FILES = 1 << 18  # to be sound, in some 60 bytes each: a terabyte of blocks
_LOOK_SECONDS = 30.0  # after a full disk lowered the budget, and between looks whether there is room again
_FUTURE_SECONDS = 60.0  # that a file's date may be ahead of the folder's clock
_SPARE = 32  # making room frees a 32nd of the budget at once: finding the oldest files takes a look at all of them


class CacheFolder:
    """A folder of at most `budget_bytes`; None means half of what is free on its disk.

    Safe with several processes on one folder; they should have the same budget. Raises OSError: the folder cannot be used.
    """

    def __init__(self, folder: Path, budget_bytes: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.failure: str | None = None  # why the last file could not be stored, where that is not that there is no room
        self.evicted: deque[str] = deque()  # names of files that this process removed; Maps takes them and closes theirs
        self._sound = Sound(_KNOWN_FILES)
        self._count = SharedCount(folder)
        with self._locked() as used:
            used.bytes = self._recount()
            free = shutil.disk_usage(folder).free
            self.budget_bytes = (free + used.bytes) // 2 if budget_bytes is None else budget_bytes
            self.configured_bytes = self.budget_bytes  # a full disk lowers the budget, for a time
            self._told_bytes = math.inf  # as the log has it since
            self._look_at = math.inf
            if used.bytes > self.budget_bytes:
                self._evict(used, self.budget_bytes)

    @property
    def remedy(self) -> str:
        """What to do where it has no room: its budget may be small, or lowered by a full disk."""
        return "Raise --cache-bytes" if self.room_bytes == self.configured_bytes else "Free disk space"

    @property
    def room_bytes(self) -> int:
        """Bytes of blocks that it can hold now: its budget, or less where the disk is full."""
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError:
            return self.budget_bytes
        return min(self.budget_bytes, self.used_bytes + free)

    @property
    def used_bytes(self) -> int:
        """The bytes of all files in the folder, as counted by all processes; 0 where its disk fails."""
        try:
            return self._count.bytes
        except OSError:
            return 0

    def read(self, name: str) -> pa.Buffer | None:
        """The bytes stored under a name, mapped into memory, or None: there is no such file, or it was damaged and is gone.

        The map stays good when the file is evicted.
        """
        try:
            body = map_sealed(self._path(name), self._sound)
        except Damaged as damage:
            log.warning("%s", damage)
            self.drop(name)
            return None
        if body is not None:
            self.touch(name)
            expect_few(body)
        return body

    def read_again(self, name: str) -> pa.Buffer | None:
        """What `read` gave before, if the file is still there: to map it takes no reading. None: it is not, or is not known."""
        path = self._path(name)
        try:
            if not self._sound.has(path, path.stat()):
                return None
        except OSError:
            return None
        return self.read(name)

    def has(self, name: str) -> bool:
        """Whether there is a file of that name, as far as can be told; `read` finds out whether it is sound."""
        return is_there(self._path(name))

    def touch(self, name: str) -> bool:
        """Marks a file as used now. False: it is there no more."""
        try:
            os.utime(self._path(name))
        except FileNotFoundError:  # evicted, by another process too
            return False
        except OSError:  # a folder that became read-only
            pass
        return True

    def write(self, name: str, *pieces: Piece) -> bool:
        """Stores bytes, piece after piece, under a name. False: nothing is stored, as the budget or the disk has no room.

        Raises OSError: the folder can no longer be written to.
        """
        nbytes = sum(map(len, pieces)) + SEAL_BYTES
        if time.monotonic() >= self._look_at:
            self._grow()
        if nbytes > self.budget_bytes:
            return False
        path = self._path(name)
        # Not mkstemp: its files are for one user only, and servers of several users may share a folder.
        temporary = self.folder / f"{uuid.uuid4().hex}{_UNFINISHED}"
        is_reserved = False
        try:
            is_reserved = self._reserve(temporary, nbytes)
            if not is_reserved:
                return False
            with temporary.open("r+b") as file:
                write_with_seal(file, pieces, path.name)
            with self._locked() as used:
                used.bytes -= _size(path)  # another process stored the same meanwhile
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
        """Makes a temporary file of this size: its room is taken, on the disk and in the budget, before the bytes are there.

        False: others write so much at this moment that there is no room for it.
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
                else:  # macOS: a disk that has no room for it says so when the bytes are written
                    os.ftruncate(handle, nbytes)
            finally:
                os.close(handle)
            used.bytes += nbytes
        return True

    def _release(self, temporary: Path, *, is_counted: bool) -> None:
        """Removes a temporary file, if there is one, also where it cannot be counted off: who counts anew mends that."""
        with suppress(OSError):
            try:
                if is_counted:
                    with self._locked() as used:
                        used.bytes -= _size(temporary)
                        temporary.unlink(missing_ok=True)  # to another process it may have looked abandoned
            finally:
                temporary.unlink(missing_ok=True)

    def drop(self, name: str) -> None:
        """Removes a file, if it can be."""
        path = self._path(name)
        self._sound.forget(path)
        with suppress(OSError), self._locked() as used:
            size = _size(path)
            path.unlink(missing_ok=True)
            used.bytes -= size

    def _shrink(self, error: OSError) -> None:
        """A full disk lowers the budget to what is used now: jobs go on, with fewer blocks kept."""
        self.budget_bytes = min(self.budget_bytes, self.used_bytes)
        self._look_at = time.monotonic() + _LOOK_SECONDS
        if self.budget_bytes >= _NEWS * self._told_bytes:
            return  # it was said: on a disk that others keep full each block fails
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
        """Whether the disk can hold no more files, however small; some tell nothing of that."""
        stat = os.statvfs(self.folder)
        return stat.f_files > 0 and stat.f_favail == 0

    def _grow(self) -> None:
        """Where the disk has room again, half of it may be used, up to the budget that there was."""
        self.folder.mkdir(parents=True, exist_ok=True)  # who freed the disk may have removed it
        free = 0 if self._has_no_files() else shutil.disk_usage(self.folder).free
        room = self.used_bytes + free // 2
        self.budget_bytes = max(self.budget_bytes, min(self.configured_bytes, room))
        self._look_at = math.inf if self.budget_bytes == self.configured_bytes else time.monotonic() + _LOOK_SECONDS
        if _NEWS * self.budget_bytes > self._told_bytes:
            log.warning("%s has room again; the budget of the block cache is %s bytes", self.folder, f"{self.budget_bytes:,}")
            self._told_bytes = math.inf if self.budget_bytes == self.configured_bytes else self.budget_bytes

    def _evict(self, used: Used, target_bytes: int) -> None:
        """Removes the files that were used longest ago until at most `target_bytes` are in use."""
        used.bytes = self._recount()  # also mends what a crashed process left uncounted
        # What is no file but has such a name could not be removed, and nothing after it would be.
        entries = [entry for entry in os.scandir(self.folder) if entry.name.endswith(_SUFFIX) and entry.is_file()]
        latest = self.now() + _FUTURE_SECONDS

        def used_at(entry: os.DirEntry[str]) -> float:
            # A date ahead is of a clock that was wrong. Taken for the last to be used, it would stay, and what is used now go.
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
        """The bytes in the folder; what crashed processes left half written is removed."""
        total = 0
        now = self.now()
        for entry in os.scandir(self.folder):
            if not entry.name.endswith((_SUFFIX, TEMPORARY)):
                continue
            try:
                stat = entry.stat()
            except FileNotFoundError:  # of counts, which are written here too, without the lock
                continue
            if entry.name.endswith(TEMPORARY) and now - stat.st_mtime > ABANDONED_SECONDS:
                Path(entry.path).unlink(missing_ok=True)
            elif entry.name.endswith((_SUFFIX, _UNFINISHED)):  # counts, gigabytes sometimes, are outside of the budget
                total += stat.st_size
        return total

    def now(self) -> float:
        """The time by the clock that dates the folder's files. Raises OSError: its disk fails."""
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
