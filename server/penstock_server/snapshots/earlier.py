"""Earlier snapshots of a folder that has only grown since: its shards without the newest ones.

The search runs for a snapshot without a note: the cache folder was lost, or too many snapshots have followed. A shard's age is
its mtime, which a copy of the folder preserves, or its ctime, the time when it arrived in the folder.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock_server.recipes.recipe import Recipe
from penstock_server.snapshots.shard import Shard
from penstock_server.snapshots.snapshot import fingerprint_of

_MAX_LISTED = 1 << 20  # shards of all candidates together: a fingerprint takes a microsecond per shard


def earlier_snapshots(shards: Collection[Shard], recipe: Recipe) -> dict[str, tuple[Shard, ...]]:
    """Return the shards of each earlier snapshot, by fingerprint. `shards` are all shards of the folder, in its order."""
    found: dict[str, tuple[Shard, ...]] = {}
    for ages in ([shard.date.mtime_ns for shard in shards], [shard.date.ctime_ns for shard in shards]):
        newest_first = sorted(set(ages), reverse=True)
        for border in newest_first[1 : 1 + _MAX_LISTED // max(1, 2 * len(shards))]:
            older = tuple(shard for shard, age in zip(shards, ages, strict=True) if age <= border)
            found.setdefault(fingerprint_of(older, recipe), older)
    return found
