"""Notes: small facts about a dataset's folder that outlive a restart, as files in the cache folder.

A note is a sealed file. Notes lie in folders of their own, out of the sight and the budget of the cached blocks. What is lost
with them is made again.
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
_FORGET_SECONDS = 90 * 86_400.0  # of a dataset that no server has opened for so long


def open_notes(cache: Path, dataset: Path) -> Path:
    """Where the notes on a dataset's folder are."""
    here = cache / _FOLDER / blake2b(os.fsencode(dataset.absolute()), digest_size=16).hexdigest()
    with suppress(OSError):  # a read-only cache folder; write_note says so
        here.mkdir(parents=True, exist_ok=True)
        os.utime(here)
    return here


def drop_old_notes(cache: Path, now: float) -> None:
    """Removes the notes on folders that nobody has opened for 90 days, and what crashed processes left half written.

    `now` is of the clock that dates the folder's files. Raises OSError: it cannot be listed.
    """
    for path in (cache / _FOLDER).glob("**/*"):
        with suppress(OSError):  # another server tidies up at the same time
            age_seconds = now - path.stat().st_mtime
            if path.is_dir() and age_seconds > _FORGET_SECONDS:
                shutil.rmtree(path)
            elif path.suffix == TEMPORARY and age_seconds > ABANDONED_SECONDS:
                path.unlink()


def write_note(path: Path, content: Any) -> None:
    """Keeps what msgpack can hold. A note that cannot be kept is logged; nothing else follows."""
    body = msgpack.packb(content)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_sealed(path, [body], "what it holds is forgotten with this process")


def read_note(path: Path) -> Any | None:
    """What was kept, with tuples for lists. None: nothing was, or it is damaged."""
    return read_sealed(path, _parse)


def _parse(body: memoryview) -> Any | None:
    try:
        return msgpack.unpackb(body, use_list=False, strict_map_key=False)
    except ValueError:
        return None
