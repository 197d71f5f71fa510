"""The page about plain HTTP: its client gives what RemoteDataset gives, also where things go wrong; its tables are whole."""

from __future__ import annotations

import json
import re
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pytest
from xxhash import xxh3_64_hexdigest

from penstock import RemoteDataset
from penstock.wire import content_digest
from penstock_server.problems import NotReady, Problem
from support import servers as answering
from support.chaos import ChaosProxy, Kind
from support.corpora import CHATML, write, write_pairs, write_shards, write_tokenizer
from support.servers import ROOT, Serve, Server, problem, response

PAGE = (ROOT / "docs/reference/http.md").read_text()
NUM_ROWS = 61
QUICK: tuple[Kind, ...] = ("cut", "truncate", "flip", "error", "garbage")
SPECS: list[tuple[str, dict[str, Any]]] = [
    ("numbers", {}),
    ("numbers", {"pad": "longest", "world_size": 2, "shuffle": "global", "seed": 5}),
    ("numbers", {"packing": "concat"}),
    ("numbers", {"packing": "concat", "mark_documents": True}),
    ("numbers", {"packing": "best_fit", "seq_len": 13}),
    ("numbers", {"mix": "numbers:2,other:1", "drop_last": False}),
    ("große Zahlen", {}),
    ("pairs", {}),
    ("pairs", {"loss_on": "all"}),
    ("pairs", {"packing": "best_fit"}),
    ("pairs", {"packing": "concat", "mark_documents": True}),
    ("pairs", {"task": "seq2seq", "target_seq_len": 8, "pad": "4"}),
    ("chats", {"pad": "longest", "seq_len": 64}),
    ("preferences", {"pad": "longest"}),
]


@pytest.fixture(scope="module")
def data_dir(shared: Path) -> Path:
    write_tokenizer(shared / "tokenizer.json")
    rows = [[number] + [1] * (number % 7) for number in range(NUM_ROWS)]
    for name in ("numbers", "other", "große Zahlen"):
        write_shards(shared / name, "tokens", [rows[:30], rows[30:]], type_=pa.list_(pa.int32()), row_group_size=9)
    write_pairs(shared / "pairs", [("fox" * (n % 4 + 1), " dog" * (n % 5 + 1)) for n in range(NUM_ROWS)])
    turns = [
        [{"role": role, "content": f"{role} {n}"} for role in ("user", "assistant") * (n % 3 + 1)] for n in range(NUM_ROWS)
    ]
    write(shared / "chats", 'chat_template = "chat.jinja"', {"messages": turns})
    (shared / "chats" / "chat.jinja").write_text(CHATML)
    columns: dict[str, Any] = {
        "prompt": [f"how many, {n}" for n in range(NUM_ROWS)],
        "chosen": [f" {n} foxes" for n in range(NUM_ROWS)],
        "rejected": [" none"] * NUM_ROWS,
        "score": pa.array([n / 2 for n in range(NUM_ROWS)], pa.float32()),
        "vector": pa.array([[n, n + 1] for n in range(NUM_ROWS)], pa.list_(pa.int16(), 2)),
        "url": [f"/{n}/über" if n % 5 else None for n in range(NUM_ROWS)],
        "image": [bytes([n, 255]) * (n % 3) for n in range(NUM_ROWS)],
    }
    write(shared / "preferences", 'columns = ["score", "vector", "url", "image"]', columns)
    return shared


@pytest.fixture(scope="module")
def server(serve: Serve, data_dir: Path) -> Server:
    return serve(data_dir, "--tokenizer", str(data_dir / "tokenizer.json"))


def client(url: str) -> SimpleNamespace:
    """What the page's file has, for the server at this address; it notes how long it was to wait, and waits less."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code.count('"localhost:8000"') == 1
    made: dict[str, Any] = {"__name__": "penstock_http"}
    exec(code.replace("localhost:8000", url.removeprefix("http://")), made)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        time.sleep(seconds / 50)

    made["time"] = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    return SimpleNamespace(waits=waits, **made)


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, list) else value.tolist() for name, value in batch.items()}


def expected(server: Server, dataset: str, epoch: int = 0, rank: int = 0, **spec: Any) -> list[dict[str, Any]]:
    data = RemoteDataset(server.url, dataset, rank=rank, world_size=spec.pop("world_size", 1), **spec)
    data.set_epoch(epoch)
    return [plain(batch) for batch in data]


@pytest.mark.parametrize(("dataset", "spec"), SPECS, ids=str)
def test_http_example_gives_the_batches_of_remote_dataset(server: Server, dataset: str, spec: dict[str, Any]) -> None:
    spec = {"batch_size": 3, "seq_len": 16} | spec
    rank = spec.get("world_size", 1) - 1
    batches = expected(server, dataset, 1, rank, **spec)
    assert len(batches) > 2
    seen = list(client(server.url).batches(dataset, epoch=1, rank=rank, count=4, **spec))
    assert [step for step, _ in seen] == list(range(len(batches)))
    assert [plain(batch) for _, batch in seen] == batches
    assert all(value.dtype == np.int64 for name, value in seen[0][1].items() if name.endswith(("ids", "labels", "mask")))
    assert seen[0][1].get("cu_seqlens", np.zeros(1, np.int32)).dtype == np.int32
    later = list(client(server.url).batches(dataset, epoch=1, rank=rank, step=2, **spec))
    assert [plain(batch) for _, batch in later] == batches[2:]


def test_http_example_survives_network_faults(server: Server) -> None:
    spec = {"batch_size": 2, "seq_len": 64}
    batches = expected(server, "pairs", **spec)
    with ChaosProxy(server.url, 3, QUICK, longest=5000) as proxy:
        assert [plain(batch) for _, batch in client(proxy.url).batches("pairs", count=4, **spec)] == batches
        assert set(proxy.num_faults) == set(QUICK)


def test_http_example_waits_for_a_busy_server() -> None:
    problems = [problem(slug, 503, "Retry-After: 2") for slug in ("index-not-ready", "busy", "shard-unavailable")]
    damaged = response(b"[2]", "200 OK", f"Content-Digest: {content_digest(b'[1]')}")
    of_proxies = [response(b"Oops", status) for status in ("502 Bad Gateway", "429 Too Many Requests", "404 Not Found")]
    later = response(b"Later", "503 No", "Retry-After: Fri, 27 Nov 2026 16:00:00 GMT")
    with answering.server(*problems, problem("internal-error", 500), b"", *of_proxies, later, damaged, response(b"[1]")) as url:
        patient = client(url)
        assert patient.request("numbers/spec", json.loads, 60) == [1]
        assert patient.waits == [2, 2, 2, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("slug", "is_at_work"), [("index-not-ready", True), ("busy", True), ("shard-unavailable", False)])
def test_http_example_gives_up_on_faults_only(slug: str, is_at_work: bool) -> None:
    """Each wait takes a tenth of a second here, so that time would be up after the second."""
    with answering.server(*[problem(slug, 503, "Retry-After: 5")] * 4, response(b"[1]")) as url:
        if is_at_work:
            assert client(url).request("numbers/spec", json.loads, 0.15) == [1]
        else:
            with pytest.raises(RuntimeError, match="this is shard-unavailable"):
                client(url).request("numbers/spec", json.loads, 0.15)


@pytest.mark.parametrize("status", [404, 409, 422, 500])
def test_http_example_stops_at_a_refusal(status: int) -> None:
    refusal = problem("of-some-kind", status)
    with answering.server(refusal, response(b"[1]")) as url, pytest.raises(RuntimeError, match="this is of-some-kind"):
        client(url).request("numbers/spec", json.loads, 60)


def test_http_example_gives_all_batches_before_an_error(serve: Serve, tmp_path: Path) -> None:
    """The bad row lies in the second chunk of a response, where the server can only break the connection off."""
    rows = [[n, 1] for n in range(400)]
    rows[300] = []
    write_shards(tmp_path / "holes", "tokens", [rows], type_=pa.list_(pa.int32()), row_group_size=500)
    with serve(tmp_path) as server:
        batches = client(server.url).batches("holes", batch_size=4, seq_len=2**17, pad="longest", shuffle="none")
        assert [step for step, _ in islice(batches, 75)] == list(range(75))
        with pytest.raises(RuntimeError, match='"urn:penstock:problem:bad-row".*row 300 of row group 0 in part-000.parquet'):
            next(batches)


def test_http_example_stops_when_data_changes(server: Server) -> None:
    refusing = client(server.url)
    with pytest.raises(RuntimeError, match='"urn:penstock:problem:snapshot-gone".*"status":409'):
        list(refusing.batches("numbers", snapshot="0123456789abcdef"))
    assert refusing.waits == []


def test_ranges_follow_start_stop_and_stride(server: Server) -> None:
    run = "/v1/datasets/numbers/epochs/0/ranks/0/batches"
    steps = [frame.step for frame in server.frames(run, start=1, stop=6, stride=2)]
    assert steps == [1, 3, 5]
    assert [frame.step for frame in server.frames(run)] == list(range(NUM_ROWS // 8))
    assert server.get(run, stop=NUM_ROWS).json()["type"] == "urn:penstock:problem:step-out-of-range"
    assert [page["step"] for page in server.json(run, start=1, stop=6, stride=2, format="json")] == [1, 3, 5]
    assert server.json(run, start=1, stop=2, format="json") == server.json(f"{run}/1", format="json")


def test_documentation_lists_header_fields_in_order(server: Server) -> None:
    unpacker = msgpack.Unpacker()
    unpacker.feed(server.get("/v1/datasets/numbers/epochs/0/ranks/0/batches/0").content)
    [table] = re.findall(r"^\| field of the header \| meaning \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    documented = [name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert documented == list(unpacker.unpack())


def test_header_digest_covers_its_bytes(server: Server) -> None:
    """As the page tells it for libraries whose maps have no order."""
    body = server.get("/v1/datasets/große Zahlen/epochs/0/ranks/0/batches", seed=2**63 - 1).content
    unpacker = msgpack.Unpacker()
    unpacker.feed(body)
    at = 0
    for _ in range(NUM_ROWS // 8):
        header = unpacker.unpack()
        own = body[at : unpacker.tell()]
        assert own[0] == 0x8D
        assert header["header_digest"] == xxh3_64_hexdigest(b"\x8b" + own[1 : own.rindex(b"\xadheader_digest")])
        unpacker.unpack()
        at = unpacker.tell()
    assert at == len(body)


def test_documentation_lists_every_problem() -> None:
    told = {
        (int(status), slug)
        for status, names in re.findall(r"^\| (\d{3}) \| (.*?) \|", PAGE, re.MULTILINE)
        for slug in re.findall(r"`([a-z-]+)`", names)
    }
    kinds = {*Problem.__subclasses__(), *NotReady.__subclasses__()} - {NotReady}
    assert told == {(kind.status, kind.slug) for kind in kinds} | {(500, "internal-error")}
