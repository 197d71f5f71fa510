"""Snapshots that a dataset serves at one time: the latest, and older ones whose shards are all present.

A folder grows from one snapshot to the next, so an older snapshot is a subset of its shards and needs no files. A note names
that subset.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from penstock.spec import Spec
from penstock_server.batches.member import Member, OrderKey, PlannedEpochs
from penstock_server.blocks.loader import Blocks
from penstock_server.catalog.history import Record
from penstock_server.catalog.shard import Shard
from penstock_server.catalog.snapshot import Snapshot, recipe_key
from penstock_server.index.index import Index
from penstock_server.problems import DatasetInvalid, SnapshotGone
from penstock_server.recipes.recipe import Recipe

_OTHER_RECIPE = "the recipe, or the server's version, was changed"


@dataclass(frozen=True, slots=True)
class Served:
    """Served snapshot of a dataset."""

    name: str
    snapshot: Snapshot
    blocks: Blocks
    index: Index
    planned: PlannedEpochs = field(default_factory=PlannedEpochs)

    def member(self, spec: Spec) -> Member:
        """Return the snapshot as a spec reads it. Raises DatasetInvalid: too many rows are bad."""
        self.blocks.quarantine.check()
        return Member(self.name, self.snapshot, self.blocks, self.index, self.planned, OrderKey.of(spec))


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Immutable state of a dataset; a change replaces it by another.

    latest   the snapshot for a request that names no snapshot; None if the folder could not be opened
    error    why the last attempt to open the folder failed; the other fields are from before that attempt
    shards   the folder's shards, by name, and `recipe` its recipe: older snapshots must agree with them
    unread   names of shards that cannot be read now: whether a snapshot with one of them agrees is unknown
    records  the known snapshots, by fingerprint, newest first
    gone     why some of them can no longer be served
    former   older snapshots as they were served before
    """

    name: str
    latest: Served | None = None
    error: str | None = None
    shards: Mapping[str, Shard] = field(default_factory=dict)
    unread: Collection[str] = ()
    recipe: Recipe | None = None
    records: Mapping[str, Record] = field(default_factory=dict)
    gone: Mapping[str, str] = field(default_factory=dict)
    former: Mapping[str, Served] = field(default_factory=dict)
    _again: dict[str, Served] = field(default_factory=dict)  # older snapshots requested since
    _making: threading.Lock = field(default_factory=threading.Lock)

    @property
    def snapshots(self) -> list[Record]:
        """Return the records of the served snapshots, newest first."""
        return [record for record in self.records.values() if record.fingerprint not in self.gone]

    def find(self, fingerprint: str | None, serve: Callable[[Snapshot], Served]) -> Served:
        """Return the snapshot of this fingerprint, None for the latest. `serve` makes an older one on the first request.

        Raises SnapshotGone: this server does not have it, or no longer has it.
        Raises DatasetInvalid: there is no latest snapshot, or a shard of the snapshot cannot be read.
        """
        if fingerprint is None or (self.latest and fingerprint == self.latest.snapshot.fingerprint):
            return self.opened()
        if (record := self.records.get(fingerprint)) and any(name in self.unread for name, _, _ in record.shards):
            raise DatasetInvalid(f"{self.error}")
        if reason := self.gone.get(fingerprint):
            raise self._gone(fingerprint, reason)
        with self._making:
            if fingerprint not in self._again and (record := self.records.get(fingerprint)):
                self._again[fingerprint] = self._make(record, serve)
            if fingerprint in self._again:
                return self._again[fingerprint]
        raise SnapshotGone(
            f"snapshot {fingerprint} of {self.name} is not on this server, which has {self.opened().snapshot.fingerprint}: the "
            f"shards, the recipe or the server's version changed since this run began. Resume on the old ones, or start a new "
            f"run."
        )

    def opened(self) -> Served:
        """Return the latest snapshot. Raises DatasetInvalid: the folder could not be opened."""
        if self.latest is None:
            raise DatasetInvalid(self.error or f"{self.name} is new, and will be opened once nothing changes in it.")
        return self.latest

    def _make(self, record: Record, serve: Callable[[Snapshot], Served]) -> Served:
        """Make an older snapshot in the first of three ways that works.

        1. Reuse the snapshot served before, if shards and recipe are still the same.
        2. Apply the folder's recipe, if that gives the fingerprint.

        3. Apply the recipe that the snapshot was served with.
        Raises SnapshotGone: no way works.
        """
        former, shards = self.former.get(record.fingerprint), tuple(self.shards[name] for name, _, _ in record.shards)
        if former and former.snapshot.recipe is self.recipe and former.snapshot.shards == shards:
            return former
        if self.recipe:
            snapshot = Snapshot(shards[0].path.parent, shards, self.recipe, name=self.name)
            if snapshot.fingerprint == record.fingerprint:
                return serve(snapshot)
        if former is None:
            raise self._gone(record.fingerprint, _OTHER_RECIPE)
        # The facts about its shards follow from its own recipe; only their FileStats may be new.
        pairs = zip(former.snapshot.shards, shards, strict=True)
        own = [replace(shard, date=now.date) for shard, now in pairs]
        return serve(Snapshot(former.snapshot.folder, own, former.snapshot.recipe, name=self.name))

    def _gone(self, fingerprint: str, reason: str) -> SnapshotGone:
        what = f"snapshot {fingerprint} of {self.name} is gone: {reason} since it was made"
        return SnapshotGone(f"{what}. Put back what was there, or start a new run.")

    def followed_by(
        self,
        latest: Served | None,
        *,
        shards: Mapping[str, Shard],
        unread: Collection[str],
        recipe: Recipe | None,
        records: Mapping[str, Record],
        error: str | None,
    ) -> Held:
        """Return the next state, with the older snapshots that agree with the shards."""
        with self._making:
            former = {**self.former, **self._again}
        if self.latest:
            former[self.latest.snapshot.fingerprint] = self.latest
        reasons = {
            fingerprint: _reason(record, shards, fingerprint in former or _is_by(record, recipe))
            for fingerprint, record in records.items()
        }
        return Held(
            name=self.name,
            latest=latest,
            error=error,
            shards=shards,
            unread=unread,
            recipe=recipe,
            records=records,
            gone={fingerprint: reason for fingerprint, reason in reasons.items() if reason},
            former={fingerprint: served for fingerprint, served in former.items() if fingerprint in records},
        )


def _is_by(record: Record, recipe: Recipe | None) -> bool:
    """Return whether a recipe makes this snapshot from the recorded shards."""
    return recipe is not None and record.recipe == recipe_key(recipe, (name for name, _, _ in record.shards))


def _reason(record: Record, shards: Mapping[str, Shard], has_recipe: bool) -> str | None:
    """Return why a snapshot can no longer be served: its first changed shard, otherwise the recipe; None if it can."""
    for name, size_bytes, digest in record.shards:
        shard = shards.get(name)
        if shard is None:
            return f"{name} was removed"
        if (shard.date.size_bytes, shard.digest) != (size_bytes, digest):
            return f"{name} was rewritten"
    return None if has_recipe else _OTHER_RECIPE
