"""Dataset: a folder of shards under a name. A change in the folder is loaded as a whole, when it can be opened.

One thread at a time reads the folder and replaces the Held; each request reads the current Held once.

event      when                                               Held from then on
poll       two polls, some seconds apart, see the same        the folder as it is, or the previous state and an error
refresh    a caller says that the folder is complete          the same; the caller gets the error
catch_up   a request for the latest, or an unknown snapshot   the last snapshot of another server, if its shards are here
fail       the folder cannot be listed                        the previous state and an error
remove     the folder is gone, and others are still there     nothing but an error
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.text import counted
from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.footers import Footers
from penstock_server.catalog.held import Held, Served
from penstock_server.catalog.history import History
from penstock_server.catalog.notes import open_notes
from penstock_server.catalog.reading import Reading, read_folder
from penstock_server.catalog.scan import QUIET_SECONDS, FileStat, FolderState, list_folder, look
from penstock_server.catalog.shard import being_written
from penstock_server.catalog.snapshot import Snapshot, recipe_key
from penstock_server.index.index import Index
from penstock_server.problems import MORE_THREADS, DatasetInvalid, lacks_threads
from penstock_server.schemas import described

log = logging.getLogger("penstock.dataset")


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
        if self.previous is None:
            return f"new, {counted(self.added, 'shard')}; snapshot {self.snapshot}"
        if not self.changed and self.recipe:
            return f"its recipe changed, and no batch by that; snapshot {self.snapshot} stays"
        if not self.changed:
            return f"can be opened again, with nothing changed; snapshot {self.snapshot}"
        counts = {"added": self.added, "removed": self.removed, "rewritten": self.rewritten}
        parts = [f"{counted(number, 'shard')} {how}" for how, number in counts.items() if number]
        parts += ["its recipe changed"] * self.recipe
        return f"{', '.join(parts)}; snapshot {self.snapshot} follows {self.previous}"


class Dataset:
    """Snapshots of one folder.

    `held`, `latest`, `served` and `is_behind` are for all threads, the others for one at a time.
    """

    def __init__(self, name: str, folder: Path, default_tokenizer: Path | None, store: BlockStore) -> None:
        self.name, self.folder = name, folder
        self._tokenizer, self._store = default_tokenizer, store
        notes = open_notes(store.cache.folder, folder)
        self._footers, self._history = Footers(folder, notes / "footers"), History(notes)
        self._held = Held(name=name)
        self._seen: tuple[FolderState, float] | None = None  # the last state, and since when it is unchanged
        self._read: FolderState | None = None  # `held` is of this state; None if the state was not settled
        self._recipe_dates: Mapping[str, FileStat] = {}

    @property
    def held(self) -> Held:
        """Return the current state; the next poll may replace it."""
        return self._held

    @property
    def latest(self) -> Served:
        """Return the latest snapshot. Raises DatasetInvalid: the folder could not be opened."""
        return self._held.opened()

    def served(self, fingerprint: str | None) -> Served:
        """Return the snapshot of this fingerprint, None for the latest, for a job. Raises the errors of Held.find."""
        served = self._held.find(fingerprint, self._serve)
        self._history.touch(served.snapshot.fingerprint)
        served.index.mark_used()
        return served

    def poll(self, shards: Mapping[str, FileStat]) -> bool:
        """Load the changes in the folder, whose shards have these FileStats, if it has settled.

        Return False if it has not: a shard that is being written must not become part of a snapshot.
        """
        sight, now = look(self.folder, shards, self._tokenizer), time.monotonic()
        if self._seen is None or self._seen[0] != sight:
            self._seen = (sight, now)
        if sight == self._read and not self._held.error:
            return True
        if now - self._seen[1] < QUIET_SECONDS:
            return False
        known = self._held.error
        try:
            self._take_in(sight, settled=True)
        except DatasetInvalid as refusal:
            self._log(known, str(refusal))
        return True

    def refresh(self, shards: Mapping[str, FileStat]) -> Change:
        """Load the changes in the folder, whose shards have these FileStats, at once.

        Raises DatasetInvalid: the folder cannot be opened; the previous snapshots are still served.
        """
        self.catch_up()  # compare with the snapshot that all servers serve
        return self._take_in(look(self.folder, shards, self._tokenizer), settled=False)

    def is_behind(self, fingerprint: str | None) -> bool:
        """Return whether another server may have this snapshot, or for None a later one, unknown here."""
        held = self._held
        return held.latest is not None if fingerprint is None else held.recipe is not None and fingerprint not in held.records

    def catch_up(self) -> None:
        """Load the last snapshot of any server with the same cache folder, if the folder still has its shards.

        Other files in the folder are not read: they may be half written.
        """
        if self._held.latest:
            self._take_in_noted()

    def join(self, shards: Mapping[str, FileStat]) -> None:
        """Open the snapshot that other servers serve, if all shards in the folder, with these FileStats, can be opened.

        New shards are left to the next poll, as on the other servers.
        Raises DatasetInvalid: the folder cannot be opened, and other servers may refuse it.
        """
        self._read_folder(look(self.folder, shards, self._tokenizer), settled=False).snapshot()
        self._take_in_noted()

    def _take_in_noted(self) -> None:
        held, last = self._held, self._history.latest()
        before = held.latest.snapshot if held.latest else None
        if last is None or (before and last.fingerprint == before.fingerprint):
            return
        try:
            there = list_folder(self.folder).shards
            dates = {name: there[name] for name, _, _ in last.shards}
            sight = look(self.folder, dates, self._tokenizer)
            reading = self._read_folder(sight, settled=False)
            latest = self._latest_of(reading)
        except (OSError, KeyError, DatasetInvalid):  # the folder has changed since; the next poll reports it
            return
        if latest.snapshot.fingerprint == last.fingerprint:
            kept = {name: shard for name, shard in held.shards.items() if name in there}
            self._follow(latest, replace(reading, shards={**kept, **reading.shards}), sight.recipe, None)
            self._read = None  # if the folder reverts to the state read before, that is another snapshot
            log.info("%s: %s", self.name, Change.between(before, latest.snapshot))

    def fail(self, reason: str) -> None:
        """Record that the folder cannot be listed. The previous snapshots are still served."""
        self._log(self._held.error, reason)
        self._held = replace(self._held, error=reason)

    def remove(self, reason: str) -> None:
        """Record that the folder, and with it every snapshot, is gone."""
        if self._held.latest or self._held.error != reason:
            self._log(self._held.error, reason)
            self._read = None
            self._follow(None, None, {}, reason)

    def _take_in(self, sight: FolderState, *, settled: bool) -> Change:
        reliable, before, reading = settled or sight.is_settled(), self._held, None
        try:
            reading = self._read_folder(sight, settled=settled)
            latest = self._latest_of(reading)
            self._history.add(latest.snapshot)
            self._follow(latest, reading, sight.recipe, None)
        except DatasetInvalid as refusal:
            self._refuse(str(refusal), reading, sight)
            raise
        except Exception as error:  # a bug that one dataset triggers must not stop the others
            refused = DatasetInvalid(f"{self.folder} cannot be opened {_why(error)}: {type(error).__name__}: {error}.")
            reason = str(refused)
            if reason != self._held.error:  # each poll tries again; log the traceback once
                log.exception("%s cannot be opened", self.folder)
            self._refuse(reason, None, sight)
            raise refused from error
        self._read = sight if reliable else None
        change = Change.between(before.latest.snapshot if before.latest else None, latest.snapshot)
        if change.changed or change.recipe or before.error:
            log.info("%s: %s", self.name, change)
        return change

    def _read_folder(self, sight: FolderState, *, settled: bool) -> Reading:
        reading = read_folder(self.folder, sight.shards, self._tokenizer, self._footers, name=self.name, settled=settled)
        if look(self.folder, sight.shards, self._tokenizer).recipe != sight.recipe:  # the next poll would miss it
            raise being_written(f"the recipe of {self.folder}")
        known = self._held.recipe
        if known and sight.recipe == self._recipe_dates and recipe_key(known, ()) == recipe_key(reading.recipe, ()):
            return replace(reading, recipe=known)  # the same files: keep objects that refer to it
        return reading

    def _latest_of(self, reading: Reading) -> Served:
        before, snapshot = self._held.latest, reading.snapshot()
        if before and before.snapshot.shards == snapshot.shards and before.snapshot.recipe.is_like(snapshot.recipe):
            # The recipe makes the same tokens, but its warnings may differ, such as those about unused columns.
            return before if before.snapshot.recipe is snapshot.recipe else replace(before, snapshot=snapshot)
        if before and before.blocks.quarantine.num_unread_groups:
            log.warning(
                "%s: shards have changed or have new dates: what could not be read of them is listed no longer, and is tried "
                "again when it is asked for", self.name,
            )  # fmt: skip
        return self._serve(snapshot)

    def _refuse(self, reason: str, reading: Reading | None, sight: FolderState) -> None:
        if self._held.latest or reading is None:
            self._held = replace(self._held, error=reason)
        else:  # jobs on older snapshots go on while the new one is invalid
            self._follow(None, reading, sight.recipe, reason)

    def _follow(
        self, latest: Served | None, reading: Reading | None, recipe_dates: Mapping[str, FileStat], error: str | None
    ) -> None:
        self._recipe_dates = recipe_dates
        self._held = self._held.followed_by(
            latest,
            shards=reading.shards if reading else {},
            unread=reading.failures if reading else (),
            recipe=reading.recipe if reading else None,
            records={record.fingerprint: record for record in self._history.records()},
            error=error,
        )

    def _serve(self, snapshot: Snapshot) -> Served:
        blocks = Blocks(snapshot, self._store)
        index = Index(self.name, snapshot, blocks)
        if snapshot.recipe.on_bad_row == "replace":
            # Otherwise a run could be refused while it trains, for bad rows that are counted already.
            index.lengths.read()
            index.rows.read()
        return Served(self.name, snapshot, blocks, index)

    def _log(self, known: str | None, reason: str) -> None:
        if reason != known:
            log.warning("%s: %s", self.name, reason)


def _why(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "for lack of memory"
    return f"for lack of threads (for the server: {MORE_THREADS})" if lacks_threads(error) else "because of a fault in penstock"
