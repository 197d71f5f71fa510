"""The ledgers' files that this process writes to, each once, however many iterations do."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

from penstock.ledger.file import LedgerFile
from penstock.ledger.lock import Lock


def hold_ledger(path: Path, wait_seconds: float = 0.0) -> LedgerFile:
    """The file of this path, which this process does not close before all that hold it have given it back.

    From its first line on no other process writes to it. One that does by then has so long to end.
    """
    with _files_lock:
        real = Path(os.path.realpath(path))
        file = _files.setdefault((os.getpid(), real), LedgerFile(path))
        file.num_holders += 1
        file.wait_seconds = wait_seconds
        return file


def release_ledger(file: LedgerFile) -> None:
    """One holder of this process is done; after the last the file is closed, and others may write to it."""
    with _files_lock:
        file.num_holders -= 1
        if not file.num_holders:
            file.close()


# All that this process has written to, by process, so that what a fork inherits is nobody's. One descriptor for all iterations:
# who closes any of a file's gives up all locks that his process has on it.
_files: dict[tuple[int, Path], LedgerFile] = {}
_files_lock = Lock.renewed_in_forks()


def _write_what_waits() -> None:
    """Of iterations that are over, when the interpreter exits."""
    for (pid, _), file in list(_files.items()):
        if pid == os.getpid() and file.has_waiting and not file.num_holders:
            file.sync()
            file.close(is_last=True)


atexit.register(_write_what_waits)
