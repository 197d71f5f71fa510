"""Errors of the application: each becomes a problem with a stable type."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from starlette.testclient import TestClient

from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.batches.assemble import Chunk
from penstock_server.blocks.on_demand import BlockFuture
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import Catalog, open_catalog
from penstock_server.monitoring.stages import StageClock
from penstock_server.problems import ShardUnavailable
from support.corpora import write_shard


@pytest.fixture
def open_all(tmp_path: Path) -> Callable[[], Catalog]:
    folder = tmp_path / "data" / "d"
    folder.mkdir(parents=True)
    write_shard(folder, 9, 0)
    return lambda: open_catalog(folder.parent, None, BlockStore(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "Out of memory for this response"),
        (RuntimeError("can't start new thread"), "Out of memory for another thread"),
    ],
)
def test_lack_of_memory_or_threads_is_a_503(
    open_all: Callable[[], Catalog],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    told: str,
) -> None:
    monkeypatch.setattr(Chunk, "request", Mock(side_effect=error))
    with TestClient(create_app(open_all(), InFlight(1 << 30))) as client:
        answer = client.get("/v1/datasets/d/epochs/0/ranks/0/batches/0?batch_size=3&seq_len=4&shuffle=none")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert answer.json()["type"] == "urn:penstock:problem:out-of-memory"
    assert answer.json()["detail"].startswith(told)
    assert answer.json()["detail"] in caplog.text


def test_bug_is_a_500(open_all: Callable[[], Catalog], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chunk, "request", Mock(side_effect=RuntimeError("odd")))
    with TestClient(create_app(open_all(), InFlight(1 << 30)), raise_server_exceptions=False) as client:
        answer = client.get("/v1/datasets/d/epochs/0/ranks/0/batches/0?batch_size=3&seq_len=4&shuffle=none")
    assert (answer.status_code, answer.json()["type"]) == (500, "urn:penstock:problem:internal-error")
    assert answer.json()["detail"].startswith("RuntimeError: odd. This is a fault of the server")


def test_first_of_several_failed_blocks_is_reported(
    open_all: Callable[[], Catalog], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    futures = [BlockFuture(Mock(), StageClock()) for _ in range(2)]
    futures[0].set_exception(ShardUnavailable("it cannot be read now"))
    monkeypatch.setattr(Chunk, "request", lambda _: list(futures))
    with TestClient(create_app(open_all(), InFlight(1 << 30))) as client:
        answer = client.get("/v1/datasets/d/epochs/0/ranks/0/batches/0?batch_size=3&seq_len=4&shuffle=none")
        assert answer.json()["detail"] == "it cannot be read now"
        futures.pop().set_exception(ShardUnavailable("nor can this"))
        client.get("/healthz")
        gc.collect()
        client.get("/healthz")
    assert "never retrieved" not in caplog.text
