"""The shuffle report over HTTP, for every packing and for mixtures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.corpora import write_numbered
from support.servers import Serve, Server

URL = "/v1/datasets/numbers/shuffle-report"
SPEC: dict[str, Any] = {"batch_size": 8, "world_size": 2, "seq_len": 8}


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    write_numbered(shared / "numbers", 6000, num_shards=10)
    write_numbered(shared / "others", 900)
    return serve(shared)


def is_uniform(found: dict[str, Any]) -> bool:
    return all(measure["is_uniform"] for measure in found["measures"].values())


@pytest.mark.parametrize(
    ("spec", "uniform"),
    [
        ({"shuffle": "none"}, False),
        ({"window": 1200}, False),
        ({"shuffle": "global"}, True),
        ({"shuffle": "global", "packing": "concat"}, True),
        ({"shuffle": "none", "packing": "best_fit"}, False),
        ({"shuffle": "global", "overflow": "split", "seq_len": 3}, True),
        ({"length_bucket_size": 16, "window": 10_000}, True),
        ({"mix": "numbers:2,others:1", "stopping_strategy": "all_exhausted", "shuffle": "global"}, True),
    ],
)
def test_report_says_whether_an_order_is_uniform(server: Server, spec: dict[str, Any], uniform: bool) -> None:
    found = server.json_when_ready(URL, **SPEC | spec)
    assert is_uniform(found) == uniform
    assert (found["epoch"], found["spec"]["batch_size"]) == (0, 8)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"epoch": -1}, "epoch"),
        ({"shufle": "none"}, "Did you mean 'shuffle'?"),
        ({"offset": 6000}, "leaves no step of the epoch"),
        ({"mix": "numbers:1,others:1", "stopping_strategy": "never", "epoch": 1}, "epoch 1 does not exist"),
    ],
)
def test_report_refuses_a_wrong_parameter(server: Server, spec: dict[str, Any], message: str) -> None:
    problem = server.get(URL, **spec).json()
    assert (problem["status"], problem["type"]) == (422, "urn:penstock:problem:bad-parameter")
    assert message in problem["detail"]


def test_report_reads_no_block_and_names_a_shard_that_it_cannot_count(serve: Serve, tmp_path: Path) -> None:
    shard = write_numbered(tmp_path / "numbers", 200) / "part-001.parquet"
    with serve(tmp_path) as server:
        shard.unlink()
        assert is_uniform(server.json(URL, shuffle="global", batch_size=8))
        problem = server.get(URL, packing="concat", seq_len=8).json()
        assert problem["type"] == "urn:penstock:problem:snapshot-gone"
        assert shard.name in problem["detail"]
