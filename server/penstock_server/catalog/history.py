"""What outlives a restart: notes about a dataset's folder, and the records of its snapshots.

Notes are sealed files in the cache folder, outside the listing and the budget of the cached blocks. A record names the shards
of a snapshot. If they match the present shards, the server makes the snapshot again, so a run keeps its snapshot.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgpack

from penstock_server.catalog.snapshot import Snapshot, recipe_key
from penstock_server.files import ABANDONED_SECONDS, TEMPORARY, read_sealed, write_sealed
from penstock_server.sources.stats import FileStat, stat_of_file

_FOLDER = "notes"
_FORGET_SECONDS = 90 * 86_400.0  # age limit of notes on a dataset that no server opens
_FORMAT = 1
_SUFFIX = ".snapshot"
_MAX_OLDER = 16  # older snapshots of a dataset
_TOUCH_SECONDS = 60.0

ShardName = tuple[str, int, str]  # its file's name, its size in bytes, its digest


def open_notes(cache: Path, dataset: Path) -> Path:
    """Create and return the folder of the notes on a dataset's folder."""
    notes = cache / _FOLDER / blake2b(os.fsencode(dataset.absolute()), digest_size=16).hexdigest()
    with suppress(OSError):  # a read-only cache folder: write_note reports it
        notes.mkdir(parents=True, exist_ok=True)
        os.utime(notes)
    return notes


def drop_old_notes(cache: Path, now: float) -> None:
    """Remove notes on folders that no server has opened for 90 days, and half-written files. Raises OSError."""
    for path in (cache / _FOLDER).glob("**/*"):
        with suppress(OSError):  # another server cleans up at the same time
            age_seconds = now - path.stat().st_mtime
            if path.is_dir() and age_seconds > _FORGET_SECONDS:
                shutil.rmtree(path)
            elif path.suffix == TEMPORARY and age_seconds > ABANDONED_SECONDS:
                path.unlink()


def write_note(path: Path, content: Any) -> bool:
    """Write a note of a msgpack value. A failure is logged, keeps the old note and returns False."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    return write_sealed(path, [msgpack.packb(content)], "this process forgets its content when it ends")


def read_note(path: Path) -> Any | None:
    """Read a note, with tuples for lists; None if it is missing or damaged."""
    return read_sealed(path, _parse)


def _parse(body: memoryview) -> Any | None:
    try:
        return msgpack.unpackb(body, use_list=False, strict_map_key=False)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """Record of a snapshot. `made_at_ns` is when it last became the latest, in nanoseconds since the epoch."""

    fingerprint: str
    made_at_ns: int
    num_rows: int
    recipe: str
    shards: tuple[ShardName, ...]


class History:
    """Records of one dataset: of the latest snapshot and of sixteen older ones.

    Beyond that, a snapshot that no job requested is dropped first, then the least recently requested. A note's mtime is the
    time of the last request, or `made_at_ns` without one. `touch` is thread-safe; call the others from one thread at a time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded = dict[tuple[Path, FileStat | None], SnapshotRecord]()
        self._not_stored = dict[str, SnapshotRecord]()  # a full disk stops no run
        self._touched_at = dict[str, float]()  # by fingerprint

    def records(self) -> list[SnapshotRecord]:
        """Return all records, newest first, including those of other servers with the same cache folder."""
        loaded = dict[tuple[Path, FileStat | None], SnapshotRecord]()
        with suppress(OSError):  # the disk fails, or no descriptor is left
            for path in self._folder.glob(f"*{_SUFFIX}"):
                key = path, stat_of_file(path)
                if record := self._loaded.get(key) or _load(path):
                    loaded[key] = record
        self._loaded = loaded
        records = [*self._not_stored.values(), *loaded.values()]
        newest = dict[str, SnapshotRecord]()  # the disk may have an older record of a snapshot in `_not_stored`, or a newer one
        for record in sorted(records, key=lambda record: record.made_at_ns, reverse=True):
            newest.setdefault(record.fingerprint, record)
        return [*newest.values()]

    def add(self, snapshot: Snapshot) -> None:
        """Record the snapshot that has become the latest."""
        records = {record.fingerprint: record for record in self.records()}
        latest = next(iter(records.values()), None)
        if latest and latest.fingerprint == snapshot.fingerprint:
            return
        before, path = records.pop(snapshot.fingerprint, None), self._path(snapshot.fingerprint)
        was_requested = before is not None and self._last_use(before)[0]
        shards = _interned((shard.path.name, shard.stat.size_bytes, shard.digest) for shard in snapshot.shards)
        recipe = recipe_key(snapshot.recipe, (name for name, _, _ in shards))
        made_at_ns = max(time.time_ns(), latest.made_at_ns + 1 if latest else 0)
        record = SnapshotRecord(snapshot.fingerprint, made_at_ns, snapshot.num_rows, recipe, shards)
        if write_note(path, (_FORMAT, made_at_ns, record.num_rows, recipe, shards)):
            self._not_stored.pop(record.fingerprint, None)
        else:
            self._not_stored[record.fingerprint] = record
        with suppress(OSError):
            os.utime(path, ns=(made_at_ns, made_at_ns + was_requested))
        for older in sorted(records.values(), key=self._last_use)[:-_MAX_OLDER]:
            self._not_stored.pop(older.fingerprint, None)
            with suppress(OSError):
                self._path(older.fingerprint).unlink()

    def touch(self, fingerprint: str) -> None:
        """Note, at most once a minute, that a job has requested this snapshot now."""
        now = time.monotonic()
        if now - self._touched_at.get(fingerprint, -_TOUCH_SECONDS) >= _TOUCH_SECONDS:
            self._touched_at[fingerprint] = now
            with suppress(OSError):
                os.utime(self._path(fingerprint))
                os.utime(self._folder)  # else a server that runs for months would lose it; see drop_old_notes

    def _last_use(self, record: SnapshotRecord) -> tuple[bool, int]:
        """Return whether a job has requested a snapshot, and when, in nanoseconds; without a request, when it was made."""
        try:
            used_at_ns = self._path(record.fingerprint).stat().st_mtime_ns
        except OSError:
            used_at_ns = record.made_at_ns
        return used_at_ns > record.made_at_ns, used_at_ns

    def _path(self, fingerprint: str) -> Path:
        return self._folder / f"{fingerprint}{_SUFFIX}"


def _load(path: Path) -> SnapshotRecord | None:
    """Return the record in a file; None if it is missing, is damaged or cannot be read now."""
    content = read_note(path)
    if not isinstance(content, tuple) or content[:1] != (_FORMAT,):
        return None
    _, made_at_ns, num_rows, recipe, shards = content
    return SnapshotRecord(path.stem, made_at_ns, num_rows, recipe, _interned(shards))


def _interned(shards: Iterable[ShardName]) -> tuple[ShardName, ...]:
    # Snapshots have most shards in common: keep each name in memory once.
    return tuple((sys.intern(name), size_bytes, sys.intern(digest)) for name, size_bytes, digest in shards)
