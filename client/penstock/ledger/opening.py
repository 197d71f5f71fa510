"""Opening a ledger to append to it: it is one, and no other process has it."""

from __future__ import annotations

import errno
import os
import re
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.errors import LedgerError
from penstock.ledger.begin import MAGIC, VERSION
from penstock.logs import log
from penstock.syncing import sync_folder

if sys.platform != "win32":
    import fcntl

_POLL_SECONDS = 0.02
_FLOCK = "hhqqi4x"  # Linux's struct flock of 64 bits: type, whence, start, length, process
_VERSION = re.compile(re.escape(MAGIC) + rb"(\d{1,9}),")


def open_ledger(path: Path, wait_seconds: float) -> int:
    """Open a ledger for append and lock it; wait at most `wait_seconds` for another writer process to end.

    Raises LedgerError: another process writes to it.
    """
    is_new = not path.exists()
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        _lock(fd, path, wait_seconds)
        if is_new:
            sync_folder(path.parent)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def telling(path: Path) -> Iterator[None]:
    """What the system refuses is a LedgerError that says which file, and what to do."""
    try:
        yield
    except OSError as error:
        is_elsewhere = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | PermissionError)
        remedy = "; name a file in a folder that is there, and that this user may write to" if is_elsewhere else ""
        raise LedgerError(cannot_be_written(path, error) + remedy) from error


def cannot_be_written(path: Path, error: OSError) -> str:
    """The sentence on a ledger that the system refuses to write."""
    return f"the ledger {path} cannot be written: {error.strerror or error}"


def _lock(fd: int, path: Path, wait_seconds: float) -> None:
    """A lock that ends with the process, and that a fork does not inherit. Raises LedgerError: another process has it."""
    deadline = time.monotonic() + wait_seconds
    try:
        while not has_locked(fd):
            if time.monotonic() >= deadline:
                raise LedgerError(
                    f"another process{_holder(fd)} writes to the ledger {path}: is the run that it belongs to still there? Of "
                    f"processes that share a rank, such as tensor-parallel peers, only one keeps the ledger"
                )
            time.sleep(_POLL_SECONDS)
    except OSError as error:
        log.warning("penstock: %s cannot be locked (%s): see to it that only one process writes to it", path, error.strerror)


def has_locked(fd: int) -> bool:
    """Whether this process has the lock on the file, from now on or for some time. Raises OSError: it cannot be locked."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _holder(fd: int) -> str:
    """The process that has the lock, as an apposition; nothing where the system does not tell, or it runs elsewhere."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        return ""
    with suppress(OSError):
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        *_, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        if pid > 0 and Path(f"/proc/{pid}").exists():
            return f", {pid},"
    return ""


def is_deleted(fd: int, path: Path) -> bool:
    """Whether the file that was opened is no more, by whatever name."""
    try:
        if os.fstat(fd).st_nlink:
            return False
    except OSError as error:
        return error.errno == errno.ESTALE  # on a file system that is shared
    try:
        return not os.path.samestat(os.fstat(fd), path.stat())  # there are file systems that count no links
    except OSError:
        return True


def close_last_line(fd: int, path: Path) -> None:
    """Ends a line that was cut off with a newline.

    Raises LedgerError: the file holds other things, or was begun by a penstock that writes other lines.
    """
    size = os.lseek(fd, 0, os.SEEK_END)
    # A first line may have been cut off, and a begin line come behind it.
    if not all(line.startswith(MAGIC) or MAGIC.startswith(line) for line in _read(fd, 0, len(MAGIC)).strip(b"\0").split(b"\n")):
        raise LedgerError(f"{path} is no ledger, and will not be written to: name another file")
    begun = _VERSION.search(_read(fd, 0, 4 * len(MAGIC)))
    if begun and int(begun[1]) != VERSION:
        raise LedgerError(
            f"{path} was begun by a penstock whose ledgers are of version {int(begun[1])}, and this one writes version "
            f"{VERSION}: no penstock could audit both in one file. Name another file, and audit this one with the penstock "
            f"that wrote it"
        )
    if size and _read(fd, size - 1, 1) != b"\n":
        os.write(fd, b"\n")


def _read(fd: int, start: int, nbytes: int) -> bytes:
    os.lseek(fd, start, os.SEEK_SET)
    return os.read(fd, nbytes)
