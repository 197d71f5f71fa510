"""The history of a dataset: which shards its snapshots are of, so that a job keeps its own over a restart.

Only names, sizes and digests are noted, under the fingerprint. Where they fit the shards that are there, the snapshot is
made again.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock_server.snapshots.notes import read_note, write_note
from penstock_server.snapshots.snapshot import Snapshot, recipe_key

_FORMAT = 1
_SUFFIX = ".snapshot"
_KEPT = 16  # older snapshots of a dataset
_TOUCH_SECONDS = 60.0
_REFUSED_SECONDS = 3600.0  # between attempts to write a note that is refused, of each of which the log tells

ShardName = tuple[str, int, str]  # its file's name, its size in bytes, its digest


@dataclass(frozen=True, slots=True)
class Record:
    """What is remembered of a snapshot.

    `made_at_ns` is when it last became the latest, in nanoseconds since the epoch. Of what was found by the age of its shards
    that is not known, and it is 0: older than all others, and for no server the latest.
    """

    fingerprint: str
    made_at_ns: int
    num_rows: int
    recipe: str
    shards: tuple[ShardName, ...]


class History:
    """The records of one dataset: of the latest snapshot and of sixteen older ones.

    With more, what no job ever asked for goes first, then what was asked for longest ago. A note's mtime is when its
    snapshot was last asked for, or `made_at_ns` if it never was. `touch` is for all threads, the others for one at a time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: dict[str, Record] = {}
        self._inodes: dict[str, int] = {}  # of the notes that records are of; one that is made anew is another file
        self._touched_at: dict[str, float] = {}

    def records(self) -> list[Record]:
        """All of them, newest first; also what other servers with the same cache folder have made meanwhile."""
        try:
            there = {path.stem: inode for path in self._folder.glob(f"*{_SUFFIX}") if (inode := _inode(path))}
        except OSError:  # the disk fails, or no descriptor is left
            there = {}
        if len(there) <= _KEPT:  # no server has dropped one then: what is not there was lost, and is left in memory alone
            self._inodes = {fingerprint: inode for fingerprint, inode in self._inodes.items() if fingerprint in there}
        for fingerprint in self._inodes.keys() - there.keys():
            self._forget(fingerprint)  # another server did
        for fingerprint, inode in there.items():
            if self._inodes.get(fingerprint) != inode and (record := self._load(self._path(fingerprint))):
                self._records[fingerprint], self._inodes[fingerprint] = record, inode
        return newest_first(self._records.values())

    def latest(self) -> Record | None:
        """What became the latest snapshot last, here or on another server with the same cache folder; None: it is not known."""
        return next((record for record in self.records() if record.made_at_ns), None)

    def add(self, snapshot: Snapshot) -> None:
        """Records what has become the latest snapshot."""
        latest = self.latest()
        if latest and latest.fingerprint == snapshot.fingerprint:
            return
        was_asked_for = self._asked_for(snapshot.fingerprint)
        made_at_ns = max(time.time_ns(), latest.made_at_ns + 1 if latest else 0)
        self._keep(_record(snapshot, made_at_ns))
        with suppress(OSError):
            os.utime(self._path(snapshot.fingerprint), ns=(made_at_ns, made_at_ns + was_asked_for))
        self._drop_oldest(snapshot.fingerprint)

    def recall(self, snapshot: Snapshot) -> Record:
        """Records an older snapshot that a job asks for and that was found by the age of its shards."""
        latest = self.latest()
        if known := self._records.get(snapshot.fingerprint):  # another server was asked first
            return known
        record = _record(snapshot, 0)
        self._keep(record)  # the date of its note is now, and so it is kept as what was asked for last
        self._drop_oldest(latest.fingerprint if latest else record.fingerprint)
        return record

    def touch(self, fingerprint: str) -> None:
        """A job has asked for this snapshot now."""
        now = time.monotonic()
        if now - self._touched_at.get(fingerprint, -_TOUCH_SECONDS) >= _TOUCH_SECONDS:
            self._touched_at[fingerprint] = now
            path, record = self._path(fingerprint), self._records.get(fingerprint)
            if record and _inode(path) is None:  # a full disk refused it, or another server forgot it
                _write(path, record)
                if _inode(path) is None:
                    self._touched_at[fingerprint] = now + _REFUSED_SECONDS
            with suppress(OSError):
                os.utime(path)
                os.utime(self._folder)  # else a server that runs for months would lose it; see drop_old_notes

    def _keep(self, record: Record) -> None:
        self._records[record.fingerprint] = record
        path = self._path(record.fingerprint)
        _write(path, record)
        if inode := _inode(path):
            self._inodes[record.fingerprint] = inode

    def _drop_oldest(self, latest: str) -> None:
        older = sorted((f for f in self._records if f != latest), key=lambda f: (self._asked_for(f), self._used_at_ns(f)))
        for fingerprint in older[:-_KEPT]:
            self._forget(fingerprint)
            with suppress(OSError):
                self._path(fingerprint).unlink()

    def _forget(self, fingerprint: str) -> None:
        del self._records[fingerprint]
        self._inodes.pop(fingerprint, None)
        self._touched_at.pop(fingerprint, None)

    def _asked_for(self, fingerprint: str) -> bool:
        record = self._records.get(fingerprint)
        return record is not None and self._used_at_ns(fingerprint) > record.made_at_ns

    def _used_at_ns(self, fingerprint: str) -> int:
        try:
            return self._path(fingerprint).stat().st_mtime_ns
        except OSError:
            return self._records[fingerprint].made_at_ns

    def _load(self, path: Path) -> Record | None:
        kept = read_note(path)
        if not isinstance(kept, tuple) or kept[:1] != (_FORMAT,):
            return None
        _, made_at_ns, num_rows, recipe, shards = kept
        return Record(path.stem, made_at_ns, num_rows, recipe, _interned(shards))

    def _path(self, fingerprint: str) -> Path:
        return self._folder / f"{fingerprint}{_SUFFIX}"


def newest_first(records: Iterable[Record]) -> list[Record]:
    """Records by when they were made; of those of which that is not known, the one with more shards is taken for newer."""
    return sorted(records, key=lambda record: (record.made_at_ns, len(record.shards)), reverse=True)


def _record(snapshot: Snapshot, made_at_ns: int) -> Record:
    shards = _interned((shard.path.name, shard.date.size_bytes, shard.digest) for shard in snapshot.shards)
    return Record(
        snapshot.fingerprint,
        made_at_ns,
        snapshot.num_rows,
        recipe_key(snapshot.recipe, (name for name, _, _ in shards)),
        shards,
    )


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:  # another server has removed it just now
        return None


def _write(path: Path, record: Record) -> None:
    write_note(path, (_FORMAT, record.made_at_ns, record.num_rows, record.recipe, record.shards))


def _interned(shards: Iterable[ShardName]) -> tuple[ShardName, ...]:
    # Snapshots have most shards in common: each name is to be in memory once.
    return tuple((sys.intern(name), size_bytes, sys.intern(digest)) for name, size_bytes, digest in shards)
