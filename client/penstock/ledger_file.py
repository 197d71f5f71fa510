"""The files of a ledger: which one a process writes to, which there are, and how one is opened to be appended to."""

from __future__ import annotations

import glob
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import LedgerError

if sys.platform != "win32":
    import fcntl

log = logging.getLogger("penstock")

MAGIC = b'begin {"ledger": '
_RANK = "{rank}"
_POLL_SECONDS = 0.02


def ledger_path(ledger: str | os.PathLike[str], rank: int, worker: int | None = None) -> Path:
    """The file of one process: the path with the rank for {rank}; else the path for rank 0, path.1 for rank 1, ...

    A loader's worker writes to path.worker0, or to path.1.worker0.
    """
    path = os.fspath(ledger)
    path = path.replace(_RANK, str(rank)) if _RANK in path else path + (f".{rank}" if rank else "")
    return Path(path + ("" if worker is None else f".worker{worker}")).absolute()


def find_ledgers(ledger: str | os.PathLike[str]) -> list[Path]:
    """The files that are there, of all ranks and workers, for a path as RemoteDataset takes it; or those of one rank."""
    path = Path(ledger).absolute()
    pieces = str(path.relative_to(path.anchor)).split(_RANK)
    rank, behind = (r"\d+", "") if len(pieces) > 1 else ("", r"(\.\d+)?")
    pattern = re.compile(rank.join(map(re.escape, pieces)) + behind + r"(\.worker\d+)?")
    wildcards = "*".join([*map(glob.escape, pieces), ""])
    found = Path(path.anchor).glob(re.sub(r"\*+", "*", wildcards))  # two stars would be another thing
    return sorted(one for one in found if pattern.fullmatch(str(one.relative_to(path.anchor))) and one.is_file())


def hold_ledger(path: Path, wait_seconds: float = 0.0) -> int:
    """A descriptor that appends to a file after a newline, for one more holder in this process.

    No other process writes to the file while it is held. One that does has so long to end.
    Raises LedgerError: the file cannot be written, holds other things, or another process writes to it.
    """
    with _files_lock, _telling(path):
        held = _files.get((os.getpid(), path)) or _File(_open(path, wait_seconds))
        try:
            _close_last_line(held.fd, path)
        except BaseException:
            if not held.num_holders:
                os.close(held.fd)
            raise
        _files[os.getpid(), path] = held
        held.num_holders += 1
        return held.fd


def release_ledger(path: Path) -> None:
    """One holder of this process is done; after the last the file is closed, and others may write to it."""
    with _files_lock:
        held = _files[os.getpid(), path]
        held.num_holders -= 1
        if not held.num_holders:
            del _files[os.getpid(), path]
            os.close(held.fd)


@dataclass(slots=True)
class _File:
    """A file that is held. One descriptor for all: who closes any of a file's gives up all locks that his process has on it."""

    fd: int
    num_holders: int = 0


# By process, so that what a fork inherits is nobody's.
_files: dict[tuple[int, Path], _File] = {}
_files_lock = threading.Lock()


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
        raise LedgerError(cannot_be_written(path, error) + way_out) from error


def cannot_be_written(path: Path, error: OSError) -> str:
    """The sentence on a ledger that the system refuses to write."""
    return f"the ledger {path} cannot be written: {error.strerror or error}"


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
