"""Requests whose client leaves while what they ask for is made."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from corpora import write_numbered
from penstock_server import respond
from penstock_server.app import create_app
from penstock_server.batches.batch import frames
from penstock_server.datasets.catalog import open_catalog
from penstock_server.inflight import InFlight
from penstock_server.recipes import encode
from penstock_server.storage.cache import CacheFolder
from penstock_server.storage.store import BlockStore


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
