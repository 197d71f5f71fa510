"""Epochs through connections that fail in every way: the same bytes as without."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

import penstock.servers
import penstock.transport
from penstock import RemoteDataset, ServerUnavailable, SnapshotGone
from penstock.servers import by_preference
from support.chaos import KINDS, ChaosProxy, Kind
from support.corpora import write_numbered, write_shards
from support.recorded import contents
from support.servers import Serve, Server, pages, rank_that_prefers

NUM_ROWS = 400
AWAY = "http://127.0.0.1:9"
SEEDS = range(int(os.environ.get("PENSTOCK_TEST_CHAOS_SEEDS", "1")))
# Without hangs, which take as long as the client is patient.
QUICK: tuple[Kind, ...] = ("delay", "cut", "truncate", "flip", "error", "garbage")
SPECS: dict[str, dict[str, Any]] = {
    "rows": {},
    "rows of any length": {"pad": "longest"},
    "concat": {"packing": "concat"},
    "best_fit": {"packing": "best_fit"},
    "mixture": {"mix": "docs:3,numbers:1"},
}


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits of a run of weeks would make a test of hours."""
    monkeypatch.setattr(penstock.transport, "_FIRST_DELAY_SECONDS", 0.001)
    monkeypatch.setattr(penstock.transport, "_MAX_DELAY_SECONDS", 0.005)
    monkeypatch.setattr(penstock.transport, "_READ_SECONDS", 1.0)
    monkeypatch.setattr(penstock.servers, "_LOOK_SECONDS", 0.1)


def write_docs(data: Path, factor: int) -> Path:
    """Rows of token ids of many lengths; another factor, other ids."""
    rows = [[factor * row + token for token in range(1 + row * row % 61)] for row in range(NUM_ROWS)]
    write_shards(data / "docs", "tokens", [rows[:170], rows[170:]], type_=pa.list_(pa.int32()), row_group_size=40)
    write_numbered(data / "numbers", NUM_ROWS)
    return data


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_docs(tmp_path_factory.mktemp("data"), 100)


@pytest.fixture(scope="module")
def server(serve: Serve, data_dir: Path) -> Server:
    return serve(data_dir)


@pytest.fixture(scope="module")
def twin(serve: Serve, data_dir: Path) -> Server:
    """A second server of the same data, with a cache of its own."""
    return serve(data_dir)


@pytest.fixture(scope="module")
def foreign(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server of other data under the same names."""
    return serve(write_docs(tmp_path_factory.mktemp("data"), 101))


def dataset(*servers: str, rank: int = 0, world_size: int = 1, **spec: Any) -> RemoteDataset:
    settings: dict[str, Any] = {"batch_size": 4, "seq_len": 32, "window": 60, "prefetch_bytes": 1 << 14} | spec
    return RemoteDataset(servers, "docs", rank=rank, world_size=world_size, retry_seconds=120, **settings)


def epoch_through(server: Server, seed: int, kinds: Sequence[Kind], **spec: Any) -> Counter[Kind]:
    """Checks that an epoch through a proxy is the same bytes as without; the faults that struck on the way."""
    expected = [*map(contents, dataset(server.url, **spec))]
    with ChaosProxy(server.url, seed, kinds, longest=20_000) as proxy:
        data = dataset(proxy.url, **spec)
        assert [*map(contents, data)] == expected
        assert data.stats().num_batches == len(expected)
        assert data.stats().num_retries > 0
    return proxy.num_faults


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_epoch_is_unchanged_by_network_faults(server: Server, spec: dict[str, Any]) -> None:
    faults = sum((epoch_through(server, seed, QUICK, **spec) for seed in SEEDS), Counter[Kind]())
    assert set(faults) == set(QUICK)


@pytest.mark.parametrize("kind", KINDS)
def test_epoch_is_unchanged_by_a_single_kind_of_fault(server: Server, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.transport, "_READ_SECONDS", 0.3)  # what waits for a hang waits for so long
    # Some connections must get further than that kind lets them.
    others: list[Kind] = ["truncate"]
    assert epoch_through(server, 0, [kind, *others * (6 if kind == "hang" else 1)])[kind] > 1


@pytest.mark.parametrize("rank", [0, 1])
def test_epoch_is_unchanged_when_two_servers_fail_and_a_third_is_down(server: Server, twin: Server, rank: int) -> None:
    expected = [*map(contents, dataset(server.url, rank=rank, world_size=2))]
    with ChaosProxy(server.url, 1, QUICK, longest=20_000) as first, ChaosProxy(twin.url, 2, QUICK, longest=20_000) as second:
        for servers in ((first.url, second.url), (AWAY, first.url, second.url), (second.url, AWAY)):
            assert [*map(contents, dataset(*servers, rank=rank, world_size=2))] == expected
        assert first.num_faults
        assert second.num_faults


@pytest.mark.parametrize("rank", [0, 1])
def test_client_skips_a_server_with_other_data(server: Server, foreign: Server, rank: int) -> None:
    """One of the two ranks prefers it. All ranks ask the server that rank 0 prefers for the latest snapshot."""
    urls = (server.url, foreign.url)
    for url in urls:
        alone = dataset(url, rank=rank, world_size=2)
        expected = [*map(contents, alone)]
        data = dataset(*urls, rank=rank, world_size=2, snapshot=alone.snapshot)
        assert [*map(contents, data)] == expected
        assert (data.stats().num_retries > 0) == (by_preference(urls, rank, 2)[0] != url)
        if by_preference(urls, 0, 1)[0] == url:
            assert dataset(*urls, rank=rank, world_size=2).snapshot == alone.snapshot


def test_client_skips_and_reports_a_cache_that_ignores_the_query(server: Server) -> None:
    """It gives what another job asked for: sound frames of this dataset, snapshot, epoch, rank and step, of another seed."""
    asked_before = {"batch_size": 4, "seq_len": 32, "window": 60}
    with pages(lambda path: (200, httpx.get(server.url + path, params=asked_before).content)) as cache:
        with pytest.raises(ServerUnavailable, match=r"for other parameters\. Perhaps a cache"):
            RemoteDataset(cache, "docs", seed=1, retry_seconds=0, **asked_before)  # type: ignore[arg-type]
        rank = rank_that_prefers(cache, server.url)
        data = dataset(cache, server.url, seed=1, rank=rank, world_size=rank + 1)
        expected = [*map(contents, dataset(server.url, seed=1, rank=rank, world_size=rank + 1))]
        deadline = time.monotonic() + 60
        while not data.stats().num_corrupted:  # until it has tried the cache again
            assert time.monotonic() < deadline
            assert [*map(contents, data)] == expected


def test_unknown_snapshot_is_refused_with_the_reason_of_each_server(server: Server, foreign: Server) -> None:
    one, other = by_preference((server.url, foreign.url), 0, 1)
    with pytest.raises(SnapshotGone, match=rf"all 2 servers refuse.\n{one}: .*\n{other}: snapshot no-such"):
        dataset(server.url, foreign.url, snapshot="no-such")


def test_epoch_is_unchanged_by_rolling_restarts(server: Server, twin: Server) -> None:
    """As in a rolling restart: one after the other is away, and for a moment both are."""
    expected = [*map(contents, dataset(server.url))]
    with ChaosProxy(server.url, 0, []) as first, ChaosProxy(twin.url, 0, []) as second:
        restarts = {5: first.stop, 15: first.start, 25: second.stop, 35: second.start, 45: first.stop, 55: second.stop}
        data = dataset(first.url, second.url, prefetch_bytes=1)
        seen = []
        for number, batch in enumerate(map(contents, data)):
            seen.append(batch)
            restarts.get(number, int)()
            if number == 55:
                threading.Timer(0.3, second.start).start()
        assert seen == expected
        assert data.stats().num_retries >= 3


def test_client_leaves_a_stopped_server_and_returns_to_it(
    server: Server, twin: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: its kernel still accepts connections."""
    monkeypatch.setattr(penstock.transport, "_READ_SECONDS", 0.5)
    expected = [*map(contents, dataset(server.url))]
    frozen, other = sorted((server, twin), key=lambda each: each.url != by_preference((server.url, twin.url), 0, 1)[0])
    data = dataset(frozen.url, other.url, prefetch_bytes=1)
    seen = []
    try:
        for number, batch in enumerate(map(contents, data)):
            seen.append(batch)
            if number in (10, 60):
                os.kill(frozen.pid, signal.SIGSTOP)
            if number == 40:
                os.kill(frozen.pid, signal.SIGCONT)
                time.sleep(0.5)  # the rank returns to it, and loses it once more
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    assert seen == expected
    assert data.stats().num_retries >= 1
