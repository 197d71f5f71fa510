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

from penstock_server.settings import SettingsError

_PREFIX = "penstock-server-"
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

    Folders of servers that were killed are removed, too: they have a lock file, and no process holds its lock any more.
    Raises SettingsError: no temporary folder can be written.
    """
    try:
        parent = Path(tempfile.gettempdir())
        for old in parent.glob(f"{_PREFIX}*"):
            with suppress(OSError), _locked(old / _LOCK):
                rmtree(old)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    except OSError as error:
        raise unusable(error) from error
    # The lock file gets its name when it is locked. Otherwise another server could lock it first, and remove the folder.
    unlocked = folder / f"{_LOCK}.new"
    unlocked.touch(0o600)
    try:
        with _locked(unlocked):
            unlocked.rename(folder / _LOCK)
            yield folder
    finally:
        rmtree(folder, ignore_errors=True)


def unusable(error: OSError) -> SettingsError:
    """Return the error of a temporary folder that cannot be written."""
    return SettingsError(
        f"several processes share their metrics in a temporary folder, which cannot be written: {error}. Set TMPDIR to a "
        f"folder on this machine that has room, or serve with --processes 1."
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file. Raises OSError: another process holds it, or the file is missing."""
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)
