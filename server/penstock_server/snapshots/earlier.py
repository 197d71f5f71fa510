"""Earlier snapshots of a folder that has only grown since: its shards, but for the newest ones.

Where nothing is noted of a snapshot, since the cache folder was lost or too many have followed, it is looked for among these. A
shard's age is told by its mtime, which comes along when a folder is copied, or by its ctime, when it came to where it is.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock_server.recipes.recipe import Recipe
from penstock_server.snapshots.shard import Shard
from penstock_server.snapshots.snapshot import fingerprint_of

_MAX_LISTED = 1 << 20  # shards of all that is tried: to name a snapshot takes a microsecond a shard


def earlier_snapshots(shards: Collection[Shard], recipe: Recipe) -> dict[str, tuple[Shard, ...]]:
    """The shards of each, by fingerprint. `shards` are all that the folder has, in its order."""
    found: dict[str, tuple[Shard, ...]] = {}
    for ages in ([shard.date.mtime_ns for shard in shards], [shard.date.ctime_ns for shard in shards]):
        newest_first = sorted(set(ages), reverse=True)
        for border in newest_first[1 : 1 + _MAX_LISTED // max(1, 2 * len(shards))]:
            older = tuple(shard for shard, age in zip(shards, ages, strict=True) if age <= border)
            found.setdefault(fingerprint_of(older, recipe), older)
    return found
