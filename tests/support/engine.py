"""The engine in this process: snapshots, plans and blocks, without a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.spec import Spec
from penstock_server.batches.member import Member, OrderKey, PlannedEpochs
from penstock_server.batches.plan import Plan, make_plan
from penstock_server.blocks.block import Block
from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.on_demand import BlockFuture
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import Catalog
from penstock_server.catalog.footers import FolderReader
from penstock_server.catalog.scan import list_folder
from penstock_server.catalog.shard import Shard, numbers
from penstock_server.catalog.snapshot import Snapshot
from penstock_server.index.index import Index
from penstock_server.problems import IndexNotReady
from penstock_server.recipes import encode
from penstock_server.recipes.fields import Field
from penstock_server.recipes.recipe import Recipe
from penstock_server.sources.stats import FileStat

Geometry = Sequence[Sequence[int]]  # rows of each row group of each shard
Opener = Callable[..., Catalog]
Loader = Callable[[], tuple[Blocks, Block]]


def open_snapshot(folder: Path, default_tokenizer: Path | None = None) -> Snapshot:
    """The snapshot of a folder as it is now; nothing is remembered. Raises DatasetInvalid: see FolderContents.snapshot."""
    reader = FolderReader(folder, default_tokenizer)
    return reader.read(reader.state(list_folder(folder).shards)).snapshot()


def plan_of(catalog: Catalog, dataset: str, **spec: Any) -> Plan:
    """The plan of a spec, once what it needs is counted."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return catalog.plan(dataset, Spec(**spec))
        except IndexNotReady:
            assert time.monotonic() < deadline
            time.sleep(0.002)


def synthetic_plan(cache_dir: Path, datasets: Mapping[str, Geometry], member: type[Member] = Member, **spec: Any) -> Plan:
    """The plan of a spec over such datasets; several are mixed, and the spec says how. `member` makes their orders."""
    asked = Spec(**{"split": "all", **spec})
    store = BlockStore(cache_dir, 0)
    members = []
    for name in sorted(datasets):
        snapshot = _snapshot(name, datasets[name])
        blocks = Blocks(snapshot, store)
        index = Index(name, snapshot, blocks)
        members.append(member(name, snapshot, blocks, index, PlannedEpochs(), OrderKey.of(asked)))
    fingerprint = "+".join(member.snapshot.fingerprint for member in members)
    return make_plan(members[0].name, tuple(members), replace(asked, snapshot=fingerprint))


def _snapshot(name: str, geometry: Geometry) -> Snapshot:
    shards = [
        Shard(
            path=Path(f"{name}-{number:05}.parquet"),
            stat=FileStat(1, 0, 0, 0),
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


def rows_of(block: Block, feature: str = "tokens") -> list[list[int]]:
    tokens = block.features[feature].tokens
    spans = zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True)
    return [tokens.values[start : start + length].tolist() for start, length in spans]


def loading(blocks: Blocks, indices: Sequence[int]) -> list[BlockFuture]:
    """What is asked for, none of which is mapped."""
    asked = blocks.request(indices)
    futures = [future for future in asked if isinstance(future, BlockFuture)]
    assert futures == asked
    return futures


def encoding_waits(monkeypatch: pytest.MonkeyPatch, began: threading.Event, go_on: threading.Event) -> None:
    """From now on whoever encodes rows says so, and waits until it may go on."""
    read = encode.encode

    def waiting(*args: object) -> pa.RecordBatch:
        began.set()
        assert go_on.wait(30)
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(encode, "encode", waiting)
