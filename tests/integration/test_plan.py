"""The plan of a cache, beside the reads that a server counts while it serves the same epochs."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.blocks import cache
from penstock_server.blocks import store as block_store
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.read_ahead import ReadAhead
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.sizing import touches
from support.corpora import write_shards
from support.processes import until
from support.servers import Serve, penstock

SPEC: dict[str, Any] = {"batch_size": 8, "world_size": 4, "seq_len": 32, "window": 320, "shuffle": "window"}
READS = "penstock_decode_seconds_count"


@pytest.fixture(scope="module")
def data(shared: Path) -> Path:
    rng = np.random.default_rng(7)
    for name, num_rows, size in (("small", 960, 16), ("other", 480, 48)):
        rows = [rng.integers(0, 60_000, length).tolist() for length in rng.integers(4, 40, num_rows)]
        shards = [rows[: num_rows // 2], rows[num_rows // 2 :]]
        write_shards(shared / name, "input_ids", shards, type_=pa.list_(pa.int32()), row_group_size=size)
    return shared


@pytest.fixture(scope="module")
def counted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder of a server that has counted the tokens."""
    cache_dir = tmp_path_factory.mktemp("counted")
    with serving(data, cache_dir) as client:
        for name in ("small", "other"):
            plan(client, name, packing="concat", seq_len=8, batch_size=1)
    return cache_dir


@pytest.fixture(scope="module")
def client(data: Path, counted: Path) -> Iterator[TestClient]:
    with serving(data, counted) as client:
        yield client


@contextmanager
def serving(data: Path, cache_dir: Path, cache_bytes: int | None = None) -> Iterator[TestClient]:
    store = BlockStore(cache_dir, cache_bytes, num_threads=1)
    try:
        with TestClient(create_app(open_catalog(data, None, store), InFlight(1 << 30))) as client:
            yield client
    finally:
        store.close()


def plan(client: TestClient, dataset: str, **query: Any) -> dict[str, Any]:
    url = f"/v1/datasets/{dataset}/plan"
    until(lambda: client.get(url, params=query).status_code != 503)
    answer = client.get(url, params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def reads(client: TestClient) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(READS))


def serve_epoch(client: TestClient, dataset: str, epoch: int, num_steps: int, **query: Any) -> float:
    """Serves all ranks step by step; returns the reads."""
    before = reads(client)
    for step in range(num_steps):
        for rank in range(query["world_size"]):
            url = f"/v1/datasets/{dataset}/epochs/{epoch}/ranks/{rank}/batches/{step}"
            answer = client.get(url, params=query)
            assert answer.status_code == 200, answer.text
    return reads(client) - before


def without_blocks(counted: Path, cache_dir: Path) -> Path:
    """A cache folder with the counts of another one."""
    shutil.copytree(counted, cache_dir, ignore=shutil.ignore_patterns("*.block", ".lock"))
    return cache_dir


@pytest.mark.parametrize(("packing", "number"), [("rows", 2), ("rows", 4), ("concat", 3)])
def test_planned_reads_are_those_of_a_server(
    data: Path, counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str, number: int
) -> None:
    # As in a run whose steps take longer than a tick of the clock, and 10 seconds between two uses of a block.
    times, touch = count(), CacheFolder.touch

    def touch_later(folder: CacheFolder, name: str) -> bool:
        is_there = touch(folder, name)
        with suppress(FileNotFoundError):
            os.utime(folder.folder / f"{name}.block", times=(at := next(times), at))
        return is_there

    monkeypatch.setattr(CacheFolder, "touch", touch_later)
    monkeypatch.setattr(cache, "_TOUCH_SECONDS", 0.0)
    monkeypatch.setattr(ReadAhead, "is_due", lambda *_: False)
    monkeypatch.setattr(block_store, "_MAPPERS", 0)  # one thread, so that the blocks of a batch are read in order
    query = SPEC | {"packing": packing}
    with serving(data, without_blocks(counted, tmp_path / "large")) as client:
        planned = plan(client, "small", **query)
    point = planned["curve"][number]
    assert point["is_exact"]
    with serving(data, without_blocks(counted, tmp_path / "small"), point["cache_bytes"]) as client:
        served = [serve_epoch(client, "small", epoch, planned["num_steps"], **query) for epoch in (0, 1)]
    assert served == pytest.approx([point["reads"], point["later_reads"]], rel=0.01)


def test_smallest_cache_reads_each_block_once(client: TestClient) -> None:
    found = plan(client, "small", **SPEC)
    once = next(point for point in found["curve"] if point["cache_bytes"] == found["read_once_bytes"])
    assert (once["reads"], once["repeated_reads"]) == (found["num_blocks"], 0)
    assert once["hit_rate"] == pytest.approx(1 - 60 / found["num_touches"])
    assert all(point["repeated_reads"] for point in found["curve"] if point["cache_bytes"] < found["read_once_bytes"])
    last = found["curve"][-1]
    assert (last["cache_bytes"], last["later_reads"]) == (found["everything_bytes"], 0)
    assert found["here"].items() >= {"reads": 60, "later_reads": 0}.items()
    assert found["sizes"] == "counted"


def test_steps_and_rates_follow_from_tokens(client: TestClient) -> None:
    found = plan(client, "small", **SPEC, tokens=10**7, target_tokens_per_second=50_000, prepare_tokens_per_second=1000)
    tokens_per_step = found["tokens"] / found["num_steps"]
    assert found["num_steps"] == 30
    assert found["steps_of_tokens"] == pytest.approx(10**7 / tokens_per_step, abs=1)
    assert found["epochs_of_tokens"] == pytest.approx(10**7 / found["tokens"])
    pace, prepared = found["pace"], found["prepare"]
    assert pace["batches_per_second"] == pytest.approx(4 * 50_000 / tokens_per_step)
    assert pace["source_bytes_per_second"] == pytest.approx(found["here"]["source_bytes"] * 50_000 / found["tokens"])
    total = client.get("/v1/datasets/small").json()["tokens"]
    assert prepared == {
        "tokens": total,
        "tokens_per_second": 1000,
        "seconds": pytest.approx(total / 1000),
        "is_measured": False,
    }


def test_rate_and_sizes_are_measured_before_tokens_are_counted(data: Path, tmp_path: Path) -> None:
    with serving(data, tmp_path) as client:
        found = plan(client, "small", **SPEC, tokens=1025)
    assert (found["sizes"], found["tokens"], found["prepare"]["is_measured"]) == ("estimated", None, True)
    assert found["prepare"]["tokens_per_second"] > 1
    assert found["steps_of_tokens"] == 2  # of 1024 positions each


def test_mixture_counts_the_blocks_of_each_member(client: TestClient) -> None:
    mix = {"mix": "other:3,small:1", "stopping_strategy": "all_exhausted"}
    found = plan(client, "small", **SPEC | mix)
    assert found["num_blocks"] == 60 + 10
    assert found["curve"][-1]["repeated_reads"] == found["curve"][-1]["later_reads"] == 0


def test_long_epoch_is_planned_from_its_beginning(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    query = SPEC | {"batch_size": 2, "window": 64}
    exact = plan(client, "small", **query)["curve"]
    monkeypatch.setattr(touches, "MAX_TOUCHES", 400)
    monkeypatch.setattr(touches, "_CHUNK_SPANS", 100)
    found = plan(client, "small", **query)
    assert found["num_samples_planned"] < found["num_samples"]
    assert found["num_blocks"] == 60
    budget = 2 * found["read_once_bytes"]
    for point in found["curve"]:
        assert (point["later_reads"], point["is_exact"]) == (None, False)
        if point["cache_bytes"] > budget:
            assert point["reads"] == pytest.approx(exact[-1]["reads"], rel=0.1)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"offset": 960}, "leaves no step of the epoch"),
        ({"mix": "small:1,other:1", "stopping_strategy": "never"}, "has no end"),
        ({"tokens": 0}, "tokens must be a whole number from 1"),
        ({"target_tokens_per_second": "fast"}, "target_tokens_per_second"),
    ],
)
def test_plan_refuses_a_wrong_parameter(client: TestClient, query: dict[str, Any], message: str) -> None:
    problem = client.get("/v1/datasets/small/plan", params=query).json()
    assert (problem["status"], problem["type"]) == (422, "urn:penstock:problem:bad-parameter")
    assert message in problem["detail"]


def test_command_prints_the_plan(serve: Serve, data: Path) -> None:
    server = serve(data)
    server.json_when_ready("/v1/datasets/small/spec", packing="concat", seq_len=8)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SPEC.items()]
    rates = ["--tokens", "1M", "--target-tokens-per-second", "50k", "--prepare-tokens-per-second", "1k"]
    as_json = penstock("plan", f"{server.url}/small", *options, *rates, "--json")
    amounts = {"tokens": 10**6, "target_tokens_per_second": 50_000, "prepare_tokens_per_second": 1000}
    assert json.loads(as_json.stdout) == server.json("/v1/datasets/small/plan", **SPEC, **amounts)
    shown = penstock("plan", f"{server.url}/v1/datasets/small/plan?epoch=1", *options, *rates).stdout
    assert "small  epoch 1  snapshot " in shown
    assert "30 steps" in shown
    assert "everything       94.3 kB for 60 blocks" in shown
    assert "requests/s" in shown
    assert "measured on some rows" not in shown
    assert len(re.findall(r"█ *$", shown, re.MULTILINE)) == len(json.loads(as_json.stdout)["curve"])
    assert penstock("plan", f"{server.url}/small", "--tokens", "many").returncode == 2
