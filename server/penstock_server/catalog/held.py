"""The snapshots of a dataset that are held at one time: the latest, and older ones whose shards are all still there.

A folder has grown from one snapshot to the next, so an older one is a part of its shards, and needs no files of its own. Which
part is noted; where the notes are lost, it is found again by the age of the shards, and noted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from penstock.spec import Spec
from penstock_server.batches.member import Member, OrderKey
from penstock_server.batches.planned import PlannedEpochs
from penstock_server.blocks.blocks import Blocks
from penstock_server.catalog.history import Record
from penstock_server.index.index import Index
from penstock_server.problems import DatasetInvalid, SnapshotGone
from penstock_server.recipes.recipe import Recipe
from penstock_server.snapshots.earlier import earlier_snapshots
from penstock_server.snapshots.shard import Shard
from penstock_server.snapshots.snapshot import Snapshot, recipe_key

_OTHER_RECIPE = "the recipe, or the server's version, was changed"


@dataclass(frozen=True, slots=True)
class Served:
    """A snapshot of a dataset that is served."""

    name: str
    snapshot: Snapshot
    blocks: Blocks
    index: Index
    planned: PlannedEpochs = field(default_factory=PlannedEpochs)

    def member(self, spec: Spec) -> Member:
        """The snapshot as a spec reads it. Raises DatasetInvalid: too many rows are bad."""
        self.blocks.quarantine.check()
        return Member(self.name, self.snapshot, self.blocks, self.index, self.planned, OrderKey.of(spec))


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What is held of a dataset; never changed once made, but followed by another.

    latest   what a request is served that names no snapshot; None where the folder could not be opened
    error    why the folder could not be opened when it was last looked at; what is held is of before then
    shards   the shards of the folder, by name, and `recipe` its recipe: older snapshots must agree with them
    unread   the names of those that cannot be read now: of a snapshot with one of them nobody knows whether it agrees
    records  the snapshots that are known, by fingerprint, newest first
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
    _again: dict[str, Served] = field(default_factory=dict)  # older ones that were asked for since
    _earlier: dict[str, tuple[Shard, ...]] = field(default_factory=dict)  # see earlier; empty until one is asked for
    _making: threading.Lock = field(default_factory=threading.Lock)

    @property
    def snapshots(self) -> list[Record]:
        """The snapshots that are served, newest first."""
        return [record for record in self.records.values() if record.fingerprint not in self.gone]

    def find(self, fingerprint: str | None, serve: Callable[[Snapshot], Served]) -> Served:
        """The snapshot of this name, None for the latest; an older one is made by `serve` when it is first asked for.

        Raises SnapshotGone: it is not, or no longer, on this server. Raises DatasetInvalid: there is no latest, or a shard of
        the snapshot cannot be read.
        """
        if fingerprint is None or (self.latest and fingerprint == self.latest.snapshot.fingerprint):
            return self.opened()
        if (record := self.records.get(fingerprint)) and any(name in self.unread for name, _, _ in record.shards):
            raise DatasetInvalid(f"{self.error}")
        if reason := self.gone.get(fingerprint):
            raise self._gone(fingerprint, reason)
        with self._making:
            if fingerprint not in self._again and (older := self._older(fingerprint, serve)):
                self._again[fingerprint] = older
            if fingerprint in self._again:
                return self._again[fingerprint]
        raise SnapshotGone(
            f"snapshot {fingerprint} of {self.name} is not on this server, which has {self.opened().snapshot.fingerprint}: the "
            f"shards, the recipe or the server's version changed since this run began. Resume on the old ones, or start a new "
            f"run."
        )

    def opened(self) -> Served:
        """The latest snapshot. Raises DatasetInvalid: there is none, because the folder could not be opened."""
        if self.latest is None:
            raise DatasetInvalid(self.error or f"{self.name} is new, and will be opened once nothing changes in it.")
        return self.latest

    def earlier(self, fingerprint: str) -> Snapshot | None:
        """An older snapshot of which nothing is noted, by the age of the shards; None: there is none of that name."""
        with self._making:
            return self._by_age(fingerprint)

    def _by_age(self, fingerprint: str) -> Snapshot | None:
        if not self.recipe:
            return None
        if not self._earlier:
            self._earlier.update(earlier_snapshots(self.shards.values(), self.recipe))
        shards = self._earlier.get(fingerprint)
        return Snapshot(shards[0].path.parent, shards, self.recipe, name=self.name) if shards else None

    def _older(self, fingerprint: str, serve: Callable[[Snapshot], Served]) -> Served | None:
        """An older snapshot, by its note or by the age of the shards; None: there is none of that name. Raises SnapshotGone."""
        if record := self.records.get(fingerprint):
            return self._make(record, serve)
        found = self._by_age(fingerprint)
        return serve(found) if found else None

    def _make(self, record: Record, serve: Callable[[Snapshot], Served]) -> Served:
        """An older snapshot, made in the first of three ways that leads to it.

        As it was served before, if shards and recipe are still the same; by the folder's recipe, if that gives the snapshot;
        by the recipe that it was served with.

        Raises SnapshotGone: there is none.
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
        # What is known of its shards is by its own recipe; only their dates may be new.
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
        """What is held from now on: of the older snapshots those that agree with the shards."""
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
    """Whether a recipe makes the snapshot of the shards that are noted."""
    return recipe is not None and record.recipe == recipe_key(recipe, (name for name, _, _ in record.shards))


def _reason(record: Record, shards: Mapping[str, Shard], has_recipe: bool) -> str | None:
    """Why a snapshot can no longer be served: the first of its shards that changed, or else the recipe."""
    for name, size_bytes, digest in record.shards:
        shard = shards.get(name)
        if shard is None:
            return f"{name} was removed"
        if (shard.date.size_bytes, shard.digest) != (size_bytes, digest):
            return f"{name} was rewritten"
    return None if has_recipe else _OTHER_RECIPE
