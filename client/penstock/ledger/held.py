"""Open ledger files of this process, one per path for all iterations, and their locks."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path

from penstock.ledger.file import LedgerFile


def hold_ledger(path: Path, wait_seconds: float = 0.0) -> LedgerFile:
    """Return the file of a path; this process closes it after all holders have released it.

    From the first line on it excludes other writer processes. It waits at most `wait_seconds` for one to end.
    """
    with _files_lock:
        real = Path(os.path.realpath(path))
        file = _files.setdefault((os.getpid(), real), LedgerFile(path))
        file.num_holders += 1
        file.wait_seconds = wait_seconds
        return file


def is_at_a_ledger() -> bool:
    """Whether the calling thread is opening a ledger file or writing to one.

    If so, it must not join a thread that may need its locks. The garbage collector may close a dropped iterator's ledger at
    any line of any thread, also at such a line.
    """
    own = (lock for file in list(_files.values()) for lock in file.locks)
    return any(lock._is_owned() for lock in (opening, _files_lock, *own))  # type: ignore[attr-defined]


def release_ledger(file: LedgerFile) -> None:
    """Release a file; after the last holder, close it, so that other processes may write to it."""
    with _files_lock:
        file.num_holders -= 1
        if not file.num_holders:
            file.close()


# All ledger files, by process id, so that a fork does not use inherited ones. One descriptor for all iterations: a process
# that closes any descriptor of a file loses all its locks on that file.
_files: dict[tuple[int, Path], LedgerFile] = {}
_files_lock, opening = threading.RLock(), threading.RLock()


def _renew_locks() -> None:
    """Replace the locks in a fork: the thread that holds them does not exist there."""
    global _files_lock, opening
    _files_lock, opening = threading.RLock(), threading.RLock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_renew_locks)


def _write_what_waits() -> None:
    """Write the waiting lines of ended iterations when the interpreter exits."""
    for (pid, _), file in list(_files.items()):
        if pid == os.getpid() and file.has_waiting and not file.num_holders:
            file.sync()
            file.close(is_last=True)


atexit.register(_write_what_waits)
