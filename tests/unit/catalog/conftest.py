"""Folders of shards, and a catalog over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.corpora import write_shard


@pytest.fixture
def folder(data: Path) -> Path:
    """The folder of the dataset d, with one shard."""
    path = data / "d"
    path.mkdir(parents=True)
    write_shard(path, 9, 0)
    return path
