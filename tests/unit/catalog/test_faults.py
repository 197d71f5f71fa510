"""Lacks and faults while a snapshot is read."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future
from unittest.mock import Mock

import pytest
from starlette.testclient import TestClient

from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.batches.assemble import Chunk
from penstock_server.blocks.block import Block
from penstock_server.catalog.catalog import Catalog
from penstock_server.catalog.watch import watching
from penstock_server.problems import ShardUnavailable


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "Out of memory for this response: "),
        (RuntimeError("can't start new thread"), "Out of memory for another thread: can't start new thread. "),
    ],
)
def test_who_meets_a_lack_of_memory_or_of_threads_may_ask_again(
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


def test_another_fault_is_one_of_the_servers(open_all: Callable[[], Catalog], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chunk, "request", Mock(side_effect=RuntimeError("odd")))
    with TestClient(create_app(open_all(), InFlight(1 << 30)), raise_server_exceptions=False) as client:
        answer = client.get("/v1/datasets/d/epochs/0/ranks/0/batches/0?batch_size=3&seq_len=4&shuffle=none")
    assert (answer.status_code, answer.json()["type"]) == (500, "urn:penstock:problem:internal-error")
    assert answer.json()["detail"].startswith("RuntimeError: odd. This is a fault of the server")


def test_of_several_blocks_that_fail_one_is_told_and_the_others_make_no_noise(
    open_all: Callable[[], Catalog], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    futures = [Future[Block](), Future[Block]()]
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


def test_a_look_that_fails_is_not_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    looks = threading.Semaphore(0)

    class Failing(Catalog):
        def __init__(self) -> None:
            pass

        def poll(self) -> bool:
            looks.release()
            raise RuntimeError("a fault of ours")

    with watching(Failing(), 0.01):
        for _ in range(3):
            assert looks.acquire(timeout=20)
    assert "could not be looked at; it will be tried again" in caplog.text
