"""A folder that grows."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from growing import write_shard
from penstock.spec import Spec
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import Catalog, open_catalog


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "d"
    path.mkdir(parents=True)
    write_shard(path, 9, 0)
    return path


@pytest.fixture
def open_all(tmp_path: Path, folder: Path) -> Callable[[], Catalog]:
    return lambda: open_catalog(folder.parent, None, BlockStore(CacheFolder(tmp_path / "cache")))


@pytest.fixture
def grown(folder: Path, open_all: Callable[[], Catalog], tmp_path: Path) -> Spec:
    """A job's spec of a snapshot that one more shard has followed and of which nothing is noted."""
    first = open_all()["d"].latest.snapshot.fingerprint
    write_shard(folder, 1, 0)
    shutil.rmtree(tmp_path / "cache")
    return Spec(batch_size=1, snapshot=first)
