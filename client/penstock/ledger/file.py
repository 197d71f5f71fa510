"""Files of a ledger: their names, and appends by one process."""

from __future__ import annotations

import glob
import os
import re
import sys
import threading
import time
import weakref
from pathlib import Path

from penstock.errors import LedgerError
from penstock.ledger.begin import MAGIC, VERSION, check_of
from penstock.logs import log
from penstock.syncing import sync_folder

if sys.platform != "win32":
    import fcntl

_RANK = "{rank}"
_HEAD = MAGIC + b"%d, " % VERSION
_SYNC_SECONDS = 60.0
_POLL_SECONDS = 0.02
# Files of this process. One descriptor a file: a process that closes any descriptor of a file loses its lock on that file.
_files: weakref.WeakValueDictionary[tuple[int, Path], LedgerFile] = weakref.WeakValueDictionary()


def ledger_path(ledger: str | os.PathLike[str], rank: int, worker: int | None = None) -> Path:
    """Return the file of one process: the path with the rank for {rank}; else the path for rank 0, path.1 for rank 1, ...

    A loader's worker writes to path.worker0, or to path.1.worker0.
    """
    path = os.fspath(ledger)
    path = path.replace(_RANK, str(rank)) if _RANK in path else path + (f".{rank}" if rank else "")
    return Path(path + ("" if worker is None else f".worker{worker}")).absolute()


def find_ledgers(ledger: str | os.PathLike[str]) -> list[Path]:
    """Return the files of all ranks and workers, for a path as RemoteDataset takes it; or those of one rank."""
    path = Path(ledger).absolute()
    pieces = str(path.relative_to(path.anchor)).split(_RANK)
    rank, suffix = (r"\d+", "") if len(pieces) > 1 else ("", r"(\.\d+)?")
    pattern = re.compile(rank.join(map(re.escape, pieces)) + suffix + r"(\.worker\d+)?")
    wildcards = "*".join([*map(glob.escape, pieces), ""])
    paths = Path(path.anchor).glob(re.sub(r"\*+", "*", wildcards))  # two stars would match folders, too
    return sorted(one for one in paths if pattern.fullmatch(str(one.relative_to(path.anchor))) and one.is_file())


def open_ledger(path: Path, wait_seconds: float = 0.0) -> LedgerFile:
    """Return the file of a path; a process has one, for all its iterations.

    Waits at most `wait_seconds` for another writer process to end.

    Raises LedgerError: the file cannot be written, is no ledger, or has another writer process.
    """
    key = os.getpid(), Path(os.path.realpath(path))
    file = _files.get(key)
    if file is None or file.is_deleted:
        file = _files[key] = LedgerFile(path, wait_seconds)
    return file


class LedgerFile:
    """One ledger file, open and locked for appends by this process. Any thread may append to it.

    Raises LedgerError: see open_ledger.
    """

    def __init__(self, path: Path, wait_seconds: float) -> None:
        self.path = path
        try:
            is_new = not path.exists()
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            close = weakref.finalize(self, os.close, self._fd)
            close.atexit = False  # a thread may still flush
            try:
                self._lock(wait_seconds)
                check_head(path, os.pread(self._fd, len(_HEAD), 0))
                if is_new:
                    sync_folder(path.parent)
            except BaseException:
                close()
                raise
        except OSError as error:
            raise LedgerError(_cannot_be_written(path, error)) from error
        self._writing = threading.RLock()
        self._begin = ""  # the last begin line
        self._num_lost = 0  # lines since the last one that was written
        size = os.fstat(self._fd).st_size
        self._is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        self._synced_at = time.monotonic()
        self._syncing: threading.Thread | None = None

    @property
    def is_deleted(self) -> bool:
        """Whether the file was deleted since it was opened."""
        return not os.fstat(self._fd).st_nlink

    def append(self, begin: str, line: str = "") -> None:
        """Write a line of the iteration with this begin line, after that begin line if another iteration's lines are last.

        Never raises if the disk cannot be written: the line is lost.
        """
        with self._writing:
            try:
                self.write(begin, line)
            except OSError as error:
                if not self._num_lost:
                    log.error(
                        "penstock: %s. Training goes on; the audit will miss the lines.", _cannot_be_written(self.path, error)
                    )
                self._num_lost += 1

    def write(self, begin: str, line: str = "") -> None:
        """Do the same. Raises OSError: the disk cannot be written; it may hold a part of the line."""
        with self._writing:
            lines = [line] if line else []
            if self._num_lost:
                text = f"lost {self._num_lost}"
                lines.insert(0, f"{text} {check_of(text, begin[-8:])}")
            if begin != self._begin or self._num_lost:
                lines.insert(0, begin)
            content = ("\n" if self._is_torn else "") + "".join(f"{each}\n" for each in lines)
            self._begin, self._is_torn = "", True  # until all is written, whatever a signal handler raises
            if os.write(self._fd, content.encode()) < len(content):
                raise OSError("a part of a line was written")
            self._is_torn, self._begin = False, begin
            if self._num_lost:
                log.warning("penstock: the ledger %s is written again; %d lines are lost", self.path, self._num_lost)
            self._num_lost = 0
        if time.monotonic() - self._synced_at > _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Flush lines to the disk, in a thread: a shared file system may be slow."""
        if self._syncing and self._syncing.is_alive():
            return
        self._synced_at = time.monotonic()
        self._syncing = threading.Thread(target=self._sync, name="penstock-ledger", daemon=True)
        self._syncing.start()

    def _sync(self) -> None:
        try:
            os.fsync(self._fd)
            if self.is_deleted:
                log.error("penstock: the ledger %s was deleted while it was written: the audit will miss its lines", self.path)
        except OSError as error:
            log.error("penstock: %s", _cannot_be_written(self.path, error))

    def _lock(self, wait_seconds: float) -> None:
        """Take a lock that ends with the process, and that a fork does not inherit."""
        if sys.platform == "win32":
            return
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    raise LedgerError(
                        f"another process writes to the ledger {self.path}. Of processes that share a rank, such as "
                        f"tensor-parallel peers, only one may keep a ledger"
                    ) from None
                time.sleep(_POLL_SECONDS)
                continue
            except OSError as error:
                log.warning("penstock: %s cannot be locked (%s): only one process may write to it", self.path, error.strerror)
            return


def check_head(path: Path, head: bytes) -> None:
    """Check the first bytes of a file. Its first line may be cut off, and then a begin line come after it.

    Raises LedgerError: the file holds other things, or another version wrote it.
    """
    lines = head[: len(_HEAD)].strip(b"\0").split(b"\n")
    if not all(line.startswith(_HEAD) or _HEAD.startswith(line) for line in lines):
        raise LedgerError(f"{path} is no ledger of version {VERSION}. Name another file, or use the penstock that wrote it")


def _cannot_be_written(path: Path, error: OSError) -> str:
    return f"the ledger {path} cannot be written: {error.strerror or error}"
