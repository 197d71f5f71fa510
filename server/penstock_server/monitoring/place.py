"""Where the processes of one server share their status. It imports no large module: the supervisor needs it."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

_PREFIX = "penstock-"
_LOCK = "server.lock"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the processes of a server share what they know: a folder, and the slot of this process in it."""

    folder: Path
    slot: int

    @property
    def status_file(self) -> Path:
        """File of this process's status."""
        return self.folder / f"status-{self.slot}"


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Make the folder that the processes of a server share, and remove it at the end.

    Folders of servers that were killed are removed, too: nothing holds their lock any more.
    """
    parent = Path(tempfile.gettempdir())
    for old in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError), _locked(old):
            rmtree(old)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with _locked(folder):
            yield folder
    finally:
        rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises OSError: another process holds it."""
    file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)
