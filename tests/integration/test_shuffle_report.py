"""The shuffle report over HTTP: as JSON and as a picture, for every packing and for mixtures."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from corpora import write_numbered, write_shards
from serving import Server

URL = "/v1/datasets/numbers/shuffle-report"
SPEC: dict[str, Any] = {"batch_size": 8, "world_size": 2, "seq_len": 8}


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    data = tmp_path_factory.mktemp("data")
    write_numbered(data / "numbers", 6000, num_shards=10)
    write_numbered(data / "others", 900)
    longer_and_longer = [[1] * (1 + row // 100) for row in range(2000)]
    write_shards(data / "sorted", "tokens", [longer_and_longer], type_=pa.list_(pa.int32()), row_group_size=50)
    return serve(data)


@pytest.mark.parametrize(
    ("spec", "grade"),
    [
        ({"shuffle": "none"}, "none"),
        ({"window": 40}, "weak"),
        ({"window": 1200}, "windowed"),
        ({"shuffle": "global"}, "uniform"),
        ({"shuffle": "global", "packing": "concat"}, "uniform"),
        ({"shuffle": "none", "packing": "concat"}, "none"),
        ({"shuffle": "none", "packing": "best_fit"}, "none"),
        ({"shuffle": "global", "overflow": "split", "seq_len": 3}, "uniform"),
        ({"length_bucket_size": 16, "window": 10_000}, "uniform"),
        ({"mix": "numbers:2,others:1", "stopping_strategy": "all_exhausted", "shuffle": "global"}, "uniform"),
    ],
)
def test_every_order_has_a_report_and_a_picture(server: Server, spec: dict[str, Any], grade: str) -> None:
    found = server.json_when_ready(URL, **SPEC | spec)
    assert found["grade"] == grade, found["verdict"]
    assert (found["epoch"], found["spec"]["batch_size"]) == (0, 8)
    for measure in found["measures"].values():
        assert {"says", "unit", "measured", "expected", "usual", "is_usual"} <= measure.keys()
        assert measure["says"].endswith(".")
    picture = server.get(URL, format="png", **SPEC | spec)
    assert (picture.status_code, picture.headers["Content-Type"]) == (200, "image/png")
    assert picture.content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", picture.content[16:24]) == (1440, 1200)


def test_where_lengths_go_with_places_grouping_by_length_says_so(server: Server) -> None:
    spec = SPEC | {"length_bucket_size": 16, "seq_len": 64}
    found = server.json_when_ready("/v1/datasets/sorted/shuffle-report", **spec)
    assert found["grade"] == "weak"
    assert "lengths differ from place to place in the source" in found["verdict"]
    assert "on purpose (length_bucket_size=16)" in found["verdict"]


def test_epochs_have_reports_of_their_own_and_each_is_the_same_again(server: Server) -> None:
    first, again, other = (server.json(URL, window=300, epoch=epoch, **SPEC) for epoch in (3, 3, 4))
    assert first == again
    assert first["measures"] != other["measures"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"format": "gif"}, "format"),
        ({"epoch": -1}, "epoch"),
        ({"shufle": "none"}, "Did you mean 'shuffle'?"),
        ({"offset": 6000}, "leaves no step of the epoch"),
        ({"mix": "numbers:1,others:1", "stopping_strategy": "never", "epoch": 1}, "epoch 1 does not exist"),
    ],
)
def test_what_has_no_report_is_refused(server: Server, spec: dict[str, Any], message: str) -> None:
    problem = server.get(URL, **spec).json()
    assert (problem["status"], problem["type"]) == (422, "urn:penstock:problem:bad-parameter")
    assert message in problem["detail"]


def test_no_block_is_read_and_what_cannot_be_counted_is_named(serve: Callable[..., Server], tmp_path: Path) -> None:
    shard = write_numbered(tmp_path / "numbers", 200) / "part-001.parquet"
    with serve(tmp_path) as server:
        shard.unlink()
        assert server.json(URL, shuffle="global", batch_size=8)["grade"] == "uniform"
        problem = server.get(URL, packing="concat", seq_len=8).json()
        assert problem["type"] == "urn:penstock:problem:snapshot-gone"
        assert shard.name in problem["detail"]
