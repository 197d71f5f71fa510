"""Requests whose client leaves while what they ask for is made."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from corpora import write_numbered
from penstock_server import respond, waiting
from penstock_server.admission import InFlight
from penstock_server.app import create_app
from penstock_server.batches.writer import frames
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.recipes import encode


@pytest.mark.parametrize("format_", ["msgpack", "json"])
def test_who_leaves_while_blocks_are_made_is_given_up_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str
) -> None:
    """In threads that go on for the others; of the batches that it asked for none is made."""
    write_numbered(tmp_path / "numbers", 40)
    in_flight = InFlight(1 << 30)
    app = create_app(open_catalog(tmp_path, None, BlockStore(CacheFolder(tmp_path / "cache"))), in_flight)
    begun, go_on, made = threading.Event(), threading.Event(), list[Any]()
    encoding = encode.encode

    def wait(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return encoding(*args)

    def make(*args: Any) -> memoryview:
        made.append(args)
        return frames(*args)

    monkeypatch.setattr(encode, "encode", wait)
    monkeypatch.setattr(respond, "frames", make)
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/datasets/numbers/epochs/0/ranks/0/batches/0",
        "query_string": f"batch_size=2&seq_len=4&format={format_}".encode(),
        "headers": [],
    }
    answers = list[Any]()

    async def receive() -> dict[str, Any]:
        await asyncio.to_thread(begun.wait, 30)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        answers.append((message.get("status"), go_on.is_set()))

    try:
        asyncio.run(asyncio.wait_for(app(scope, receive, send), 30))
    finally:
        go_on.set()
    assert answers[0] == (499, False)
    assert (made, in_flight.num_holds) == ([], 0)


def test_who_prefers_to_hear_of_a_wait_is_told_how_far_the_work_is_and_finds_it_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_numbered(tmp_path / "numbers", 40)
    store = BlockStore(CacheFolder(tmp_path / "cache"))
    app = create_app(open_catalog(tmp_path, None, store), InFlight(1 << 30))
    go_on, calls, encoding = threading.Event(), list[Any](), encode.encode

    def wait(*args: Any) -> Any:
        calls.append(args)
        assert go_on.wait(30)
        return encoding(*args)

    monkeypatch.setattr(encode, "encode", wait)

    async def ask() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://penstock", timeout=30) as client:

            async def batch(**headers: str) -> httpx.Response:
                path = "/v1/datasets/numbers/epochs/0/ranks/0/batches/0"
                return await client.get(path, params={"batch_size": 2, "seq_len": 4}, headers=headers)

            for _ in range(2):
                told = await batch(prefer="respond-async, wait=0")
                assert (told.status_code, told.headers["retry-after"]) == (503, "0")
                problem = told.json()
                assert problem["type"] == "urn:penstock:problem:blocks-not-ready"
                assert (problem["done"], problem["total"], problem["seconds_left"]) == (0, 2, None)
                assert problem["detail"] == "The server is reading: 0 of 2 row groups."
            assert len(calls) <= 2  # the second request began nothing
            go_on.set()
            assert (await batch(prefer="wait=20")).content == (await batch()).content

    asyncio.run(ask())


def test_what_a_client_that_never_comes_back_waited_for_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_KEPT_SECONDS", 0.01)
    given_up = list[str]()

    async def leave() -> None:
        unanswered = waiting.Unanswered()
        unanswered.keep("a", ["block"], lambda: given_up.append("a"))
        unanswered.keep("a", ["another"], lambda: given_up.append("another"))
        assert given_up == ["a"]  # two clients that ask for the same
        assert unanswered.take("a") == ["another"]
        unanswered.keep("b", ["block"], lambda: given_up.append("b"))
        await asyncio.sleep(0.2)
        assert unanswered.take("b") is None

    asyncio.run(leave())
    assert given_up == ["a", "b"]
