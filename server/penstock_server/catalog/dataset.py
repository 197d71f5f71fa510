"""Dataset: a folder of shards under a name. A change in the folder is loaded as a whole, when it can be opened.

One thread at a time reads the folder and replaces the DatasetState; each request reads the current state once.

event      when                                               state from then on
poll       two polls, some seconds apart, see the same        the folder as it is, or the previous state and an error
refresh    a caller says that the folder is complete          the same; the caller gets the error
catch_up   a request for the latest, or an unknown snapshot   the last snapshot of another server, if its shards are here
fail       the folder cannot be listed                        the previous state and an error
remove     the folder is gone, and others are still there     nothing but an error

A folder grows from one snapshot to the next, so an older snapshot is a subset of its shards and needs no files. A record names
that subset; see history.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from penstock.spec import Spec
from penstock_server.batches.member import Member, OrderKey, PlannedEpochs
from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.footers import FolderContents, FolderReader
from penstock_server.catalog.history import History, SnapshotRecord, open_notes
from penstock_server.catalog.scan import FolderState, list_shards
from penstock_server.catalog.snapshot import Snapshot, recipe_key
from penstock_server.index.index import Index
from penstock_server.problems import DatasetInvalid, SnapshotGone
from penstock_server.recipes.allowed import AllowedFiles
from penstock_server.schemas.common import described
from penstock_server.sources.remote import RemoteFolder
from penstock_server.sources.stats import SETTLED_SECONDS, FileStat, stat_of_file

log = logging.getLogger("penstock.dataset")

FOOTERS = "-footers"  # suffix of a note in the shared store
_MARK_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class OpenSnapshot:
    """Snapshot with its blocks and its index, ready for requests."""

    snapshot: Snapshot
    blocks: Blocks
    index: Index
    planned: PlannedEpochs = field(default_factory=PlannedEpochs)

    @classmethod
    def open(cls, snapshot: Snapshot, store: BlockStore) -> OpenSnapshot:
        """Open a snapshot. Nothing is decoded yet."""
        blocks = Blocks(snapshot, store)
        index = Index(snapshot.name, snapshot, blocks)
        if snapshot.recipe.on_bad_row == "replace":
            # Otherwise a run could be refused while it trains, for bad rows that are counted already.
            index.lengths.read()
            index.rows.read()
        return cls(snapshot, blocks, index)

    @property
    def name(self) -> str:
        """Return the name of the dataset."""
        return self.snapshot.name

    def member(self, spec: Spec) -> Member:
        """Return the snapshot as a spec reads it. Raises DatasetInvalid: too many rows are bad."""
        self.blocks.quarantine.check()
        return Member(self.name, self.snapshot, self.blocks, self.index, self.planned, OrderKey.of(spec))


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetState:
    """What a dataset serves at one time; a change replaces it as a whole.

    opened    the latest snapshot; None if the folder could not be opened
    error     why the last attempt to open the folder failed; the other fields are from before that attempt
    contents  of the folder: older snapshots must agree with them
    records   the recorded snapshots, by fingerprint, newest first
    older     the older snapshots that runs have requested
    """

    name: str
    store: BlockStore
    opened: OpenSnapshot | None = None
    error: str | None = None
    contents: FolderContents | None = None
    records: Mapping[str, SnapshotRecord] = field(default_factory=dict)
    older: dict[str, OpenSnapshot] = field(default_factory=dict)
    _opening: threading.Lock = field(default_factory=threading.Lock)

    @property
    def latest(self) -> OpenSnapshot:
        """Return the latest snapshot. Raises DatasetInvalid: the folder could not be opened."""
        if self.opened is None:
            raise DatasetInvalid(self.error or f"{self.name} is new. It will be opened when its folder stops changing.")
        return self.opened

    @property
    def snapshots(self) -> list[SnapshotRecord]:
        """Return the records of the snapshots that can be served, newest first."""
        return [record for record in self.records.values() if self._why_gone(record) is None]

    def is_behind(self, fingerprint: str | None) -> bool:
        """Return whether another server may have this snapshot, or for None a later one, unknown here."""
        return bool(self.opened) if fingerprint is None else bool(self.contents) and fingerprint not in self.records

    def find(self, fingerprint: str | None) -> OpenSnapshot:
        """Return the snapshot of this fingerprint, None for the latest. The first request for an older one opens it.

        Raises SnapshotGone. Raises DatasetInvalid: there is no latest snapshot, or a shard of the snapshot cannot be read.
        """
        if fingerprint is None or (self.opened and fingerprint == self.opened.snapshot.fingerprint):
            return self.latest
        with self._opening:
            if fingerprint not in self.older:
                if fingerprint not in self.records:
                    raise SnapshotGone(
                        f"snapshot {fingerprint} of {self.name} is not on this server, which has "
                        f"{self.latest.snapshot.fingerprint}: the shards, the recipe or the server's version changed since the "
                        f"run began. Resume on the old ones, or start a new run."
                    )
                self.older[fingerprint] = self._open_older(self.records[fingerprint])
            return self.older[fingerprint]

    def followed_by(
        self, opened: OpenSnapshot | None, contents: FolderContents | None, records: list[SnapshotRecord], error: str | None
    ) -> DatasetState:
        """Return the next state. It keeps the open snapshots that are recorded and agree with the contents."""
        state = DatasetState(
            name=self.name,
            store=self.store,
            opened=opened,
            error=error,
            contents=contents,
            records={record.fingerprint: record for record in records},
        )
        with self._opening:
            before = [*self.older.values(), *([self.opened] if self.opened else [])]
        for former in before:
            if record := state.records.get(former.snapshot.fingerprint):
                with suppress(SnapshotGone):
                    state.older[record.fingerprint] = state._open_older(record, former)
        return state

    def _open_older(self, record: SnapshotRecord, former: OpenSnapshot | None = None) -> OpenSnapshot:
        """Open an older snapshot, with the folder's recipe or that of `former`, the same snapshot in the previous state."""
        contents = self.contents
        if contents and any(name in contents.failures for name, _, _ in record.shards):  # whether it agrees is unknown
            if former is None:
                raise DatasetInvalid(f"{self.error}")
            return former
        reason = self._why_gone(record, has_recipe=former is not None)
        if reason or contents is None:
            raise SnapshotGone(
                f"snapshot {record.fingerprint} of {self.name} is gone: {reason} since it was made. Put back what was there, "
                f"or start a new run."
            )
        shards = [contents.shards[name] for name, _, _ in record.shards]
        snapshot = Snapshot(contents.folder, shards, contents.recipe, name=self.name)
        if former and snapshot.fingerprint != record.fingerprint:
            # The facts about its shards follow from its own recipe; only their FileStats may be new.
            shards = [replace(old, stat=new.stat) for old, new in zip(former.snapshot.shards, shards, strict=True)]
            snapshot = Snapshot(contents.folder, shards, former.snapshot.recipe, name=self.name)
        if former and former.snapshot.recipe is snapshot.recipe and former.snapshot.shards == snapshot.shards:
            return former
        return OpenSnapshot.open(snapshot, self.store)

    def _why_gone(self, record: SnapshotRecord, *, has_recipe: bool = False) -> str | None:
        """Return why a snapshot can no longer be served: its first changed shard, otherwise the recipe; None if it can."""
        shards = self.contents.shards if self.contents else {}
        for name, size_bytes, digest in record.shards:
            shard = shards.get(name)
            if shard is None:
                return f"{name} was removed"
            if (shard.stat.size_bytes, shard.digest) != (size_bytes, digest):
                return f"{name} was rewritten"
        if has_recipe or record.fingerprint in self.older:
            return None
        is_same = self.contents and record.recipe == recipe_key(self.contents.recipe, [name for name, _, _ in record.shards])
        return None if is_same else "the recipe, or the server's version, was changed"


@described
@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Change between two snapshots of a folder."""

    snapshot: str
    """The fingerprint of the latest snapshot."""
    previous: str | None
    """The fingerprint of the snapshot before; null without one."""
    changed: bool
    """Whether the fingerprints differ."""
    recipe: bool
    """Whether the recipe differs, even in settings that do not change the fingerprint, such as `on_bad_row`."""
    added: int
    """Number of shards added."""
    removed: int
    """Number of shards removed."""
    rewritten: int
    """Number of shards with other content."""

    @classmethod
    def between(cls, before: Snapshot | None, after: Snapshot) -> Change:
        """Return the change from `before`, None for no snapshot, to `after`."""
        old = {shard.path.name: shard.digest for shard in before.shards} if before else {}
        new = {shard.path.name: shard.digest for shard in after.shards}
        return cls(
            snapshot=after.fingerprint,
            previous=before.fingerprint if before else None,
            changed=before is None or before.fingerprint != after.fingerprint,
            recipe=before is not None and not before.recipe.is_like(after.recipe),
            added=len(new.keys() - old.keys()),
            removed=len(old.keys() - new.keys()),
            rewritten=sum(old[name] != new[name] for name in old.keys() & new.keys()),
        )

    def __str__(self) -> str:
        """Return the change as a log message."""
        return (
            f"snapshot {self.snapshot} follows {self.previous or 'none'}; shards: {self.added} added, {self.removed} removed, "
            f"{self.rewritten} rewritten; recipe {'changed' if self.recipe else 'unchanged'}"
        )


class DatasetLoader:
    """Loads the changes in one folder into `state`. All but `state` and `open_snapshot` are for one thread at a time."""

    def __init__(
        self,
        name: str,
        folder: Path,
        default_tokenizer: Path | None,
        store: BlockStore,
        allowed: AllowedFiles,
        remote: RemoteFolder | None = None,
    ) -> None:
        self.folder, self.remote = folder, remote
        self.state = DatasetState(name=name, store=store)
        notes = open_notes(store.cache.folder, folder)
        self._footers = notes / "footers"
        if remote and store.shared:  # a server on an empty disk need not read the footers
            self._footers = notes / f"{blake2b(str(remote).encode(), digest_size=16).hexdigest()}{FOOTERS}"
            store.shared.fetch_files([self._footers])
        self._shared_footers = stat_of_file(self._footers)
        self._reader = FolderReader(folder, default_tokenizer, self._footers, name, store.encoders, allowed, remote)
        self._history = History(notes)
        self._marked_at = dict[str, float]()  # by fingerprint, when its counts were last marked as used
        self._seen: tuple[FolderState, float] | None = None  # the last folder state, and since when it is unchanged
        self._loaded: FolderState | None = None  # `state` is of this one; None if it was not settled

    def open_snapshot(self, fingerprint: str | None) -> OpenSnapshot:
        """Return the snapshot of this fingerprint, None for the latest, for a job. Raises the errors of DatasetState.find."""
        opened = self.state.find(fingerprint)
        name, now = opened.snapshot.fingerprint, time.monotonic()
        self._history.touch(name)
        if now - self._marked_at.setdefault(name, now) >= _MARK_SECONDS:
            self._marked_at[name] = now
            opened.index.mark_used()
        return opened

    def poll(self, shards: Mapping[str, FileStat]) -> bool:
        """Load the changes in the folder, whose shards have these stats. Return False if it is still being written to."""
        folder_state, now = self._reader.state(shards), time.monotonic()
        if self._seen is None or self._seen[0] != folder_state:
            self._seen = (folder_state, now)
        if folder_state == self._loaded and not self.state.error:
            return True
        if now - self._seen[1] < SETTLED_SECONDS:
            return False
        error = self.state.error
        try:
            self._load(folder_state, settled=True)
        except DatasetInvalid as invalid:
            self._log(error, str(invalid))
        return True

    def refresh(self, shards: Mapping[str, FileStat]) -> Change:
        """Load the changes in the folder, whose shards have these stats, at once.

        Raises DatasetInvalid: the folder cannot be opened; the previous snapshots are still served.
        """
        self.catch_up()  # compare with the snapshot that all servers serve
        return self._load(self._reader.state(shards), settled=False)

    def catch_up(self) -> None:
        """Load the last snapshot of any server with the same cache folder, if the folder still has its shards.

        Other files in the folder are not read: they may be half written.
        """
        state, record = self.state, next(iter(self._history.records()), None)
        if not state.opened or not record or record.fingerprint == state.opened.snapshot.fingerprint:
            return
        try:
            present = list_shards(self.remote or self.folder)
            folder_state = self._reader.state({name: present[name] for name, _, _ in record.shards})
            contents = self._reader.read(folder_state, settled=False)
            latest = self._open_latest(contents)
        except (OSError, KeyError, DatasetInvalid):  # the folder has changed since; the next poll reports it
            return
        if latest.snapshot.fingerprint == record.fingerprint:
            known = state.contents.shards if state.contents else {}
            shards = {name: shard for name, shard in {**known, **contents.shards}.items() if name in present}
            self._replace(latest, replace(contents, shards=shards), None)
            self._loaded = None  # if the folder reverts to the state loaded before, that is another snapshot
            log.info("%s: %s", state.name, Change.between(state.opened.snapshot, latest.snapshot))

    def fail(self, reason: str) -> None:
        """Record that the folder cannot be listed. The previous snapshots are still served."""
        self._log(self.state.error, reason)
        self.state = replace(self.state, error=reason)

    def remove(self, reason: str) -> None:
        """Record that the folder, and with it every snapshot, is gone."""
        if self.state.opened or self.state.error != reason:
            self._log(self.state.error, reason)
            self._loaded = None
            self._replace(None, None, reason)

    def _load(self, folder_state: FolderState, *, settled: bool) -> Change:
        is_reliable, before, contents = settled or folder_state.is_settled(), self.state, None
        try:
            contents = self._reader.read(folder_state, settled=settled)
            self._share_footers()
            latest = self._open_latest(contents)
            self._history.add(latest.snapshot)
            self._replace(latest, contents, None)
        except DatasetInvalid as invalid:
            if before.opened or contents is None:
                self.state = replace(before, error=str(invalid))
            else:  # jobs on older snapshots go on while the new one is invalid
                self._replace(None, contents, str(invalid))
            raise
        except Exception as error:  # a bug that one dataset triggers must not stop the others
            problem = DatasetInvalid(f"{self.folder} cannot be opened: {type(error).__name__}: {error}.")
            if str(problem) != before.error:  # each poll tries again; log the traceback once
                log.exception("%s cannot be opened", self.folder)
            self.state = replace(before, error=str(problem))
            raise problem from error
        self._loaded = folder_state if is_reliable else None
        change = Change.between(before.opened.snapshot if before.opened else None, latest.snapshot)
        if change.changed or change.recipe or before.error:
            log.info("%s: %s", before.name, change)
        return change

    def _share_footers(self) -> None:
        """Write the note of the footers to the shared store if it has changed; only objects have the same stats everywhere."""
        shared, file_stat = self.state.store.shared, stat_of_file(self._footers)
        if shared and self.remote and file_stat != self._shared_footers:
            self._shared_footers = file_stat
            shared.put_file(self._footers, replaces=True)

    def _open_latest(self, contents: FolderContents) -> OpenSnapshot:
        before, snapshot = self.state.opened, contents.snapshot()
        if before and before.snapshot.shards == snapshot.shards and before.snapshot.recipe.is_like(snapshot.recipe):
            # The recipe makes the same tokens, but its warnings may differ, such as those about unused columns.
            return before if before.snapshot.recipe is snapshot.recipe else replace(before, snapshot=snapshot)
        return OpenSnapshot.open(snapshot, self.state.store)

    def _replace(self, opened: OpenSnapshot | None, contents: FolderContents | None, error: str | None) -> None:
        self.state = self.state.followed_by(opened, contents, self._history.records(), error)

    def _log(self, known: str | None, reason: str) -> None:
        if reason != known:
            log.warning("%s: %s", self.state.name, reason)
