"""A folder that grows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from growing import write_shard
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
