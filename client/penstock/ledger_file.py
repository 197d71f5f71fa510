"""The files of a ledger: which one a process writes to, which there are, and how one is opened to be appended to."""

from __future__ import annotations

import glob
import logging
import os
import re
import sys
from pathlib import Path

from penstock.errors import LedgerError

if sys.platform != "win32":
    import fcntl

log = logging.getLogger("penstock")

MAGIC = b'begin {"ledger": '
_RANK = "{rank}"


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
    found = Path(path.anchor).glob("*".join(map(glob.escape, pieces)) + "*")
    return sorted(one for one in found if pattern.fullmatch(str(one.relative_to(path.anchor))) and one.is_file())


def open_ledger(path: Path) -> int:
    """A descriptor that appends to a file, which no other process writes to, behind a newline.

    Raises LedgerError: the file cannot be written, holds other things, or another process writes to it.
    """
    try:
        is_new = not path.exists()
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise LedgerError(cannot_be_written(path, error)) from error
    try:
        _lock(fd, path)
        _close_last_line(fd, path)
        if is_new:
            _sync_folder(path.parent)
    except OSError as error:
        os.close(fd)
        raise LedgerError(cannot_be_written(path, error)) from error
    except LedgerError:
        os.close(fd)
        raise
    return fd


def cannot_be_written(path: Path, error: OSError) -> str:
    """The sentence on a ledger that the system refuses to write."""
    return f"the ledger {path} cannot be written: {error.strerror or error}"


def _lock(fd: int, path: Path) -> None:
    """A lock that ends with the process, and that a fork does not inherit. Raises LedgerError: another process has it."""
    if sys.platform == "win32":
        return
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise LedgerError(
            f"another process writes to the ledger {path}: is the run that it belongs to still there? Of processes that share "
            f"a rank, such as tensor-parallel peers, only one keeps the ledger"
        ) from None
    except OSError as error:
        log.warning("penstock: %s cannot be locked (%s): see to it that only one process writes to it", path, error.strerror)


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
