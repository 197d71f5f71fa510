"""Folders of shards, and a catalog over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import Catalog, open_catalog
from support.corpora import write_shard, write_tokenizer
from support.engine import Opener


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def folder(data: Path) -> Path:
    """The folder of the dataset d, with one shard."""
    path = data / "d"
    path.mkdir(parents=True)
    write_shard(path, 9, 0)
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer.json")


@pytest.fixture
def open_all(tmp_path: Path, data: Path) -> Opener:
    def run(tokenizer: Path | None = None) -> Catalog:
        return open_catalog(data, tokenizer, BlockStore(CacheFolder(tmp_path / "cache")))

    return run
