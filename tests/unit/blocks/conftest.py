"""Data, and its blocks."""

import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.store import BlockStore
from penstock_server.recipes import encode
from support.corpora import write_numbered
from support.engine import open_snapshot


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_numbered(tmp_path / "data", 100)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def open_blocks(data: Path, cache_dir: Path) -> Callable[[], Blocks]:
    """The blocks as a server sees them that has just been started."""
    return lambda: Blocks(open_snapshot(data), BlockStore(cache_dir))


@pytest.fixture
def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reads: list[str] = []
    read = encode.encode

    def counted(*args: object) -> pa.RecordBatch:
        reads.append(threading.current_thread().name)
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(encode, "encode", counted)
    return reads
