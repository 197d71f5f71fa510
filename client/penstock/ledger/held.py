"""The ledgers' files that this process writes to, each once, however many iterations do, and the locks around them."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path

from penstock.ledger.file import LedgerFile


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


def is_at_a_ledger() -> bool:
    """Whether the calling thread is in the midst of opening one or of writing to it.

    Then it must not wait for a thread that may need what it has. The garbage collector may close the ledger of an iterator that
    was dropped, at any line of any thread, these among them.
    """
    own = (lock for file in list(_files.values()) for lock in file.locks)
    return any(lock._is_owned() for lock in (opening, _files_lock, *own))  # type: ignore[attr-defined]


def release_ledger(file: LedgerFile) -> None:
    """One holder of this process is done; after the last the file is closed, and others may write to it."""
    with _files_lock:
        file.num_holders -= 1
        if not file.num_holders:
            file.close()


# All that this process has written to, by process, so that what a fork inherits is nobody's. One descriptor for all iterations:
# who closes any of a file's gives up all locks that his process has on it.
_files: dict[tuple[int, Path], LedgerFile] = {}
_files_lock, opening = threading.RLock(), threading.RLock()


def _renew_locks() -> None:
    """In a process that was forked off: the thread that has them is not in there."""
    global _files_lock, opening
    _files_lock, opening = threading.RLock(), threading.RLock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_renew_locks)


def _write_what_waits() -> None:
    """Of iterations that are over, when the interpreter exits."""
    for (pid, _), file in list(_files.items()):
        if pid == os.getpid() and file.has_waiting and not file.num_holders:
            file.sync()
            file.close(is_last=True)


atexit.register(_write_what_waits)
