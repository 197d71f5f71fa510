"""A server that stops: it serves on for a while after SIGTERM, and says so."""

from __future__ import annotations

import os
import signal
import sys
from itertools import islice
from pathlib import Path

import httpx
import pytest

from penstock import RemoteDataset
from support.corpora import write_numbered
from support.processes import until
from support.ranks import Rank, go_on
from support.recorded import contents
from support.servers import Serve

NUM_RANKS = 8
BATCHES = "/v1/datasets/numbers/epochs/0/ranks/0/batches"
LOGGED = r" INFO SIGTERM: serves for another 600 seconds, then stops"
PROCESSES = ["1", pytest.param("2", marks=pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"))]


@pytest.fixture(scope="module")
def data(shared: Path) -> Path:
    write_numbered(shared / "numbers", 480)
    return shared


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_server_serves_on_after_sigterm_until_a_second_signal(
    serve: Serve, data: Path, processes: str, second: signal.Signals
) -> None:
    with serve(data, "--drain-seconds", "600", "--processes", processes) as server:
        before = server.get(f"{BATCHES}/0")
        assert before.headers.get("Connection") is None
        os.kill(server.pid, signal.SIGTERM)
        until(lambda: all(server.get("/readyz").status_code == 503 for _ in range(9)))
        assert server.get("/readyz").json()["type"] == "urn:penstock:problem:not-serving"
        after = httpx.get(f"{server.url}{BATCHES}/0", timeout=60)
        assert after.content == before.content
        drained = {"Connection": "close", "Penstock-Draining": "true", "Cache-Control": "no-store"}
        for answer in (after, server.get("/v1/datasets"), server.get("/v1/datasets/none"), server.get("/healthz")):
            assert {name: answer.headers.get(name) for name in drained} == drained
        assert "Penstock-Draining" not in before.headers
        log = server.stop(second)
    assert log.count(LOGGED) == len(log.splitlines()) == 1


@pytest.mark.parametrize("processes", PROCESSES)
def test_server_stops_after_the_drain(serve: Serve, data: Path, processes: str) -> None:
    with serve(data, "--drain-seconds", "0.5", "--processes", processes) as server:
        server.get("/healthz")  # before it serves, a signal ends it at once
        assert "SIGTERM: serves for another 0.5 seconds, then stops" in server.stop()


@pytest.mark.parametrize("processes", PROCESSES)
def test_ctrl_c_stops_without_a_drain(serve: Serve, data: Path, processes: str) -> None:
    with serve(data, "--drain-seconds", "600", "--processes", processes) as server:
        server.get("/healthz")
        assert server.stop(signal.SIGINT) == ""


def endless(rank: int, servers: list[str]) -> RemoteDataset:
    return RemoteDataset(
        servers, "numbers", batch_size=5, seq_len=8, rank=rank, world_size=NUM_RANKS, epochs="endless", prefetch_bytes=1 << 10
    )


@pytest.mark.slow
def test_rolling_restart_of_two_servers_fails_no_request(serve: Serve, data: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags = ("--drain-seconds", "2.5")
    with serve(data, *flags) as one, serve(data, *flags) as other:
        ranks = [Rank(endless(rank, [one.url, other.url])) for rank in range(NUM_RANKS)]
        try:
            for server in (one, other):
                go_on(ranks)
                server.stop()
                server.start()  # it returns once the server serves
            go_on(ranks)
        finally:
            for rank in ranks:
                rank.end()
        for number, rank in enumerate(ranks):
            expected = islice(endless(number, [one.url]), len(rank.seen))
            assert rank.seen == [contents(batch) for batch in expected]
        assert sum(rank.data.stats().num_retries for rank in ranks) < NUM_RANKS  # without a drain, each rank has one
    assert f"{one.url} will stop; going on with {other.url}" in caplog.text
    assert f"{other.url} will stop; going on with {one.url}" in caplog.text
