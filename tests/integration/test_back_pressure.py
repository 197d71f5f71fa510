"""Back-pressure: slow readers do not delay other clients, and their responses take bounded memory."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from penstock import RemoteDataset
from support.corpora import write_numbered
from support.processes import MIB, Watch, until
from support.recorded import contents
from support.servers import Serve, rank_that_prefers, slow_readers

NUM_ROWS = 480
BATCHES = "/v1/datasets/numbers/epochs/0/ranks/0/batches"
WIDE: dict[str, str | int] = {"batch_size": 8, "seq_len": 32_768}  # 524,352 bytes a batch, so 15 are a chunk


@pytest.fixture(scope="module")
def data(shared: Path) -> Path:
    write_numbered(shared / "numbers", NUM_ROWS)
    return shared


def dataset(*urls: str, rank: int = 0, retry_seconds: float = 60.0) -> RemoteDataset:
    return RemoteDataset(urls, "numbers", batch_size=8, seq_len=64, rank=rank, world_size=rank + 1, retry_seconds=retry_seconds)


def test_slow_readers_do_not_delay_an_epoch(serve: Serve, data: Path) -> None:
    with serve(data) as server:
        expected = [*map(contents, dataset(server.url))]
        with slow_readers(60, server.url, BATCHES, {**WIDE, "stop": 7}) as slow:
            assert all(head.startswith("HTTP/1.1 200 OK") for head in slow.wait_for_heads())
            assert [*map(contents, dataset(server.url))] == expected
            assert slow.num_connected == 60
            assert max(slow.num_received) < 1 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_readers_beyond_the_budget_get_a_503_and_memory_stays_within_it(serve: Serve, data: Path) -> None:
    with serve(data, "--inflight-bytes", "100MB") as server:
        server.frames(BATCHES, **WIDE)
        with Watch(server.pid) as watch, slow_readers(40, server.url, BATCHES, WIDE) as slow:
            heads = slow.wait_for_heads()
            time.sleep(1)  # the second chunks are made meanwhile
            admitted = [head for head in heads if head.startswith("HTTP/1.1 200 OK")]
            assert len(admitted) == 100_000_000 // (2 * 15 * 524_352)
            assert server.get(f"{BATCHES}/0", **WIDE).status_code == 200  # for a single batch there is room
            refused = server.get(BATCHES, **WIDE)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            assert refused.json()["type"] == "urn:penstock:problem:busy"
            assert "the budget of 100,000,000 bytes" in refused.json()["detail"]
        assert watch.peak - watch.first < 100_000_000 + 32 * MIB
        until(lambda: server.get(BATCHES, **WIDE).status_code == 200)  # those who left have given back what they held


def test_loop_waits_for_a_busy_server_longer_than_for_a_dead_one(serve: Serve, data: Path) -> None:
    """A budget of nothing lets in one response at a time."""
    with serve(data, "--inflight-bytes", "0") as server:
        busy = dataset(server.url, retry_seconds=0.5)
        rows: list[int] = []

        def run() -> None:
            rows.extend(row for batch in busy for row in batch["input_ids"][:, 0].tolist())

        with slow_readers(1, server.url, BATCHES, WIDE) as slow:
            [head] = slow.wait_for_heads()
            assert head.startswith("HTTP/1.1 200 OK")
            thread = threading.Thread(target=run)
            thread.start()
            time.sleep(3)  # several times retry_seconds
            assert not rows
        thread.join(60)
        assert Counter(rows) == Counter(range(NUM_ROWS))
        assert busy.stats().num_retries >= 2


def test_loop_moves_from_a_busy_server_to_a_free_one(serve: Serve, data: Path, tmp_path: Path) -> None:
    with serve(data, "--inflight-bytes", "0") as busy, serve(data) as free:
        rank = rank_that_prefers(busy.url, free.url)
        expected = [*map(contents, dataset(free.url, rank=rank))]
        with slow_readers(1, busy.url, BATCHES, WIDE) as slow:
            slow.wait_for_heads()
            both = dataset(busy.url, free.url, rank=rank)
            assert [*map(contents, both)] == expected
            assert both.stats().num_retries == 1  # the busy one was asked once


def test_batch_larger_than_the_budget_is_served(serve: Serve, data: Path) -> None:
    with serve(data, "--inflight-bytes", "1KB") as server:
        assert len(server.frames(f"{BATCHES}/0", **WIDE)) == 1
        assert (
            httpx.get(f"{server.url}{BATCHES}", params={**WIDE, "format": "json", "stop": "2"}, timeout=60).status_code == 200
        )
        assert len(server.frames(f"{BATCHES}/1", **WIDE)) == 1  # what the ones before held is given back
