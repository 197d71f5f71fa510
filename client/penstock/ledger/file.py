"""A ledger's file as one process appends to it: for all iterations that do, one descriptor, and one queue of what waits.

What the system does not take waits in memory, line by line in the order in which it came, until a later line, the next sync or
the next iteration finds that it can be written. A begin line is put before the first line of an iteration, and before the
first one that comes behind lines of another, when they are written: what the file holds then decides.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import LedgerError
from penstock.ledger.begin import MAGIC

if sys.platform != "win32":
    import fcntl

log = logging.getLogger("penstock")

_MOST_WAITING_BYTES = 16 << 20
_WRITE_BYTES = 1 << 16
_POLL_SECONDS = 0.02


@dataclass(slots=True)
class _Lines:
    """Lines of one iteration that wait, each with its newline. Its begin line may be among them, as the first."""

    begin: str
    text: bytearray = field(default_factory=bytearray)

    def begin_anew(self) -> None:
        """They are written behind their begin line."""
        begin = f"{self.begin}\n".encode()
        if not self.text.startswith(begin):
            self.text[:0] = begin


class LedgerFile:
    """One file. Any thread may append to it; see hold_ledger for how one is had."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_holders = 0
        self.wait_seconds = 0.0  # that another process which writes to it has to end, when it is opened for the first time
        self._fd = -1
        self._begin = ""  # the last begin line that this descriptor wrote
        self._waiting: deque[_Lines] = deque()
        self._num_bytes = 0  # that were put there
        self._num_torn = 0  # of the first line that waits so many bytes are in the file
        self._is_torn = False  # the file ends with a part of a line that no longer waits
        self._num_lost = 0
        self._failure = ""
        self._writing = threading.Lock()
        self._syncing = threading.Lock()  # before `_writing`, where one has both

    def check(self) -> None:
        """Raises LedgerError: it cannot be written, holds other things, or another process writes to it."""
        with self._writing:
            self._open()

    def append(self, begin: str, line: str = "") -> None:
        """Writes a line of an iteration with this begin line; or that alone, if it is not the last in the file.

        Never raises for a disk that cannot be written: then it waits, as long as there is room.
        """
        with self._writing:
            if self._num_bytes < _MOST_WAITING_BYTES:
                self._put(begin, line)
            else:
                self._num_lost += 1
            self._write_what_it_takes()

    def begin(self, begin: str) -> None:
        """Writes a begin line. Raises LedgerError: it cannot be written, and nothing that waits is later."""
        with self._writing:
            self._put(begin, "")
            try:
                self._write()
            except (LedgerError, OSError) as error:
                self._take_back()
                raise _told(self.path, error) from error

    def sync(self) -> None:
        """Has the disk write what was appended, and tries again to write what waits."""
        with self._syncing:
            with self._writing:
                self._leave_if_deleted()
                self._write_what_it_takes()
                fd = self._fd
            try:
                if fd >= 0:
                    os.fsync(fd)
            except OSError as error:
                log.error("penstock: %s", _cannot_be_written(self.path, error))

    def close(self) -> None:
        """Other processes may write to it. What waits is kept, for the next that holds it."""
        with self._writing:
            self._close()
            if self._num_lost:
                log.error("penstock: %d lines are not in the ledger %s", self._num_lost, self.path)
            if self._waiting:
                log.error(
                    "penstock: %d lines are not in the ledger %s yet: they wait for another iteration of this process",
                    sum(max(1, lines.text.count(b"\n")) for lines in self._waiting),
                    self.path,
                )
            self._num_lost = 0

    @property
    def has_waiting(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._waiting)

    def _put(self, begin: str, line: str) -> None:
        if not self._waiting or self._waiting[-1].begin != begin:
            self._num_bytes += len(begin) if self._waiting else 0
            self._waiting.append(_Lines(begin))
        if line:
            self._waiting[-1].text += f"{line}\n".encode()
            self._num_bytes += len(line) + 1

    def _take_back(self) -> None:
        """What was put last, of which a part may be in the file, no longer waits."""
        self._waiting.pop()
        if not self._waiting:
            self._is_torn = self._is_torn or self._num_torn > 0
            self._begin, self._num_bytes, self._num_torn = "", 0, 0

    def _write_what_it_takes(self) -> None:
        """Gives the system what waits, as far as it takes it."""
        try:
            self._write()
        except (LedgerError, OSError) as error:
            failure = str(_told(self.path, error))
            if not self._failure:
                log.error("penstock: %s. Training goes on; the audit will miss what is not written.", failure)
            self._failure = failure
        else:
            if self._failure:
                log.warning("penstock: the ledger %s is written again; %d lines are lost", self.path, self._num_lost)
            self._failure = ""

    def _write(self) -> None:
        if not self._waiting:
            return
        self._open()
        if self._is_torn:
            os.write(self._fd, b"\n")
            self._is_torn = False
        while self._waiting:
            lines = self._waiting[0]
            if lines.begin != self._begin:
                lines.begin_anew()
                self._begin = lines.begin
            while lines.text:
                self._num_torn += os.write(self._fd, lines.text[self._num_torn : self._num_torn + _WRITE_BYTES])
                whole = lines.text.rfind(b"\n", 0, self._num_torn) + 1
                del lines.text[:whole]
                self._num_torn -= whole
            self._waiting.popleft()
        self._num_bytes = 0

    def _open(self) -> None:
        """Has it open, behind a newline. Raises LedgerError: see check."""
        if self._fd >= 0:
            return
        wait_seconds, self.wait_seconds = self.wait_seconds, 0.0
        with _telling(self.path):
            fd = _open(self.path, wait_seconds)
            try:
                _close_last_line(fd, self.path)
            except BaseException:
                os.close(fd)
                raise
        self._fd = fd

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._begin, self._num_torn, self._is_torn = -1, "", 0, False

    def _leave_if_deleted(self) -> None:
        if self._fd >= 0 and _is_deleted(self._fd, self.path):
            log.error(
                "penstock: the ledger %s was deleted while it was written: what it held is lost, and the audit will miss it. "
                "Further lines go to a new one.",
                self.path,
            )
            self._close()


def hold_ledger(path: Path, wait_seconds: float = 0.0) -> LedgerFile:
    """The file of this path, which this process does not close before all that hold it have given it back.

    From its first line on no other process writes to it. One that does by then has so long to end.
    """
    with _files_lock:
        file = _files.setdefault((os.getpid(), path), LedgerFile(path))
        file.num_holders += 1
        file.wait_seconds = wait_seconds
        return file


def release_ledger(file: LedgerFile) -> None:
    """One holder of this process is done; after the last the file is closed, and others may write to it."""
    with _files_lock:
        file.num_holders -= 1
        if not file.num_holders:
            file.close()
            if not file.has_waiting:
                del _files[os.getpid(), file.path]


# By process, so that what a fork inherits is nobody's. One descriptor for all iterations: who closes any of a file's gives up
# all locks that his process has on it.
_files: dict[tuple[int, Path], LedgerFile] = {}
_files_lock = threading.Lock()


def _write_what_waits() -> None:
    """Of iterations that are over, when the interpreter exits."""
    for (pid, path), file in list(_files.items()):
        if pid == os.getpid() and not file.num_holders:
            hold_ledger(path)
            file.sync()
            release_ledger(file)


atexit.register(_write_what_waits)


def _renew_lock() -> None:
    """In a process that was forked off: a thread that had the lock, to give a file back, is not in there."""
    global _files_lock
    _files_lock = threading.Lock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_renew_lock)


def _open(path: Path, wait_seconds: float) -> int:
    is_new = not path.exists()
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        _lock(fd, path, wait_seconds)
        if is_new:
            _sync_folder(path.parent)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        is_elsewhere = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | PermissionError)
        way_out = "; name a file in a folder that is there, and that this user may write to" if is_elsewhere else ""
        raise LedgerError(_cannot_be_written(path, error) + way_out) from error


def _cannot_be_written(path: Path, error: OSError) -> str:
    return f"the ledger {path} cannot be written: {error.strerror or error}"


def _told(path: Path, error: LedgerError | OSError) -> LedgerError:
    return error if isinstance(error, LedgerError) else LedgerError(_cannot_be_written(path, error))


def _lock(fd: int, path: Path, wait_seconds: float) -> None:
    """A lock that ends with the process, and that a fork does not inherit. Raises LedgerError: another process has it."""
    if sys.platform == "win32":
        return
    deadline = time.monotonic() + wait_seconds
    try:
        while not _has_locked(fd):
            if time.monotonic() >= deadline:
                raise LedgerError(
                    f"another process writes to the ledger {path}: is the run that it belongs to still there? Of processes "
                    f"that share a rank, such as tensor-parallel peers, only one keeps the ledger"
                )
            time.sleep(_POLL_SECONDS)
    except OSError as error:
        log.warning("penstock: %s cannot be locked (%s): see to it that only one process writes to it", path, error.strerror)


def _has_locked(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _is_deleted(fd: int, path: Path) -> bool:
    try:
        if os.fstat(fd).st_nlink:
            return False
    except OSError as error:
        return error.errno == errno.ESTALE  # on a file system that is shared
    try:
        return not os.path.samestat(os.fstat(fd), path.stat())  # there are file systems that count no links
    except OSError:
        return True


def _close_last_line(fd: int, path: Path) -> None:
    size = os.lseek(fd, 0, os.SEEK_END)
    head = _read(fd, 0, len(MAGIC)).strip(b"\0\n")
    if not (head.startswith(MAGIC) or MAGIC.startswith(head)):
        raise LedgerError(f"{path} is no ledger, and will not be written to: name another file")
    if size and _read(fd, size - 1, 1) != b"\n":
        os.write(fd, b"\n")


def _read(fd: int, start: int, nbytes: int) -> bytes:
    os.lseek(fd, start, os.SEEK_SET)
    return os.read(fd, nbytes)


def _sync_folder(folder: Path) -> None:
    if sys.platform == "win32":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
