"""The metrics of real servers: over restarts of workers, with a shared cache, and as Prometheus scrapes them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock import RemoteDataset
from penstock.wire.report import HEADER
from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from support.corpora import write_numbered
from support.processes import until
from support.servers import Serve, Server

Key = tuple[str, tuple[tuple[str, str], ...]]  # the name and the labels of a series
Samples = Mapping[Key, float]

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def scrape(server: Server) -> Samples:
    """All samples, on a new connection: any process may answer."""
    return parsed(httpx.get(f"{server.url}/metrics", timeout=60).text)


def parsed(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def total(samples: Samples, name: str) -> float:
    return sum(value for (of_metric, _), value in samples.items() if of_metric == name)


def run_epoch(server: Server, seed: int = 0) -> int:
    """Let one rank take an epoch. Return the number of its samples."""
    data = RemoteDataset(server.url, "numbers", batch_size=4, seq_len=8, rank=0, world_size=1, seed=seed)
    return sum(len(batch["input_ids"]) for batch in data)


@linux
@pytest.mark.slow
def test_no_counter_goes_backwards_when_a_worker_is_killed(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    write_numbered(tmp_path / "data" / "numbers", 480)
    with serve(tmp_path / "data", "--processes", "2") as server:
        before, num_samples = scrape(server), 0

        def look() -> Samples:
            nonlocal before
            after = scrape(server)
            counters = {key for key in before if key[0].endswith(("_total", "_count", "_sum", "_bucket"))}
            assert {key: after.get(key, 0.0) for key in counters if after.get(key, 0.0) < before[key]} == {}
            before = after
            return after

        def is_replaced(pid: int) -> bool:
            look()
            return len(server.children()) == 2 and pid not in server.children()

        until(lambda: len(server.children()) == 2)
        for number in range(2):
            num_samples += run_epoch(server, seed=number)
            assert total(look(), "penstock_samples_total") == num_samples
            # A process writes its history once a second, and what it has not written dies with it.
            until(lambda: num_batches_in_history(server) == total(look(), "penstock_batches_total"))
            oldest = server.children()[0]
            os.kill(oldest, signal.SIGKILL)
            until(partial(is_replaced, oldest))
        run_epoch(server)
        assert num_batches_in_history(server) == total(look(), "penstock_batches_total")
        server.stop()
    assert [*tmp_path.glob("penstock-*")] == []


def num_batches_in_history(server: Server) -> float:
    """Batches of the last hour, as all processes have counted them."""
    amounts = server.json("/v1/jobs", history="true")["server"]["history"]["batches"]
    return sum(amount or 0.0 for amount in amounts)


@linux
@pytest.mark.slow
def test_next_server_removes_the_folder_of_a_killed_one(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    write_numbered(tmp_path / "data" / "numbers", 48)
    with serve(tmp_path / "data", "--processes", "2") as server:
        [left] = tmp_path.glob("penstock-*")
        server.stop(signal.SIGKILL)
        assert left.exists()
        server.start()
        [_] = set(tmp_path.glob("penstock-*")) - {left}
        assert not left.exists()
        server.stop()
    assert [*tmp_path.glob("penstock-*")] == []


def test_servers_with_one_cache_folder_count_what_each_did(serve: Serve, tmp_path: Path) -> None:
    write_numbered(tmp_path / "data" / "numbers", 480, num_shards=3, row_group_size=32)
    with ExitStack() as stack:
        flags = "--processes", "1"
        servers = [stack.enter_context(serve(tmp_path / "data", *flags, cache_dir=tmp_path / "cache")) for _ in range(2)]
        num_samples = [run_epoch(server) for server in servers]
        scrapes = [scrape(server) for server in servers]
    assert [total(samples, "penstock_samples_total") for samples in scrapes] == num_samples
    # The first one decodes each row group, and the second finds the blocks.
    assert [total(samples, "penstock_decode_seconds_count") for samples in scrapes] == [15, 0]
    assert [total(samples, "penstock_cache_misses_total") for samples in scrapes] == [15, 0]
    assert all(total(samples, "penstock_cache_hits_total") >= 15 for samples in scrapes)
    cached = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.block"))
    assert [total(samples, "penstock_cache_bytes") for samples in scrapes] == [cached, cached]


def random_requests(number: int, rng: random.Random) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Methods, URLs and headers of requests of all kinds, with random names and numbers."""
    batches = "/v1/datasets/numbers/epochs/{}/ranks/0/batches"
    for kind in range(number):
        word, other = (f"{rng.getrandbits(64):x}" for _ in range(2))
        report = {
            "job": word,
            "workers": 1,
            "epoch": 0,
            "step": kind,
            "compute_seconds": 1.0,
            "batches": 1,
            "tokens": 1,
            "retries": 1,
            "corrupted": 1,
        }
        report |= {"buffered_bytes": 0, "wait_seconds": {"tokenize": 1.0, word: 1.0}}
        kinds: list[tuple[str, str, dict[str, str]]] = [
            ("GET", f"/{word}", {}),
            ("POST", f"/{word}/{other}?{word}={other}", {}),
            (word.upper(), f"/v1/datasets/{word}", {}),
            ("DELETE", f"/v1/{word}", {}),
            ("GET", f"/v1/datasets/{word}/spec?batch_size=2", {}),
            ("GET", f"/v1/datasets/numbers/spec?{word}={other}", {}),
            ("GET", f"/v1/datasets/numbers/rows/{rng.randrange(1 << 40, 1 << 50)}", {}),
            ("GET", f"{batches.format(rng.randrange(1000))}/{rng.randrange(10)}?batch_size=4&seq_len=8&job={word}", {}),
            ("HEAD", f"{batches.format(word)}?rank={other}", {}),
            (
                "GET",
                f"{batches.format(rng.randrange(1000))}?batch_size=4&seq_len=8&stop=1",
                {HEADER: json.dumps(report), "User-Agent": word, word: other},
            ),
            ("GET", f"/v1/datasets/{word}/epochs/0/ranks/0/batches", {HEADER: json.dumps(report)}),
            ("POST", f"/v1/datasets/{word}/refresh", {}),
        ]
        yield kinds[kind % len(kinds)]


@pytest.mark.slow
def test_requests_create_no_series(tmp_path: Path) -> None:
    write_numbered(tmp_path / "data" / "numbers", 480)
    store = BlockStore(tmp_path / "cache")
    app = create_app(open_catalog(tmp_path / "data", None, store), InFlight(1 << 30))

    async def send(number: int, seed: int) -> set[Key]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            for method, url, headers in random_requests(number, random.Random(seed)):
                await client.request(method, url, headers=headers)
            await client.get("/metrics")  # it counts itself, too
            return {*parsed((await client.get("/metrics")).text)}

    before = asyncio.run(send(100, seed=0))
    after = asyncio.run(send(10_000, seed=1))
    store.close()
    assert after == before
    labels = {(name, label): {dict(of)[label] for key, of in after if key == name} for name, of in after for label, _ in of}
    assert labels["penstock_requests_total", "method"] == {"GET", "HEAD", "POST", "other"}
    assert {"other", "/v1/datasets/{dataset}/spec"} < labels["penstock_requests_total", "route"]
    assert labels["penstock_rank_wait_seconds_total", "stage"] == {"tokenize"}
    assert labels["penstock_rank_wait_seconds_total", "dataset"] == {"numbers"}
