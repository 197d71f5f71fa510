"""Attacks by one caller, with figures of the server before and after its bounds; a trainer goes on meanwhile.

The figures are of two cores and 500,000 rows of token ids, with the attacker at another address than the trainer.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import RemoteDataset
from penstock_server.api.admission import InFlight
from penstock_server.serving import connections
from support.corpora import write_numbered
from support.processes import MIB, Watch, until
from support.servers import Serve, Server, serving, slow_readers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="binds 127.0.0.2, and reads /proc")
NUM_ROWS, LONG_ROWS = 480, 2000
BATCHES = "/v1/datasets/numbers/epochs/0/ranks/0/batches"
WIDE: dict[str, str | int] = {"batch_size": 8, "seq_len": 32_768}  # 15 batches of 524,352 bytes are a chunk
ATTACKER = "127.0.0.2"


@pytest.fixture(scope="module")
def data(shared: Path) -> Path:
    write_numbered(shared / "numbers", NUM_ROWS)
    (shared / "long").mkdir()
    lengths, tokens = pa.array(np.arange(LONG_ROWS + 1, dtype=np.int32) * 1000), pa.array(np.zeros(1000 * LONG_ROWS, np.int32))
    pq.write_table(pa.table({"input_ids": pa.ListArray.from_arrays(lengths, tokens)}), shared / "long" / "0.parquet")
    (shared / "many").mkdir()
    offsets = pa.array(np.arange(300_001, dtype=np.int32) * 4)
    ids = pa.ListArray.from_arrays(offsets, pa.array(np.arange(1_200_000, dtype=np.int32) % 1000))
    pq.write_table(pa.table({"input_ids": ids}), shared / "many" / "0.parquet", row_group_size=10_000)
    return shared


@pytest.fixture(scope="module")
def server(serve: Serve, data: Path) -> Server:
    return serve(data)


def rows_of_epoch(url: str) -> list[int]:
    """What a trainer gets in an epoch."""
    data = RemoteDataset(url, "numbers", batch_size=8, seq_len=64, retry_seconds=60)
    return sorted(row for batch in data for row in batch["input_ids"][:, 0].tolist())


def ask(url: str, path: str) -> tuple[int, Any]:
    """The status and the JSON that the attacker gets."""
    address = urlsplit(url)
    assert address.hostname
    with closing(http.client.HTTPConnection(address.hostname, address.port, timeout=120, source_address=(ATTACKER, 0))) as own:
        own.request("GET", path)
        response = own.getresponse()
        body = response.read()
        return response.status, json.loads(body) if "json" in response.headers["Content-Type"] else body


@contextmanager
def attack(url: str, paths: list[str]) -> Iterator[list[int]]:
    """Requests all paths at once; afterwards the list has the statuses."""
    statuses: list[int] = []
    with ThreadPoolExecutor(len(paths)) as threads:
        answers = [threads.submit(ask, url, path) for path in paths]
        yield statuses
        statuses += [answer.result()[0] for answer in answers]


@pytest.mark.parametrize("address", [ATTACKER, "127.0.0.1"])
def test_trainer_gets_the_room_of_slow_readers(serve: Serve, data: Path, address: str) -> None:
    """Readers of 300 bytes a second held the whole budget.

    Before: no batch in 120 s. After: at most 0.2 s for a batch, or 2.3 s if the trainer has the address of the readers.
    """
    with (
        serve(data, "--inflight-bytes", str(2 * 15 * 524_352 + 500)) as server,
        slow_readers(1, server.url, BATCHES, WIDE, source=address) as slow,
    ):
        [head] = slow.wait_for_heads()
        assert head.startswith("HTTP/1.1 200 OK")
        assert server.get(BATCHES, batch_size=8, seq_len=64).status_code == 503  # it is full
        assert rows_of_epoch(server.url) == [*range(NUM_ROWS)]
        assert re.search(r'penstock_limits_total\{limit="inflight_bytes"\} [1-9]', server.get("/metrics").text)


def test_packing_into_single_tokens_is_refused(server: Server) -> None:
    """One URL packed documents into samples of one token. Before: 14.7 s of CPU, 1.2 GB, 477 MB of files. After: a 422."""
    path = "/v1/datasets/long/spec?packing=best_fit&seq_len="
    until(lambda: server.get(f"{path}1").status_code != 503)
    refused = server.get(f"{path}1")
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:penstock:problem:bad-parameter")
    assert "into 2,000,000 parts, and the limit is 1,083,826" in refused.json()["detail"]
    assert server.json_when_ready(f"{path}64")["num_samples"] == LONG_ROWS * -(-1000 // 64)


def test_caller_cannot_pack_for_many_lengths(serve: Serve, data: Path) -> None:
    """Each seq_len of best_fit is a file. Before: no limit. After: 32 of them an hour for one caller."""
    with serve(data) as server:
        path = "/v1/datasets/numbers/spec?packing=best_fit&seq_len="
        statuses = [ask(server.url, f"{path}{seq_len}")[0] for seq_len in range(100, 140)]
        assert statuses.count(429) == 8
        _, refused = ask(server.url, f"{path}200")
        assert refused["type"] == "urn:penstock:problem:limit-exceeded"
        assert "has used 32 different seq_len of packing=best_fit, the limit for 3600 seconds" in refused["detail"]
        assert server.get(f"{path}200").status_code != 429  # another caller


@pytest.mark.parametrize(
    "query",
    [
        "length_bucket_size=64&window=8000000&batch_size=8&seq_len=64&seed={}",
        "mix=many:500{0:02},numbers:499{0:02}&batch_size=8&seq_len=64",
    ],
)
def test_costly_plans_take_turns_and_little_memory(server: Server, query: str) -> None:
    """48 specs that sort windows of the dataset, and 48 mixtures of long periods.

    Before: /healthz after 6.4 s (2.8 s for mixtures), 986 MB more (213 MB). After: 0.4 s (0.3 s), 263 MB (117 MB).
    """
    path = "/v1/datasets/many/epochs/0/ranks/0/batches/0?" + query
    while server.get(path.format(99)).status_code == 503:  # tokens are being counted
        pass
    with Watch(server.pid) as watch:
        with attack(server.url, [path.format(number) for number in range(1, 25)]) as statuses:
            assert server.get("/healthz").status_code == 200
            assert rows_of_epoch(server.url) == [*range(NUM_ROWS)]
        assert statuses == [200] * 24
    assert watch.peak - watch.first < 160 * MIB


def test_texts_too_large_to_be_read_are_refused_before_they_are_made(server: Server) -> None:
    """Provenance of 65,536 rows, and 1 GiB as JSON. Before: 4.5 s of CPU each, 2.2 GB. After: a 422."""
    for path, limit in (
        ("0/provenance?batch_size=65536&drop_last=false", "the limit is 16,384"),
        ("0?batch_size=512&seq_len=1000000&drop_last=false&format=json", "the limit is 67,108,864"),
        ("?batch_size=512&stop=300&drop_last=false&format=json", "are too many for format=json: the limit is 16,384"),
    ):
        url = f"/v1/datasets/many/epochs/0/ranks/0/batches{'' if path.startswith('?') else '/'}{path}"
        refused = server.get(url)
        assert (refused.status_code, refused.json()["type"]) == (422, "urn:penstock:problem:bad-parameter")
        assert limit in refused.json()["detail"]


def connect(url: str, source: str = "127.0.0.1") -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), timeout=60, source_address=(source, 0))


def answer(own: socket.socket, request: bytes) -> bytes:
    """All that the server sends after a request until it closes the connection."""
    received = bytearray()
    try:
        own.sendall(request)
        while piece := own.recv(65536):
            received += piece
    except ConnectionError:
        pass
    return bytes(received)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[str]:
    """A server for six connections."""
    write_numbered(tmp_path / "data" / "numbers", 40)
    with serving(tmp_path / "data", tmp_path / "cache", InFlight(1 << 30), max_connections=6) as url:
        yield url


def test_one_address_has_half_of_the_connections(small: str) -> None:
    """Before: any number. After: half of --max-connections from one address."""
    mine = [connect(small, ATTACKER) for _ in range(3)]
    with connect(small, ATTACKER) as refused:
        assert answer(refused, b"").startswith(b"HTTP/1.1 429 Too Many Requests")
    others = [connect(small) for _ in range(3)]
    with connect(small, "127.0.0.3") as refused:
        assert b"this process of the server has 6 connections, and its limit is 6" in answer(refused, b"")
    for own in mine:
        own.close()
    until(lambda: ask(small, "/healthz")[0] == 200)
    for own in others:
        own.close()


def test_head_and_body_of_a_request_have_a_bound(small: str) -> None:
    """Before: a head of any size was collected, 400 MB of it with one connection."""
    with connect(small) as own:
        assert answer(own, b"GET /?" + b"a" * 70_000 + b" HTTP/1.1\r\n").startswith(b"HTTP/1.1 431 ")
    with connect(small) as own:
        own.sendall(b"POST /v1/datasets/numbers/refresh HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n")
        assert own.recv(65536).startswith(b"HTTP/1.1 200 ")  # a body is not waited for
        answer(own, b"a" * 500_000)  # which ends with the connection
    assert b'penstock_limits_total{limit="body_bytes"} 1.0' in ask(small, "/metrics")[1]


def test_pipelined_requests_have_a_bound(small: str) -> None:
    with connect(small) as own:
        request = b"GET /v1/datasets HTTP/1.1\r\nHost: a\r\n\r\n"
        assert answer(own, 100 * request).count(b"HTTP/1.1 200 OK") <= connections.MAX_PIPELINED + 1
    assert ask(small, "/healthz")[0] == 200


def test_request_has_a_time_limit(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: a connection without a request stayed open for good."""
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.3)
    for request in (b"", b"GET /v1/data"):
        with connect(small) as own:
            assert answer(own, request).startswith(b"HTTP/1.1 408 ")
    with connect(small) as own:  # an empty line begins a request, too
        own.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert own.recv(65536).startswith(b"HTTP/1.1 200 OK")
        assert answer(own, b"\r\n").startswith(b"HTTP/1.1 408 ")
    with connect(small) as own:  # a complete request ends the time
        own.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert own.recv(65536).startswith(b"HTTP/1.1 200 OK")
        threading.Event().wait(0.6)
        own.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert own.recv(65536).startswith(b"HTTP/1.1 200 OK")
