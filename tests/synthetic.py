"""Plans over datasets that are nowhere: for what needs an order of any size and reads no block. Whatever reads one, fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.spec import Spec
from penstock_server.batches.member import Member, OrderKey, PlannedEpochs
from penstock_server.batches.plan import Plan, make_plan
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.scan import FileStat
from penstock_server.catalog.shard import Shard, numbers
from penstock_server.catalog.snapshot import Snapshot
from penstock_server.index.index import Index
from penstock_server.recipes.fields import Field
from penstock_server.recipes.recipe import Recipe

Geometry = Sequence[Sequence[int]]  # rows of each row group of each shard


def synthetic_plan(cache_dir: Path, datasets: Mapping[str, Geometry], member: type[Member] = Member, **spec: Any) -> Plan:
    """The plan of a spec over such datasets; several are mixed, and the spec says how. `member` makes their orders."""
    asked = Spec(**{"split": "all", **spec})
    cache = CacheFolder(cache_dir, 0)
    members = []
    for name in sorted(datasets):
        snapshot = _snapshot(name, datasets[name])
        blocks = Blocks(snapshot, BlockStore(cache))
        index = Index(name, snapshot, blocks)
        members.append(member(name, snapshot, blocks, index, PlannedEpochs(), OrderKey.of(asked)))
    fingerprint = "+".join(member.snapshot.fingerprint for member in members)
    return make_plan(members[0].name, tuple(members), replace(asked, snapshot=fingerprint))


def _snapshot(name: str, geometry: Geometry) -> Snapshot:
    shards = [
        Shard(
            path=Path(f"{name}-{number:05}.parquet"),
            date=FileStat(1, 0, 0, 0),
            digest=f"{number:032x}",
            rows_per_group=numbers(rows),
            bytes_per_group=numbers([1 << 20] * len(rows)),
            null_rows=numbers([0] * len(rows)),
            token_range=(0, 50_000),
        )
        for number, rows in enumerate(geometry)
    ]
    return Snapshot(
        Path(name), shards, Recipe(kind="tokens", fields=(("tokens", Field("tokens", (("", ("tokens",)),))),)), name=name
    )
