"""History of a dataset: the shards of its snapshots, so that a job keeps its snapshot over a restart.

A note under the fingerprint has names, sizes and digests only. If they match the present shards, the server makes the snapshot
again.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock_server.catalog.notes import read_note, write_note
from penstock_server.catalog.snapshot import Snapshot, recipe_key

_FORMAT = 1
_SUFFIX = ".snapshot"
_KEPT = 16  # older snapshots of a dataset
_TOUCH_SECONDS = 60.0
_REFUSED_SECONDS = 3600.0  # between attempts to write a note after a failure; each attempt is logged

ShardName = tuple[str, int, str]  # its file's name, its size in bytes, its digest


@dataclass(frozen=True, slots=True)
class Record:
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
        self._records: dict[str, Record] = {}
        self._inodes: dict[str, int] = {}  # of the records' notes; a rewritten note is another file
        self._touched_at: dict[str, float] = {}

    def records(self) -> list[Record]:
        """Return all records, newest first, including those of other servers with the same cache folder."""
        try:
            there = {path.stem: inode for path in self._folder.glob(f"*{_SUFFIX}") if (inode := _inode(path))}
        except OSError:  # the disk fails, or no descriptor is left
            there = {}
        if len(there) <= _KEPT:  # no server dropped a note: a missing note was lost, and its record stays in memory only
            self._inodes = {fingerprint: inode for fingerprint, inode in self._inodes.items() if fingerprint in there}
        for fingerprint in self._inodes.keys() - there.keys():
            self._forget(fingerprint)  # another server did
        for fingerprint, inode in there.items():
            if self._inodes.get(fingerprint) != inode and (record := self._load(self._path(fingerprint))):
                self._records[fingerprint], self._inodes[fingerprint] = record, inode
        return sorted(self._records.values(), key=lambda record: record.made_at_ns, reverse=True)

    def latest(self) -> Record | None:
        """Return the newest latest snapshot of any server with the same cache folder; None if unknown."""
        return next(iter(self.records()), None)

    def add(self, snapshot: Snapshot) -> None:
        """Record the snapshot that has become the latest."""
        latest = self.latest()
        if latest and latest.fingerprint == snapshot.fingerprint:
            return
        was_asked_for = self._asked_for(snapshot.fingerprint)
        made_at_ns = max(time.time_ns(), latest.made_at_ns + 1 if latest else 0)
        self._keep(_record(snapshot, made_at_ns))
        with suppress(OSError):
            os.utime(self._path(snapshot.fingerprint), ns=(made_at_ns, made_at_ns + was_asked_for))
        self._drop_oldest(snapshot.fingerprint)

    def touch(self, fingerprint: str) -> None:
        """Note that a job has requested this snapshot now."""
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
    # Snapshots have most shards in common: keep each name in memory once.
    return tuple((sys.intern(name), size_bytes, sys.intern(digest)) for name, size_bytes, digest in shards)
