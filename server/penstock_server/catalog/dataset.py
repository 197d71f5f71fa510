"""A dataset: a folder of shards under a name. What changes in the folder is taken in as a whole, once it can be opened.

One thread at a time looks at the folder and puts another Held in place; requests read whichever is there, once.

event      when                                               what is held from then on
poll       two looks, some seconds apart, see the same        the folder as it is, or what was held, and why not the new
refresh    somebody says that the folder is whole             the same; why not is the answer
catch_up   a request for the latest, or one unknown here      what another server took in last, if its shards are here
recall     a request for one unknown here, after catch_up     the same, and that one, if the age of the shards leads to it
fail       the folder cannot be looked at                     what was held, and why
remove     the folder is gone, and others are still there     nothing, and why
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.text import counted
from penstock_server.blocks.blocks import Blocks
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.held import Held, Served
from penstock_server.catalog.history import History, newest_first
from penstock_server.index.index import Index
from penstock_server.problems import MORE_THREADS, DatasetInvalid, lacks_threads
from penstock_server.schemas import described
from penstock_server.snapshots.folders import QUIET_SECONDS, FolderState, list_folder, look
from penstock_server.snapshots.footers import Footers
from penstock_server.snapshots.notes import open_notes
from penstock_server.snapshots.reading import Reading, read_folder
from penstock_server.snapshots.shard import FileStat, being_written
from penstock_server.snapshots.snapshot import Snapshot, recipe_key

log = logging.getLogger("penstock.dataset")


@described
@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What a look at a folder changed."""

    snapshot: str
    """fingerprint of the latest snapshot"""
    previous: str | None
    """fingerprint of the one before; null if there was none"""
    changed: bool
    """whether they differ"""
    recipe: bool
    """whether its recipe differs, also in what makes no other snapshot, such as what becomes of bad rows"""
    added: int
    """shards that are new"""
    removed: int
    """shards that are gone"""
    rewritten: int
    """shards whose content differs"""

    @classmethod
    def between(cls, before: Snapshot | None, after: Snapshot) -> Change:
        """The change from one snapshot, if there was one, to the next."""
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
        """The change as the log tells it."""
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
    """The snapshots of one folder.

    `held`, `latest`, `served` and `is_behind` are for all threads, the others for one at a time.
    """

    def __init__(self, name: str, folder: Path, default_tokenizer: Path | None, store: BlockStore) -> None:
        self.name, self.folder = name, folder
        self._tokenizer, self._store = default_tokenizer, store
        notes = open_notes(store.cache.folder, folder)
        self._footers, self._history = Footers(folder, notes / "footers"), History(notes)
        self._held = Held(name=name)
        self._seen: tuple[FolderState, float] | None = None  # the last sight, and since when it has been the same
        self._read: FolderState | None = None  # what is held is of this one; None if it was too young to be relied on
        self._recipe_dates: Mapping[str, FileStat] = {}

    @property
    def held(self) -> Held:
        """What is held now; the next look may give another."""
        return self._held

    @property
    def latest(self) -> Served:
        """The latest snapshot. Raises DatasetInvalid: there is none, because the folder could not be opened."""
        return self._held.opened()

    def served(self, fingerprint: str | None) -> Served:
        """The snapshot of this name, None for the latest, for a job. Raises what Held.find raises."""
        served = self._held.find(fingerprint, self._serve)
        self._history.touch(served.snapshot.fingerprint)
        served.index.mark_used()
        return served

    def poll(self, shards: Mapping[str, FileStat]) -> bool:
        """Takes in what changed in the folder, whose shards have these dates, if nothing has changed for a while.

        False: something has; what is being written must not become a snapshot.
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
        """Takes in what changed in the folder, whose shards have these dates, at once.

        Raises DatasetInvalid: it cannot be opened as it is; what was served is served on.
        """
        self.catch_up()  # the change is one from what all servers serve
        return self._take_in(look(self.folder, shards, self._tokenizer), settled=False)

    def is_behind(self, fingerprint: str | None) -> bool:
        """Whether there may be a snapshot that is unknown here: one of this name, or, for None, another server's later one."""
        held = self._held
        return held.latest is not None if fingerprint is None else held.recipe is not None and fingerprint not in held.records

    def catch_up(self) -> None:
        """Takes in the snapshot that a server with the same cache folder took in last, if the folder still has its shards.

        Of what else is in the folder nothing is looked at: it may be half written.
        """
        if self._held.latest:
            self._take_in_noted()

    def join(self, shards: Mapping[str, FileStat]) -> None:
        """Opens what others serve of the folder, if all that is in it, shards with these dates, can be opened.

        What is new they look at, and so will this one. Raises DatasetInvalid: it cannot be opened, and others may refuse it.
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
        except (OSError, KeyError, DatasetInvalid):  # the folder has changed since, which the next look at it will tell
            return
        if latest.snapshot.fingerprint == last.fingerprint:
            kept = {name: shard for name, shard in held.shards.items() if name in there}
            self._follow(latest, replace(reading, shards={**kept, **reading.shards}), sight.recipe, None)
            self._read = None  # should the folder come back to what was read of it, that is another snapshot than this one
            log.info("%s: %s", self.name, Change.between(before, latest.snapshot))

    def recall(self, fingerprint: str) -> None:
        """Notes an older snapshot of which nothing is noted, if the age of the shards leads to it: from then on it is known.

        Otherwise each request for it would take another look, and the next change in the folder would forget it.
        """
        held = self._held
        if fingerprint not in held.records and (snapshot := held.earlier(fingerprint)):
            known = newest_first([*held.records.values(), self._history.recall(snapshot)])
            self._held = replace(held, records={record.fingerprint: record for record in known})

    def fail(self, reason: str) -> None:
        """The folder cannot be looked at; what was served is served on."""
        self._log(self._held.error, reason)
        self._held = replace(self._held, error=reason)

    def remove(self, reason: str) -> None:
        """The folder is gone, and so is every snapshot of it."""
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
        except Exception as error:  # a fault of ours in one dataset must not stop the others
            refused = DatasetInvalid(f"{self.folder} cannot be opened {_why(error)}: {type(error).__name__}: {error}.")
            reason = str(refused)
            if reason != self._held.error:  # it will be tried again and again
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
        if look(self.folder, sight.shards, self._tokenizer).recipe != sight.recipe:  # or the next look would find nothing new
            raise being_written(f"the recipe of {self.folder}")
        known = self._held.recipe
        if known and sight.recipe == self._recipe_dates and recipe_key(known, ()) == recipe_key(reading.recipe, ()):
            return replace(reading, recipe=known)  # the same files: what is held by it may stay
        return reading

    def _latest_of(self, reading: Reading) -> Served:
        before, snapshot = self._held.latest, reading.snapshot()
        if before and before.snapshot.shards == snapshot.shards and before.snapshot.recipe.is_like(snapshot.recipe):
            # What it makes is the same, but not what is told of it, such as of columns that are not used.
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
        else:  # jobs on older snapshots need not wait until the new one is mended
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
            # Or a run would be refused in its midst for bad rows that are counted already.
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
