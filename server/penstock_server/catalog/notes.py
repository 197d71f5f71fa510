"""Notes: small facts about a dataset's folder that outlive a restart, as files in the cache folder.

A note is a sealed file. Notes are in separate folders, outside the listing and the budget of the cached blocks. The server
recomputes a lost note.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgpack

from penstock_server.checksummed import ABANDONED_SECONDS, TEMPORARY, read_sealed, write_sealed

_FOLDER = "notes"
_FORGET_SECONDS = 90 * 86_400.0  # age limit of notes on a dataset that no server opens


def open_notes(cache: Path, dataset: Path) -> Path:
    """Create and return the folder of the notes on a dataset's folder."""
    here = cache / _FOLDER / blake2b(os.fsencode(dataset.absolute()), digest_size=16).hexdigest()
    with suppress(OSError):  # a read-only cache folder: write_note reports it
        here.mkdir(parents=True, exist_ok=True)
        os.utime(here)
    return here


def drop_old_notes(cache: Path, now: float) -> None:
    """Remove notes on folders that no server has opened for 90 days, and half-written files of crashed processes.

    `now` is by the clock of the file system. Raises OSError: the folder cannot be listed.
    """
    for path in (cache / _FOLDER).glob("**/*"):
        with suppress(OSError):  # another server cleans up at the same time
            age_seconds = now - path.stat().st_mtime
            if path.is_dir() and age_seconds > _FORGET_SECONDS:
                shutil.rmtree(path)
            elif path.suffix == TEMPORARY and age_seconds > ABANDONED_SECONDS:
                path.unlink()


def write_note(path: Path, content: Any) -> None:
    """Write a note of a msgpack value. A failure is logged and has no other effect."""
    body = msgpack.packb(content)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_sealed(path, [body], "what it holds is forgotten with this process")


def read_note(path: Path) -> Any | None:
    """Read a note, with tuples for lists; None if it is missing or damaged."""
    return read_sealed(path, _parse)


def _parse(body: memoryview) -> Any | None:
    try:
        return msgpack.unpackb(body, use_list=False, strict_map_key=False)
    except ValueError:
        return None
