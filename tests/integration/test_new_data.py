"""Data that changes while it is served: runs keep their snapshot or get a 409, and never other bytes."""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import RemoteDataset, SnapshotGone
from support.corpora import write_numbered, write_text, write_tokenizer
from support.processes import until
from support.recorded import contents
from support.servers import Serve, Server

NUM_ROWS = 200
POLL = ("--poll-seconds", "0.1")
NEVER = ("--poll-seconds", "0")
NUMBERS = "/v1/datasets/numbers"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_numbered(tmp_path / "data" / "numbers", NUM_ROWS)


@pytest.fixture
def start(folder: Path, tmp_path: Path, serve: Serve) -> Iterator[Serve]:
    servers = []

    def run(*flags: str) -> Server:
        servers.append(serve(folder.parent, *flags, cache_dir=tmp_path / "cache"))
        return servers[-1]

    yield run
    for server in servers:
        server.kill()


def dataset(server: Server, **spec: Any) -> RemoteDataset:
    return RemoteDataset(server.url, "numbers", **({"batch_size": 4, "seq_len": 8, "window": 64, "prefetch_bytes": 1} | spec))


def epoch_of(data: RemoteDataset) -> list[bytes]:
    return [*map(contents, data)]


def write_shard(path: Path, first: int, num_rows: int = 30) -> None:
    """As a careful writer does: under a name that is no shard's, then renamed."""
    temporary = path.with_name(f".{path.name}")
    rows = pa.array([[number, 7] for number in range(first, first + num_rows)], pa.list_(pa.int32()))
    pq.write_table(pa.table({"input_ids": rows}), temporary, row_group_size=10)
    temporary.rename(path)


def refresh(server: Server, name: str = "numbers") -> httpx.Response:
    server.upload()
    return httpx.post(f"{server.url}/v1/datasets/{name}/refresh", timeout=60)


def until_another_snapshot(server: Server, than: str) -> str:
    until(lambda: server.json(NUMBERS)["snapshot"] != than)
    return str(server.json(NUMBERS)["snapshot"])


def told(log: str) -> list[str]:
    """The lines of a log, without the time of each, and how grave it is."""
    return re.findall(r"^[0-9-]{10} [0-9:]{8} [A-Z]+ (.*)$", log, re.MULTILINE)


def drop_blocks(tmp_path: Path) -> None:
    """So that what is served next is made from the shards."""
    for path in (tmp_path / "cache").glob("*.block"):
        path.unlink()


def test_running_epoch_is_unchanged_by_new_shards_and_a_restart(start: Serve, folder: Path, tmp_path: Path) -> None:
    server = start(*POLL)
    data = dataset(server)
    expected = epoch_of(data)
    seen = []
    for number, batch in enumerate(data):
        seen.append(contents(batch))
        if number == 5:
            write_shard(folder / "part-100.parquet", 1000)  # behind the others
            write_shard(folder / "part-000a.parquet", 2000)  # and between them
            latest = until_another_snapshot(server, data.snapshot)
    assert seen == expected
    new = dataset(server)
    assert (new.snapshot, len(new)) == (latest, (NUM_ROWS + 60) // 4)
    server.kill()
    drop_blocks(tmp_path)
    server.start()
    assert epoch_of(data) == expected
    assert dataset(server).snapshot == latest
    resumed = dataset(server, snapshot=data.snapshot)
    resumed.load_state_dict(data.state_dict() | {"step": 7})
    assert epoch_of(resumed) == expected[7:]


@pytest.mark.parametrize("how", ["rewritten", "removed"])
def test_snapshot_is_gone_with_its_shard_and_returns_with_it(start: Serve, folder: Path, tmp_path: Path, how: str) -> None:
    server = start(*POLL)
    data = dataset(server)
    expected, shard = epoch_of(data), folder / "part-001.parquet"
    shutil.copy2(shard, tmp_path / "kept")
    seen: list[bytes] = []

    def run() -> None:
        for number, batch in enumerate(data):
            seen.append(contents(batch))
            if number == 9:
                if how == "removed":
                    shard.unlink()
                else:
                    write_shard(shard, 3000)
                until_another_snapshot(server, data.snapshot)

    with pytest.raises(SnapshotGone, match=f"snapshot {data.snapshot} of numbers is gone: part-001.parquet was {how}"):
        run()
    assert 10 <= len(seen) < len(expected)
    assert seen == expected[: len(seen)]
    server.kill()
    server.start()
    with pytest.raises(SnapshotGone, match=f"part-001.parquet was {how}"):
        epoch_of(data)
    assert dataset(server).snapshot != data.snapshot
    shutil.copy2(tmp_path / "kept", shard)
    until(lambda: server.json(NUMBERS)["snapshot"] == data.snapshot)
    assert epoch_of(data) == expected


@pytest.mark.filterwarnings("ignore:numbers is shuffled in windows")  # that have no room in the cache, as is meant here
def test_rewritten_shard_is_never_served_as_the_old_one_without_polls(start: Serve, folder: Path) -> None:
    server = start(*NEVER, "--cache-bytes", "0")
    data = dataset(server)
    expected = epoch_of(data)
    write_shard(folder / "part-001.parquet", 3000)
    seen: list[bytes] = []
    with pytest.raises(SnapshotGone, match="part-001.parquet changed"):
        seen.extend(contents(batch) for batch in data)
    assert seen == expected[: len(seen)]
    assert server.json(NUMBERS)["snapshot"] == data.snapshot


def test_refresh_returns_the_change(start: Serve, folder: Path) -> None:
    server = start(*NEVER)
    first = server.json(NUMBERS)["snapshot"]
    same = {"snapshot": first, "previous": first, "changed": False, "recipe": False, "added": 0, "removed": 0, "rewritten": 0}
    assert refresh(server).json() == same
    (folder / "part-000.parquet").touch()  # a new date on the same content
    assert refresh(server).json() == same
    write_shard(folder / "part-100.parquet", 1000)
    write_shard(folder / "part-101.parquet", 2000)
    write_shard(folder / "part-002.parquet", 3000)
    (folder / "part-001.parquet").unlink()
    change = refresh(server).json()
    assert change == {
        "snapshot": server.json(NUMBERS)["snapshot"], "previous": first, "changed": True,
        "recipe": False, "added": 2, "removed": 1, "rewritten": 1,
    }  # fmt: skip
    assert change["snapshot"] != first
    assert refresh(server, "nope").status_code == 404
    assert httpx.post(f"{server.url}{NUMBERS}/refresh?now=1", timeout=60).status_code == 422
    (folder / "penstock.toml").write_text("eos = 9")
    assert refresh(server).json()["previous"] == change["snapshot"]
    with_eos = server.json(NUMBERS)["snapshot"]
    (folder / "penstock.toml").write_text('eos = 9\non_bad_row = "replace"')
    answer = refresh(server).json()
    assert (answer["snapshot"], answer["changed"], answer["recipe"]) == (with_eos, False, True)
    (folder / "penstock.toml").unlink()
    (folder / "part-100.parquet").unlink()
    latest = refresh(server).json()["snapshot"]
    assert told(server.stop()) == [
        f"numbers: snapshot {change['snapshot']} follows {first}; shards: 2 added, 1 removed, 1 rewritten; recipe unchanged",
        f"numbers: snapshot {with_eos} follows {change['snapshot']}; shards: 0 added, 0 removed, 0 rewritten; recipe changed",
        f"numbers: snapshot {with_eos} follows {with_eos}; shards: 0 added, 0 removed, 0 rewritten; recipe changed",
        f"numbers: snapshot {latest} follows {with_eos}; shards: 0 added, 1 removed, 0 rewritten; recipe changed",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="several processes share a socket on Linux")
def test_one_of_several_processes_logs_the_change(start: Serve, folder: Path) -> None:
    server = start(*POLL, "--processes", "2")
    first = server.json(NUMBERS)["snapshot"]
    write_shard(folder / "part-100.parquet", 1000)
    with ExitStack() as stack:  # connections that are open at one time are shared evenly, so some of them meet each process
        clients = [stack.enter_context(httpx.Client(base_url=server.url, timeout=60)) for _ in range(4)]
        until(lambda: all(client.get(NUMBERS).json()["snapshot"] != first for client in clients))
    latest = server.json(NUMBERS)["snapshot"]
    [line] = told(server.stop())
    assert line.startswith(f"numbers: snapshot {latest} follows {first}; shards: 1 added")


def test_snapshots_are_listed_newest_first(start: Serve, folder: Path) -> None:
    server = start(*NEVER)
    made = [server.json(NUMBERS)["snapshot"]]
    for number in range(2):
        write_shard(folder / f"part-10{number}.parquet", 1000 * number)
        made.append(refresh(server).json()["snapshot"])
    expected = [
        {"snapshot": snapshot, "shards": shards, "rows": rows}
        for snapshot, shards, rows in zip(made[::-1], (5, 4, 3), (260, 230, 200), strict=True)
    ]
    assert server.json(NUMBERS)["snapshots"] == expected
    server.kill()
    server.start()
    assert server.json(NUMBERS)["snapshots"] == expected
    (folder / "part-101.parquet").unlink()
    assert refresh(server).json()["snapshot"] == made[1]
    assert [entry["snapshot"] for entry in server.json(NUMBERS)["snapshots"]] == [made[1], made[0]]


def test_truncated_shard_leaves_the_served_snapshots(start: Serve, folder: Path, tmp_path: Path) -> None:
    server = start(*POLL)
    data = dataset(server)
    expected = epoch_of(data)
    whole = (folder / "part-000.parquet").read_bytes()
    (folder / "part-100.parquet").write_bytes(whole[: len(whole) // 2])
    until(lambda: server.json(NUMBERS)["refresh_error"])
    assert "part-100.parquet is truncated" in server.json(NUMBERS)["refresh_error"]
    problem = refresh(server)
    assert (problem.status_code, problem.headers["Content-Type"]) == (500, "application/problem+json")
    assert problem.json()["type"] == "urn:penstock:problem:dataset-invalid"
    assert epoch_of(data) == expected == epoch_of(dataset(server))
    log = server.stop()
    [of_dataset, of_request] = [line for line in told(log) if "part-100.parquet is truncated" in line]
    assert of_dataset.startswith("numbers: ")
    assert of_request.startswith(f"POST {NUMBERS}/refresh: dataset-invalid: ")
    assert of_request.endswith(f" (request {problem.headers['X-Request-ID']})")
    drop_blocks(tmp_path)
    server.start()  # jobs go on; who would begin one is told what is wrong
    assert "part-100.parquet is truncated" in server.greeting
    assert epoch_of(data) == expected
    assert server.get(f"{NUMBERS}/spec").json()["type"] == "urn:penstock:problem:dataset-invalid"
    write_shard(folder / "part-100.parquet", 1000)
    until(lambda: server.get(NUMBERS).status_code == 200)
    assert server.json(NUMBERS)["refresh_error"] is None
    assert server.json(NUMBERS)["rows"] == NUM_ROWS + 30
    assert epoch_of(data) == expected


def test_file_being_written_is_not_loaded_until_complete(start: Serve, folder: Path) -> None:
    server = start(*POLL)
    before = server.json(NUMBERS)["snapshot"]
    whole = (folder / "part-000.parquet").read_bytes()
    with (folder / "part-100.parquet").open("wb", buffering=0) as file:
        for start_byte in range(0, len(whole), len(whole) // 8):
            file.write(whole[start_byte : start_byte + len(whole) // 8])
            time.sleep(0.4)
            found = server.json(NUMBERS)
            assert (found["snapshot"], found["refresh_error"]) == (before, None)
    until_another_snapshot(server, before)


def test_datasets_appear_and_disappear(start: Serve, folder: Path, tmp_path: Path) -> None:
    server = start(*POLL)
    data = dataset(server)
    expected = epoch_of(data)
    write_numbered(folder.parent / "more", 40)
    (folder.parent / "odd").mkdir()
    (folder.parent / "odd" / "half.parquet").write_bytes(b"PAR1 and then nothing")
    until(lambda: server.json("/readyz") == {"status": "ready", "datasets": 2, "refused": 1})
    assert server.json("/v1/datasets/more")["rows"] == 40
    assert "half.parquet is truncated" in server.json("/v1/datasets")["refused"][0]["error"]
    shutil.rmtree(folder.parent / "odd")
    until(lambda: server.json("/readyz") == {"status": "ready", "datasets": 2, "refused": 0})
    assert server.get("/v1/datasets/odd").status_code == 404
    (folder.parent / "odd").mkdir()
    write_shard(folder.parent / "odd" / "half.parquet", 0)
    until(lambda: server.json("/readyz") == {"status": "ready", "datasets": 3, "refused": 0})
    folder.rename(tmp_path / "aside")
    until(lambda: server.json("/readyz") == {"status": "ready", "datasets": 2, "refused": 1})
    assert "numbers was removed. Put it back" in server.json("/v1/datasets")["refused"][0]["error"]
    with pytest.raises(SnapshotGone, match="part-000.parquet was removed"):
        epoch_of(data)
    (tmp_path / "aside").rename(folder)
    until(lambda: server.get(NUMBERS).status_code == 200)
    assert epoch_of(data) == expected
    more, odd = (server.json(f"/v1/datasets/{name}")["snapshot"] for name in ("more", "odd"))
    assert {line.partition(";")[0] for line in told(server.stop())} >= {
        f"more: snapshot {more} follows none",
        f"odd: snapshot {odd} follows none",
    }


def test_server_without_a_dataset_is_not_ready(start: Serve, folder: Path, tmp_path: Path) -> None:
    (folder.parent / "odd").mkdir()
    (folder.parent / "odd" / "half.parquet").write_bytes(b"PAR1 and then nothing")
    server = start(*POLL)
    assert server.json("/readyz") == {"status": "ready", "datasets": 1, "refused": 1}
    folder.rename(tmp_path / "aside")
    until(lambda: server.get("/readyz").status_code == 503)
    answer = server.get("/readyz")
    assert (answer.json()["type"], answer.headers["Retry-After"]) == ("urn:penstock:problem:not-serving", "1")
    assert "GET /v1/datasets has the reason of each" in answer.json()["detail"]
    assert server.get("/healthz").status_code == 200
    (tmp_path / "aside").rename(folder)
    until(lambda: server.get("/readyz").status_code == 200)
    assert "/readyz" not in server.stop()


def test_emptied_data_folder_is_served_from_the_cache(start: Serve, folder: Path, tmp_path: Path) -> None:
    server = start(*POLL)
    data = dataset(server)
    expected = epoch_of(data)
    folder.rename(tmp_path / "aside")
    until(lambda: server.json(NUMBERS)["refresh_error"])
    assert epoch_of(data) == expected
    (tmp_path / "aside").rename(folder)
    until(lambda: server.json(NUMBERS)["refresh_error"] is None)
    assert server.json(NUMBERS)["snapshot"] == data.snapshot


@pytest.mark.parametrize("name", ["wiki", "linked.wiki"])
def test_broken_symlink_to_a_mount_ends_no_run(start: Serve, folder: Path, tmp_path: Path, name: str) -> None:
    write_numbered(tmp_path / "mount" / "wiki", 99)
    (folder.parent / name.partition(".")[0]).symlink_to(tmp_path / "mount" / "wiki" if name == "wiki" else tmp_path / "mount")
    (folder.parent / "mixed").mkdir()
    (folder.parent / "mixed" / "penstock.toml").write_text(f'mix = "{folder.name}:0.5,{name}:0.5"')
    server = start(*POLL, "--follow-symlinks")
    data = RemoteDataset(server.url, name, batch_size=4, seq_len=8, prefetch_bytes=1)
    expected = epoch_of(data)
    (tmp_path / "mount").rename(tmp_path / "away")
    until(lambda: server.json(f"/v1/datasets/{name}")["refresh_error"])
    assert "is a broken symlink" in server.json(f"/v1/datasets/{name}")["refresh_error"]
    assert epoch_of(data) == expected
    (tmp_path / "away").rename(tmp_path / "mount")
    until(lambda: server.json(f"/v1/datasets/{name}")["refresh_error"] is None)
    (tmp_path / "mount").rename(tmp_path / "away")
    server.kill()
    server.start()
    problem = server.get(f"/v1/datasets/{name}/spec?snapshot={data.snapshot}")  # 503: a run retries until the mount is back
    assert (problem.status_code, problem.json()["type"]) == (503, "urn:penstock:problem:dataset-unavailable")
    assert "is a broken symlink" in problem.json()["detail"]
    assert server.get("/v1/datasets/mixed/spec").json()["type"] == "urn:penstock:problem:dataset-invalid"
    assert server.get("/v1/datasets/other/spec").status_code == 404
    (tmp_path / "away").rename(tmp_path / "mount")
    until(lambda: server.get("/v1/datasets/mixed/spec").status_code == 200)
    assert epoch_of(RemoteDataset(server.url, name, batch_size=4, seq_len=8)) == expected
    assert epoch_of(data) == expected


@pytest.mark.parametrize("what", ["penstock.toml", "tokenizer"])
def test_changed_recipe_is_another_snapshot(start: Serve, folder: Path, tmp_path: Path, what: str) -> None:
    text = write_text(folder.parent / "text", [f"row {number} of a text" for number in range(64)])
    tokenizer = write_tokenizer(folder.parent / "tokenizer.json")
    (text / "penstock.toml").write_text('tokenizer = "../tokenizer.json"')
    server = start(*POLL)
    data = RemoteDataset(server.url, "text", batch_size=4, seq_len=16)
    expected = epoch_of(data)
    if what == "tokenizer":
        write_tokenizer(tokenizer, [f"row {number} of a text" for number in range(64)])
    else:
        (text / "penstock.toml").write_text('tokenizer = "../tokenizer.json"\neos = false')
    until(lambda: server.json("/v1/datasets/text")["snapshot"] != data.snapshot)
    drop_blocks(tmp_path)
    assert epoch_of(data) == expected
    assert epoch_of(RemoteDataset(server.url, "text", batch_size=4, seq_len=16)) != expected
    server.kill()
    server.start()
    with pytest.raises(SnapshotGone, match="the recipe, or the server's version, was changed"):
        epoch_of(data)


def test_rows_keep_the_split_of_their_snapshot(start: Serve, folder: Path, tmp_path: Path, serve: Serve) -> None:
    server, recipe = start(), folder / "penstock.toml"
    recipe.write_text("validation = 0.1\n")
    refresh(server)
    few = dataset(server, split="validation", retry_seconds=30)
    before = epoch_of(few)
    recipe.write_text("validation = 0.5\n")
    refresh(server)
    many = dataset(server, split="validation", retry_seconds=30)
    assert epoch_of(many) == epoch_of(dataset(serve(tmp_path / "data"), split="validation"))
    assert epoch_of(few) == before


def test_concurrent_refreshes_and_batches_are_consistent(start: Serve, folder: Path) -> None:
    server = start(*POLL)
    named = server.json(NUMBERS)["snapshot"]
    batch = f"{server.url}{NUMBERS}/epochs/0/ranks/0/batches/3?batch_size=4&seq_len=8"
    expected = httpx.get(f"{batch}&snapshot={named}", timeout=60).content
    stop = threading.Event()

    def change() -> None:
        for number in range(12):
            write_shard(folder / f"part-1{number:02}.parquet", 1000 * number)
            write_shard(folder / "part-100.parquet", number)
            if number % 3 == 2:
                (folder / f"part-1{number - 1:02}.parquet").unlink()
            time.sleep(0.1)
        stop.set()

    def ask(number: int) -> None:
        with httpx.Client(timeout=60) as client:
            while not stop.is_set():
                if number % 3 == 0:
                    response = client.post(f"{server.url}{NUMBERS}/refresh")
                    # A file may be gone between the listing and the look into it; then nothing is taken in.
                    assert response.status_code == 200 or "part-1" in response.json()["detail"], response.text
                elif number % 3 == 1:
                    response = client.get(f"{batch}&snapshot={named}")
                    assert (response.status_code, response.content) == (200, expected)
                else:
                    response = client.get(batch)  # until the next look, of shards that may be gone or rewritten
                    assert response.status_code in (200, 409, 503), response.text
                    assert client.get(f"{server.url}{NUMBERS}").status_code == 200
                    assert client.get(f"{server.url}/v1/datasets").status_code == 200

    with ThreadPoolExecutor(13) as threads:
        running = [threads.submit(ask, number) for number in range(12)]
        threads.submit(change).result()
        for one in running:
            one.result()
    final = refresh(server).json()["snapshot"]
    assert server.json(NUMBERS)["snapshot"] == final
    assert final != named
    assert httpx.get(f"{batch}&snapshot={named}", timeout=60).content == expected
