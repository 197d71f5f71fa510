"""The HTTP surface of a real server: bytes, caching, errors and documentation."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import httpx
import pyarrow as pa
import pytest

from penstock import DataError, RemoteDataset, Spec, __version__, wire
from support.corpora import write_numbered, write_pairs, write_shards, write_text, write_tokenizer
from support.processes import Fork, until
from support.servers import Serve, Server

BATCHES = "/v1/datasets/numbers/epochs/0/ranks/0/batches"
SPECS = [
    {"batch_size": 4, "seq_len": 8},
    {"batch_size": 7, "seq_len": 3, "shuffle": "global", "seed": 9},
    {"batch_size": 4, "seq_len": 8, "pad": "longest"},
    {"batch_size": 32, "seq_len": 4, "drop_last": False, "shuffle": "none"},
]


@pytest.fixture(scope="module")
def data_dir(shared: Path) -> Path:
    write_tokenizer(shared / "tokenizer.json")
    write_numbered(shared / "numbers", 1200)
    write_text(shared / "text", ["the quick fox", "a \N{SNOWMAN} dog"] * 8)
    write_pairs(shared / "pairs", [(f"the {n} dogs ?", f" jumps over {n} foxes" * 3) for n in range(16)])
    write_shards(shared / "holes", "tokens", [[[1], [], [3, 4]]], type_=pa.list_(pa.int32()), row_group_size=9)
    (shared / "broken").mkdir()
    (shared / "broken" / "half.parquet").write_bytes(b"PAR1 and then nothing")
    return shared


@pytest.fixture(scope="module")
def server(serve: Serve, data_dir: Path) -> Server:
    return serve(data_dir, "--tokenizer", str(data_dir / "tokenizer.json"))


@pytest.mark.parametrize("spec", SPECS)
def test_range_and_strided_range_have_the_bytes_of_single_batches(server: Server, spec: dict[str, str | int]) -> None:
    num_steps = min(40, server.json("/v1/datasets/numbers/spec", **spec)["num_steps"])
    run = server.get(BATCHES, stop=num_steps, **spec).content
    single = [server.get(f"{BATCHES}/{step}", **spec).content for step in range(num_steps)]
    assert b"".join(single) == run
    assert server.get(BATCHES, start=3, stop=11, stride=3, **spec).content == b"".join(single[3:11:3])


@pytest.mark.parametrize("spec", SPECS)
def test_second_server_gives_the_same_bytes(server: Server, serve: Serve, data_dir: Path, spec: dict[str, str | int]) -> None:
    with serve(data_dir) as other:
        assert other.get(BATCHES, **spec).content == server.get(BATCHES, **spec).content


@pytest.mark.parametrize("flags", [(), ("--cache-bytes", "2KB")])
def test_next_window_is_loaded_in_the_background(serve: Serve, tmp_path: Path, flags: tuple[str, ...]) -> None:
    write_numbered(tmp_path / "data" / "n", 400, num_shards=1, row_group_size=20)

    def num_blocks() -> int:
        return len(list((tmp_path / "cache").glob("*.block")))

    with serve(tmp_path / "data", *flags, cache_dir=tmp_path / "cache") as server:
        # Six blocks, of which a batch meets most.
        server.frames("/v1/datasets/n/epochs/0/ranks/0/batches/0", batch_size=20, seq_len=8, window=120)
        if flags:
            time.sleep(0.5)
            assert num_blocks() <= 12
        else:
            until(lambda: num_blocks() == 20)


def test_response_has_a_length_when_shapes_are_fixed_or_it_is_one_chunk(server: Server) -> None:
    for path in (BATCHES, f"{BATCHES}/70"):
        response = server.get(path, batch_size=4, seq_len=8)
        assert int(response.headers["Content-Length"]) == len(response.content)
    inline = server.get(BATCHES, batch_size=4, pad="longest")
    assert int(inline.headers["Content-Length"]) == len(inline.content)
    assert "Content-Length" not in server.get(BATCHES, batch_size=4, pad="longest", seq_len=1 << 20, stop=3).headers


def test_batch_is_immutable_when_its_url_names_the_snapshot(server: Server) -> None:
    snapshot = server.json("/v1/datasets/numbers")["snapshot"]
    assert server.get(f"{BATCHES}/0", snapshot=snapshot).headers["Cache-Control"] == "public, max-age=31536000, immutable"
    assert server.get(f"{BATCHES}/0").headers["Cache-Control"] == "no-cache"


@pytest.mark.parametrize("path", ["/0?batch_size=8", "?batch_size=8&stop=5", "/0?batch_size=8&format=json"])
def test_head_has_the_headers_of_get(server: Server, path: str) -> None:
    head, whole = (ask(f"{server.url}{BATCHES}{path}") for ask in (httpx.head, httpx.get))
    for answer in (head, whole):
        del answer.headers["Date"], answer.headers["Server-Timing"], answer.headers["X-Request-ID"]
    assert (head.status_code, head.headers, head.content) == (200, whole.headers, b"")
    assert int(head.headers["Content-Length"]) == len(whole.content) > 0


@pytest.mark.parametrize(
    "path", ["/healthz", f"{BATCHES}/0", "/v1/datasets", "/v1/datasets/none", "/nowhere", f"{BATCHES}/0?seed=x"]
)
def test_response_has_the_id_of_its_request(server: Server, path: str) -> None:
    for given in ("a", "Run-7.step_3", "f" * 64):
        answer = httpx.get(f"{server.url}{path}", headers={"X-Request-ID": given}, timeout=60)
        assert answer.headers.get_list("X-Request-ID") == [given]
        assert answer.is_success or answer.json()["request_id"] == given
    made = set()
    for wrong in ("", "two words", "f" * 65, "a/b", "a,b"):
        answer = httpx.get(f"{server.url}{path}", headers=[("X-Request-ID", wrong)], timeout=60)
        made.add(answer.headers["X-Request-ID"])
        assert answer.is_success or answer.json()["request_id"] in made
    assert len(made) == 5
    assert all(re.fullmatch("[0-9a-f]{12}", id_) for id_ in made)


def test_failed_request_is_logged_with_its_id(serve: Serve, tmp_path: Path) -> None:
    write_shards(tmp_path / "numbers", "tokens", [[[1], [], [3, 4]]], type_=pa.list_(pa.int32()), row_group_size=9)
    with serve(tmp_path) as server:
        for given in ("first", "second"):
            answer = httpx.get(f"{server.url}{BATCHES}/0?batch_size=3", headers={"X-Request-ID": given}, timeout=60)
            assert answer.status_code == 500
        assert server.get(f"{BATCHES}/0", seed="x").status_code == 422
        lines = [line for line in server.stop().splitlines() if f"GET {BATCHES}/0: " in line]
    assert [line.rpartition(" (request ")[2] for line in lines] == ["first)", "second)"]
    with_paths = answer.json()["detail"].replace("numbers/penstock.toml", f"{tmp_path}/numbers/penstock.toml")
    assert with_paths in lines[0]  # the log names whole paths, the response those below the data folder


def test_fault_of_the_server_is_logged_with_the_id_of_its_request(tmp_path: Path) -> None:
    write_numbered(tmp_path / "data" / "numbers", 1200)
    (tmp_path / "faulty.py").write_text("""
from penstock.cli import main
from penstock_server.batches.assemble import Chunk

def fail(self):
    raise KeyError("odd")

Chunk.request = Chunk.mapped = fail
main()
""")
    flags = ("--cache-dir", tmp_path / "cache", "--port", "0", "--log-format", "json")
    with closing(Fork("serve", tmp_path / "data", *flags, script=tmp_path / "faulty.py")) as process:
        until(lambda: process.is_alive() and "Ctrl-C stops" in process.errors())
        [url] = re.findall(r" at (http://\S+:\d+)\\n", process.errors())
        answer = httpx.get(f"{url}{BATCHES}/0", headers={"X-Request-ID": "mine"}, timeout=60)
        assert (answer.status_code, answer.headers["X-Request-ID"]) == (500, "mine")
        process.send_signal(signal.SIGINT)
        error = json.loads(process.communicate(timeout=20)[2].splitlines()[-1])
    assert (error["level"], error["logger"], error["request_id"]) == ("ERROR", "uvicorn.error", "mine")
    assert error["traceback"].endswith("KeyError: 'odd'")


def test_etag_follows_the_address(server: Server) -> None:
    etag = server.get(f"{BATCHES}/0").headers["ETag"]
    for known in (f'"other", W/{etag}', "*"):
        same = httpx.get(f"{server.url}{BATCHES}/0?batch_size=8", headers={"If-None-Match": known}, timeout=60)
        assert (same.status_code, same.content, same.headers["ETag"]) == (304, b"", etag)
    others = [f"{BATCHES}/1", f"{BATCHES}/0?seed=1", f"{BATCHES}/0?format=json", f"{BATCHES}?stop=2"]
    others += [f"/v1/datasets/numbers/epochs/{e}/ranks/{rank}/batches/0?world_size=2" for e in (0, 1) for rank in (0, 1)]
    assert len({httpx.get(f"{server.url}{path}", timeout=60).headers["ETag"] for path in others} | {etag}) == 9
    assert httpx.get(f"{server.url}{BATCHES}/150", headers={"If-None-Match": "*"}, timeout=60).status_code == 404


def test_spec_is_resolved_with_steps_and_tensors(server: Server) -> None:
    spec = server.json("/v1/datasets/pairs/spec", batch_size=3, pad="longest", world_size=2)
    assert (spec["num_steps"], spec["num_samples"]) == (2, 16)
    assert spec["spec"]["snapshot"] == spec["snapshot"]
    assert server.json("/v1/datasets/pairs/spec", task="seq2seq")["spec"]["target_seq_len"] == 1024
    assert spec["spec"]["target_seq_len"] is None
    assert spec["tensors"] == [
        {"name": "input_ids", "dtype": "uint16", "shape": [3, None]},
        {"name": "lengths", "dtype": "int32", "shape": [3]},
        {"name": "prompt_lengths", "dtype": "int32", "shape": [3]},
    ]
    [frame] = server.frames("/v1/datasets/pairs/epochs/0/ranks/0/batches/0", batch_size=3)
    assert [[name, str(a.dtype), list(a.shape)] for name, a in frame.tensors.items()] == [
        ["input_ids", "uint16", [3, 1024]], ["lengths", "int32", [3]], ["prompt_lengths", "int32", [3]],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({}, {"input_ids", "lengths", "prompt_lengths"}),
        ({"loss_on": "all"}, {"input_ids", "lengths"}),
        ({"task": "seq2seq", "target_seq_len": 9}, {"input_ids", "lengths", "labels", "label_lengths"}),
    ],
)
def test_pairs_are_served_for_causal_and_seq2seq_training(server: Server, query: dict[str, str | int], names: set[str]) -> None:
    [frame] = server.frames("/v1/datasets/pairs/epochs/0/ranks/0/batches/0", batch_size=2, seq_len=40, **query)
    assert set(frame.tensors) == names
    page = server.json("/v1/datasets/pairs/epochs/0/ranks/0/batches/0", batch_size=2, seq_len=40, format="json", **query)
    if "labels" in names:
        assert frame.tensors["labels"].shape == (2, 9)
        assert frame.tensors["label_lengths"].tolist() == [9, 9]
        assert page["samples"][0]["labels"] == frame.tensors["labels"][0].tolist()
    else:
        text = page["samples"][0]["prompt"] + page["samples"][0]["response"]
        assert text.startswith("the ")


def test_batch_as_json_is_readable(server: Server) -> None:
    response = server.get("/v1/datasets/text/epochs/0/ranks/0/batches/0", format="json", batch_size=2)
    page = response.json()
    texts = {"the quick fox<|endoftext|>", "a \N{SNOWMAN} dog<|endoftext|>"}
    assert {sample["text"] for sample in page["samples"]} <= texts
    assert page["samples"][0]["source"].startswith("part-000.parquet, row group 0, row ")
    assert ("\N{SNOWMAN}" in response.text) == any("\N{SNOWMAN}" in s["text"] for s in page["samples"])
    assert max(len(line) for line in response.text.splitlines()) < 500
    [frame] = server.frames("/v1/datasets/text/epochs/0/ranks/0/batches/0", batch_size=2)
    assert page["digest"] == frame.digest
    for sample, ids in zip(page["samples"], frame.tensors["input_ids"], strict=True):
        assert sample["input_ids"] == ids[: sample["num_tokens"]].tolist()


def test_datasets_are_listed_with_refused_ones(server: Server, data_dir: Path) -> None:
    answer = server.json("/v1/datasets")
    assert [d["name"] for d in answer["datasets"]] == ["holes", "numbers", "pairs", "text"]
    assert answer["refused"][0]["name"] == "broken"
    assert "half.parquet is truncated" in answer["refused"][0]["error"]
    numbers = server.json("/v1/datasets/numbers")
    assert (numbers["rows"], numbers["shards"], numbers["columns"]) == (1200, 3, ["input_ids"])
    assert numbers["size_bytes"] == sum(shard.stat().st_size for shard in (data_dir / "numbers").glob("*.parquet"))


@pytest.mark.parametrize(
    ("path", "status", "slug", "detail"),
    [
        ("nope/spec", 404, "unknown-dataset", "there is no dataset 'nope'"),
        ("numbers/epochs/0/ranks/0/batches/150", 404, "step-out-of-range", "this epoch has 150 steps, 0 to 149"),
        ("numbers/epochs/0/ranks/0/batches?start=3&stop=151", 404, "step-out-of-range", "step 150 does not exist"),
        ("numbers/epochs/0/ranks/2/batches/0?world_size=2", 404, "rank-out-of-range", "ranks are 0 to 1"),
        ("numbers/epochs/0/ranks/0/batches/0?batchsize=2", 422, "bad-parameter", "Did you mean 'batch_size'?"),
        ("numbers/epochs/0/ranks/0/batches/0?fromat=json", 422, "bad-parameter", "Did you mean 'format'? Known: batch_size"),
        ("numbers/epochs/0/ranks/0/batches/0?start=2", 422, "bad-parameter", "'start' is not a parameter"),
        ("numbers?batch_size=3", 422, "bad-parameter", "'batch_size' is not a parameter of this URL"),
        ("numbers/spec?format=json", 422, "bad-parameter", "'format' is not a parameter"),
        ("numbers/spec?batch_size=-1", 422, "bad-parameter", "batch_size must be from 1 to 65,536, not -1"),
        ("numbers/spec?batch_size=1000&seq_len=1000000", 422, "bad-parameter", "the limit is 1,073,741,824"),
        ("numbers/spec?batch_size=1201", 422, "bad-parameter", "no step fits: numbers has 1,200 samples"),
        ("numbers/spec?offset=1201", 422, "bad-parameter", "offset=1,201 is past the epoch's end"),
        ("numbers/spec?task=seq2seq", 422, "bad-parameter", "rows of numbers are made of tokens"),
        ("numbers/epochs/x/ranks/0/batches/0", 422, "bad-parameter", "not 'x'"),
        ("numbers/epochs/0/ranks/0/batches?start=4&stop=4", 422, "bad-parameter", "start=4 must be below stop=4"),
        ("numbers/epochs/0/ranks/0/batches?start=1&stop=4&start=3", 422, "bad-parameter", "start is given twice"),
        (
            "numbers/epochs/0/ranks/0/batches/0?format=json&batch_size=16385&drop_last=false",
            422,
            "bad-parameter",
            "16,385 samples in 1 batch",
        ),
        ("numbers/spec?snapshot=0123", 409, "snapshot-gone", "snapshot 0123 of numbers is not on this server"),
        ("broken/spec", 500, "dataset-invalid", "half.parquet is truncated"),
        ("holes/epochs/0/ranks/0/batches/0?batch_size=3", 500, "bad-row", "row 1 of row group 0 in part-000.parquet: is empty"),
        ("holes/epochs/0/ranks/0/batches/0/provenance?batch_size=3", 500, "bad-row", 'on_bad_row = "replace"'),
    ],
)
def test_error_is_a_problem_that_names_its_cause(server: Server, path: str, status: int, slug: str, detail: str) -> None:
    response = server.get(f"/v1/datasets/{path}")
    assert response.headers["Content-Type"] == "application/problem+json"
    problem = response.json()
    assert (response.status_code, problem["status"], problem["type"]) == (status, status, f"urn:penstock:problem:{slug}")
    assert detail in problem["detail"]
    assert problem["detail"].endswith((".", "?"))


def test_long_wrong_value_is_cut_in_the_message(server: Server) -> None:
    for path in (f"{BATCHES}/{'9' * 5000}", f"{BATCHES}?stop={'9' * 5000}"):
        detail = server.get(path).json()["detail"]
        assert f"'{'9' * 40}...'" in detail
        assert len(detail) < 200


def test_unknown_url_points_to_the_documentation(server: Server) -> None:
    response = server.get("/v2/anything")
    assert (response.status_code, response.headers["Content-Type"]) == (404, "application/problem+json")
    assert "/docs lists every URL" in response.json()["detail"]


def test_damaged_shard_closes_the_connection_and_is_named_by_its_own_step(serve: Serve, tmp_path: Path) -> None:
    folder = write_numbered(tmp_path / "data" / "long", 60_000, num_shards=2, row_group_size=1000)
    path = folder / "part-001.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 300 + whole[304:])
    run = "/v1/datasets/long/epochs/0/ranks/0/batches"
    with serve(tmp_path / "data") as server:
        with pytest.raises(httpx.RemoteProtocolError):
            server.get(run, shuffle="none", seq_len=256)
        problem = server.get(f"{run}/3750", shuffle="none").json()
        assert problem["type"] == "urn:penstock:problem:shard-unreadable"
        assert "row group 0 of part-001.parquet" in problem["detail"]
        assert len(server.frames(run, stop=3750, shuffle="none")) == 3750


def test_loop_gets_all_batches_before_a_bad_row(serve: Serve, tmp_path: Path) -> None:
    """The bad row lies in the second chunk of a response, where the server can only break the connection off."""
    rows = [[n, 1] for n in range(400)]
    rows[300] = []
    write_shards(tmp_path / "holes", "tokens", [rows], type_=pa.list_(pa.int32()), row_group_size=500)
    with serve(tmp_path) as server:
        data = RemoteDataset(
            server.url, "holes", batch_size=4, seq_len=2**17, pad="longest", shuffle="none", retry_seconds=30
        )  # fmt: skip
        seen: list[int] = []
        with pytest.raises(DataError, match="row 300 of row group 0 in part-000.parquet: is empty"):
            seen.extend(int(batch["input_ids"][0, 0]) for batch in data)
        assert seen == list(range(0, 300, 4))


def test_range_as_json_is_an_array(server: Server) -> None:
    pages = server.json("/v1/datasets/text/epochs/0/ranks/0/batches", format="json", batch_size=4)
    assert [page["step"] for page in pages] == [0, 1, 2, 3]
    assert pages[1] == server.json("/v1/datasets/text/epochs/0/ranks/0/batches/1", format="json", batch_size=4)
    in_parts: dict[str, str | int] = {"format": "json", "batch_size": 4, "seq_len": 1 << 19}  # too large to be made in one go
    assert "Content-Length" not in httpx.head(f"{server.url}{BATCHES}", params=in_parts, timeout=60).headers
    assert [page["step"] for page in server.json(BATCHES, **in_parts, stop=4)] == [0, 1, 2, 3]


def test_probes_and_documentation_load_nothing_from_outside(server: Server) -> None:
    alive = server.json("/healthz")
    assert abs(alive.pop("time") - time.time()) < 60
    assert alive == {"status": "ok", "version": __version__, "wire": wire.VERSION}
    assert server.json("/readyz") == {"status": "ready", "datasets": 4, "refused": 1}
    for path in ("/healthz", "/readyz"):
        head = httpx.head(f"{server.url}{path}")
        assert (head.status_code, head.content) == (200, b"")
    page = server.get("/docs").text
    assert "https://" not in page
    assert server.get("/docs/assets/swagger-ui-bundle.js").status_code == 200
    paths = server.json("/openapi.json")["paths"]
    parameters = paths["/v1/datasets/{dataset}/epochs/{epoch}/ranks/{rank}/batches/{step}"]["get"]["parameters"]
    refused = paths["/v1/datasets/{dataset}/spec"]["get"]["responses"]["default"]
    assert all(code in refused["description"] for code in ("404", "409", "422", "500", "503"))
    assert refused["content"].keys() == {"application/problem+json"}
    assert {"dataset", "epoch", "rank", "step", "format", "batch_size", "snapshot"} <= {p["name"] for p in parameters}
    assert {p["name"] for p in parameters if p["schema"].get("minLength")} == {"skip", "mix", "snapshot", "pad"}
    for name in ("skip", "mix", "snapshot", "pad"):
        assert server.get("/v1/datasets/numbers/spec", **{name: ""}).status_code == 422


def test_documentation_page_tries_a_single_batch(server: Server) -> None:
    run = server.json("/openapi.json")["paths"]["/v1/datasets/{dataset}/epochs/{epoch}/ranks/{rank}/batches"]["get"]
    filled_in = {p["name"]: p["schema"].get("example", p["schema"].get("default")) for p in run["parameters"]}
    assert {name: filled_in[name] for name in ("start", "stop", "format")} == {"start": 0, "stop": 1, "format": "json"}


def test_frame_has_the_address_of_its_url(server: Server) -> None:
    [frame] = server.frames("/v1/datasets/numbers/epochs/6/ranks/2/batches/9", world_size=3, batch_size=2)
    snapshot = server.json("/v1/datasets/numbers")["snapshot"]
    spec = Spec(world_size=3, batch_size=2, split="all", snapshot=snapshot)
    assert frame.address == wire.Address(dataset="numbers", snapshot=snapshot, spec_digest=spec.digest, epoch=6, rank=2, step=9)


def test_client_imports_torch_and_the_server_only_when_needed() -> None:
    """A trainer installs the client alone; a process that only decodes frames has no torch."""
    script = (
        "import sys, penstock, penstock.wire, penstock.transport\n"
        "heavy = ('torch', 'penstock_server', 'fastapi', 'pyarrow', 'tokenizers', 'uvicorn')\n"
        "assert not [name for name in heavy if name in sys.modules]\n"
        "penstock.RemoteDataset\n"
        "assert 'torch' in sys.modules\n"
        "assert not [name for name in heavy[1:] if name in sys.modules]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_stats_count_batches_and_bytes(server: Server) -> None:
    data = RemoteDataset(server.url, "numbers", batch_size=50, rank=0, world_size=1)
    for epoch in (1, 2):
        data.set_epoch(epoch - 1)
        assert len(list(data)) == 24
        assert data.stats().num_batches == epoch * 24
        assert data.stats().num_bytes == epoch * len(server.get(BATCHES, batch_size=50).content)
