"""Shared count of the bytes in use in a folder: all processes keep it in the lock file, and lock that to change it."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

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
