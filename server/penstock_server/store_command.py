"""Commands `penstock store usage` and `penstock store gc`: what the shared store holds, and what no snapshot needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta

from penstock.text import counted
from penstock_server.blocks.shared import CLAIM, SharedStore
from penstock_server.catalog.catalog import Catalog
from penstock_server.catalog.dataset import FOOTERS
from penstock_server.cluster.worker import ATTEMPT_SUFFIX
from penstock_server.index.index import MANIFEST
from penstock_server.index.row_lengths import UNIT_SUFFIX

_KINDS = {
    ".block": "blocks",
    ".lengths": "counts of tokens",
    ".index": "counts and packings",
    UNIT_SUFFIX: "counts of row groups",
    MANIFEST: "manifests",
    ATTEMPT_SUFFIX: "attempts to make row groups",
    FOOTERS: "notes of footers",
    CLAIM: "claims of servers and workers",
}


def usage(shared: SharedStore) -> Iterator[str]:
    """Yield a line for each kind of object, with their number and bytes. Raises OSError."""
    sizes = defaultdict[str, list[int]](list)
    for name, size, _ in shared.objects():
        sizes[next((kind for suffix, kind in _KINDS.items() if name.endswith(suffix)), "other objects")].append(size)
    yield from (f"{kind}: {len(of_kind):,}, {sum(of_kind):,} bytes" for kind, of_kind in sorted(sizes.items()))
    yield f"all: {sum(map(len, sizes.values())):,}, {sum(map(sum, sizes.values())):,} bytes"


def collect(shared: SharedStore, catalog: Catalog, now: datetime, age: timedelta, *, deletes: bool) -> Iterator[str]:
    """Remove the objects that are older than `age` and that no snapshot of the catalog needs; yields what it does.

    Without `deletes` it only counts them. Raises OSError.
    """
    needed, num_kept, sizes = needed_names(catalog), 0, dict[str, int]()
    for name, size, written_at in shared.objects():
        is_known = any(name.endswith(suffix) for suffix in _KINDS) and not name.endswith(FOOTERS)
        is_needed = name.rpartition("/")[2].partition("-")[0] in needed and not name.endswith(CLAIM)
        if not is_known or is_needed or now - written_at < age:
            num_kept += 1
        else:
            sizes[name] = size
    if deletes:
        # In this order, what an interrupt leaves is never a manifest or a unit without its blocks.
        for name in sorted(sizes, key=lambda name: (not name.endswith(MANIFEST), not name.endswith(UNIT_SUFFIX))):
            shared.remove(name)
    did = "removed" if deletes else "would be removed; use --delete to remove them"
    yield f"{counted(len(sizes), 'object')} of {sum(sizes.values()):,} bytes {did}"
    yield f"{counted(num_kept, 'object')} kept"


def needed_names(catalog: Catalog) -> set[str]:
    """Return the hashes that the names of all objects of the catalog's snapshots begin with."""
    names = set[str]()
    for state in catalog.states.values():
        fingerprints = {None, *(record.fingerprint for record in state.snapshots)}
        for opened in map(state.find, fingerprints):
            snapshot, of = opened.snapshot, opened.blocks.names
            firsts = snapshot.begins_of_groups(range(snapshot.num_blocks))
            groups = [*map(snapshot.block, firsts)]
            names |= {name for group in groups for name in (of.of_group(group), of.of_unit(group))}
            names |= {of.of_shard(shard) for shard in range(len(snapshot.shards))}
            names.add(of.of_all)
    return names
