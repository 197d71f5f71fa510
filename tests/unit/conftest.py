"""Fixtures of the unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_server.blocks.block import Block
from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import Catalog, open_catalog
from support.corpora import write_tokenizer
from support.engine import Loader, Opener, open_snapshot


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "run.ledger"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer.json")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def open_all(tmp_path: Path, data: Path) -> Opener:
    def run(tokenizer: Path | None = None) -> Catalog:
        return open_catalog(data, tokenizer, BlockStore(tmp_path / "cache"))

    return run


@pytest.fixture
def load(tmp_path: Path, data: Path, tokenizer: Path) -> Loader:
    """Opens the data as it is, and loads its first block."""

    def loaded() -> tuple[Blocks, Block]:
        blocks = Blocks(open_snapshot(data, tokenizer), BlockStore(tmp_path / "cache"))
        return blocks, blocks.get([0])[0]

    return loaded
