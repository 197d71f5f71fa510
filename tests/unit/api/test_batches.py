"""Responses of batches: clients that leave, clients that prefer not to wait, and the wait for blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from penstock_server.api import batches, service
from penstock_server.api.admission import InFlight
from penstock_server.api.batches import preferred_wait
from penstock_server.api.service import KeptForRetry, Requested
from penstock_server.app import create_app
from penstock_server.batches.writer import Body, body_of
from penstock_server.blocks.on_demand import RowsFuture
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.recipes import encode
from support.corpora import write_numbered
from support.servers import serving

BATCH = "/v1/datasets/numbers/epochs/0/ranks/0/batches/0"


class SlowEncoding:
    """Encoding that waits for `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on, self.num_calls = threading.Event(), threading.Event(), 0
        encoding = encode.encode

        def wait(*args: Any) -> Any:
            self.num_calls += 1
            self.begun.set()
            assert self.go_on.wait(30)
            return encoding(*args)

        monkeypatch.setattr(encode, "encode", wait)

    @contextmanager
    def released(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.go_on.set()


def app_of(tmp_path: Path, in_flight: InFlight) -> Any:
    write_numbered(tmp_path / "numbers", 40)
    return create_app(open_catalog(tmp_path, None, BlockStore(tmp_path / "cache")), in_flight)


@pytest.mark.parametrize("format_", ["msgpack", "json"])
def test_request_of_a_client_that_leaves_while_blocks_are_made_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str
) -> None:
    in_flight, made, responses = InFlight(1 << 30), list[Any](), list[Any]()
    app, slow = app_of(tmp_path, in_flight), SlowEncoding(monkeypatch)
    monkeypatch.setattr(batches, "body_of", lambda *args: made.append(args))
    scope = {
        "type": "http",
        "method": "GET",
        "path": BATCH,
        "query_string": f"batch_size=2&seq_len=4&format={format_}".encode(),
        "headers": [],
    }

    async def receive() -> dict[str, Any]:
        await asyncio.to_thread(slow.begun.wait, 30)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        responses.append((message.get("status"), slow.go_on.is_set()))

    with slow.released():
        asyncio.run(asyncio.wait_for(app(scope, receive, send), 30))
    assert responses[0] == (499, False)
    assert (made, in_flight.num_responses) == ([], 0)


def test_client_that_prefers_not_to_wait_gets_the_progress_and_the_work_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, slow = app_of(tmp_path, InFlight(1 << 30)), SlowEncoding(monkeypatch)

    async def ask() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://penstock", timeout=30) as client:

            async def batch(**headers: str) -> httpx.Response:
                return await client.get(BATCH, params={"batch_size": 2, "seq_len": 4}, headers=headers)

            for _ in range(2):
                response = await batch(prefer="respond-async, wait=0")
                assert (response.status_code, response.headers["retry-after"]) == (503, "0")
                problem = response.json()
                assert problem["type"] == "urn:penstock:problem:blocks-not-ready"
                assert (problem["done"], problem["total"], problem["seconds_left"]) == (0, 2, None)
                assert problem["detail"] == "The server is reading: 0 of 2 row groups."
            assert slow.num_calls <= 2  # the second request began nothing
            slow.go_on.set()
            assert (await batch(prefer="wait=20")).content == (await batch()).content

    with slow.released():
        asyncio.run(ask())


def test_kept_blocks_are_forgotten_when_the_request_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_KEPT_SECONDS", 0.01)
    futures = [RowsFuture(Mock(), Mock()) for _ in range(3)]
    first, second, third = (Requested([future]) for future in futures)

    async def leave() -> None:
        kept = KeptForRetry()
        kept.keep("a", first)
        kept.keep("a", second)  # of another client of the same batch
        assert kept.take("a") is second
        kept.keep("b", third)
        await asyncio.sleep(0.2)
        assert kept.take("b") is None

    asyncio.run(leave())
    assert [future.cancelled() for future in futures] == [True, False, True]


@pytest.mark.parametrize("query", ["", "&length_bucket_size=4"])
def test_batches_are_made_in_two_threads_also_for_requests_that_may_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    makers = list[str]()

    def make(*chunk: Any) -> Body:
        makers.append(threading.current_thread().name)
        return body_of(*chunk)

    monkeypatch.setattr(batches, "body_of", make)
    write_numbered(tmp_path / "data" / "numbers", 40)
    with serving(tmp_path / "data", tmp_path / "cache", InFlight(1 << 30)) as url:
        for _ in range(2):  # the first time it waits for its blocks, then they are mapped
            batch = f"{url}{BATCH}?batch_size=2&seq_len=4{query}"
            while (status := httpx.get(batch).status_code) == 503:  # its rows are being counted
                pass
            assert status == 200
    assert [name.rpartition("_")[0] for name in makers] == ["penstock-batches"] * 2


def futures_of(count: int, num_done: int = 0) -> list[Any]:
    futures = [Future[Any]() for _ in range(count)]
    for future in futures[:num_done]:
        future.set_result("block")
    return futures


def test_wait_ends_with_the_last_block() -> None:
    async def main() -> None:
        futures = futures_of(3, num_done=1)
        is_over = Requested(futures).when_done()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(futures[1].set_result, "block").result()
            await asyncio.sleep(0.01)
            assert not is_over.is_set()
            threads.submit(futures[2].set_result, "block")
            await asyncio.wait_for(is_over.wait(), 10)

    asyncio.run(main())


@pytest.mark.parametrize("num_done", [0, 1])
def test_wait_ends_when_a_block_fails(num_done: int) -> None:
    async def main() -> None:
        futures = futures_of(3, num_done)
        is_over = Requested(futures).when_done()
        futures[2].set_exception(OSError("broken"))
        await asyncio.wait_for(is_over.wait(), 10)

    asyncio.run(main())


@pytest.mark.parametrize("count", [0, 2])
def test_wait_for_blocks_that_are_loaded_ends_at_once(count: int) -> None:
    async def main() -> None:
        await asyncio.wait_for(Requested(futures_of(count, num_done=count)).when_done().wait(), 10)

    asyncio.run(main())


def test_block_loaded_after_the_loop_is_closed_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    [future] = futures_of(1)

    async def main() -> None:
        Requested([future]).when_done()

    asyncio.run(main())
    future.set_result("block")
    assert not caplog.records


@pytest.mark.parametrize(
    ("header", "seconds"), [("", None), ("wait=2", 2.0), ('respond-async, wait="30"', 30.0), ("await=2", None)]
)
def test_preferred_wait_is_read_from_the_header(header: str, seconds: float | None) -> None:
    assert preferred_wait(header) == seconds
