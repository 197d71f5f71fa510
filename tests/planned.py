"""Snapshots of folders, and plans over a catalog, in this process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from penstock.spec import Spec
from penstock_server.batches.plan import Plan
from penstock_server.catalog.catalog import Catalog
from penstock_server.catalog.footers import FooterCache, read_folder
from penstock_server.catalog.scan import list_folder, state_of_folder
from penstock_server.catalog.snapshot import Snapshot
from penstock_server.problems import IndexNotReady


def open_snapshot(folder: Path, default_tokenizer: Path | None = None) -> Snapshot:
    """The snapshot of a folder as it is now; nothing is remembered. Raises DatasetInvalid: see FolderContents.snapshot."""
    state = state_of_folder(folder, list_folder(folder).shards, default_tokenizer)
    return read_folder(folder.name, folder, state, default_tokenizer, FooterCache(folder)).snapshot()


def plan_of(catalog: Catalog, dataset: str, **spec: Any) -> Plan:
    """The plan of a spec, once what it needs is counted."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return catalog.plan(dataset, Spec(**spec))
        except IndexNotReady:
            assert time.monotonic() < deadline
            time.sleep(0.002)
