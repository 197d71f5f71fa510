"""What a release left: its snapshots, cached blocks and the states of its runs stay valid in all later minor versions.

A release records its own, once, with `PYTHONPATH=tests python -m golden.test_release tests/golden/release-VERSION`.
"""

from __future__ import annotations

import json
import shutil
import sys
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from penstock import RemoteDataset
from penstock_server.catalog.history import open_notes
from support.corpora import write, write_tokenizer
from support.processes import until
from support.recorded import contents
from support.servers import Server

RELEASES = sorted(Path(__file__).parent.glob("release-*"))
TOML = """
tokenizer = "../tokenizer.json"
filter = "id <> 7"
columns = ["id"]
splits = "hash"
validation = 0.1
"""
SPECS: dict[str, dict[str, Any]] = {
    "rows": {"split": "validation"},
    "concat": {"packing": "concat"},
    "best_fit": {"packing": "best_fit", "mark_documents": True},
}


def texts(shard: int) -> dict[str, list[Any]]:
    ids = range(60 * shard, 60 * shard + 60)
    return {"id": [*ids], "text": [f"row {number} of the corpus " * (number % 5 + 1) for number in ids]}


def dataset(server: Server, packing: str, snapshot: str | None = None) -> RemoteDataset:
    spec = {"batch_size": 4, "seq_len": 32, "seed": 3, "rank": 0, "world_size": 1} | SPECS[packing]
    return RemoteDataset(server.url, "texts", snapshot=snapshot, **spec)


def digest(data: RemoteDataset, num_batches: int | None = None) -> str:
    """A hash of the next batches."""
    return blake2b(b"".join(map(contents, islice(data, num_batches))), digest_size=16).hexdigest()


def files_of(cache: Path) -> set[str]:
    """The names of blocks, counts and packings."""
    return {path.name for path in cache.glob("[!.]*.*")}


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_snapshots_blocks_and_states_of_a_release_are_valid(release: Path, tmp_path: Path) -> None:
    shutil.copytree(release, tmp_path, dirs_exist_ok=True)
    recorded = json.loads((tmp_path / "recorded.json").read_text())
    data, cache = tmp_path / "data", tmp_path / "cache"
    shutil.copytree(tmp_path / "notes", open_notes(cache, data / "texts"), dirs_exist_ok=True)
    before = files_of(cache)
    with Server(data, cache) as server:
        for packing, run in recorded["runs"].items():  # on the snapshot before the last one
            resumed = dataset(server, packing, run["state"]["snapshot"])
            resumed.load_state_dict(run["state"])
            assert digest(resumed) == run["rest"], packing
        assert server.json("/v1/datasets/texts")["snapshot"] == recorded["snapshot"]
        assert {packing: digest(dataset(server, packing)) for packing in SPECS} == recorded["epochs"]
        assert "\npenstock_cache_misses_total 0.0\n" in server.get("/metrics").text
    assert files_of(cache) == before


def record(folder: Path) -> None:
    """Record what this version leaves: runs on a snapshot of two shards, and a third shard after that."""
    data, cache = folder / "data", folder / "cache"
    write(data / "texts", TOML, texts(0), texts(1), row_group_size=30)
    write_tokenizer(data / "tokenizer.json", texts(0)["text"])
    runs, recorded = {packing: dict[str, Any]() for packing in SPECS}, dict[str, Any]()
    with Server(data, cache, "--poll-seconds", "0.1") as server:
        before = server.json("/v1/datasets/texts")["snapshot"]
        for packing, run in runs.items():
            loop = dataset(server, packing)
            batches = iter(loop)
            next(batches)
            run["state"] = loop.state_dict()
            resumed = dataset(server, packing)
            resumed.load_state_dict(run["state"])
            run["rest"] = digest(resumed)
        write(data / "new", TOML, texts(2), row_group_size=30)
        (data / "new" / "part-0.parquet").rename(data / "texts" / "part-2.parquet")
        shutil.rmtree(data / "new")
        until(lambda: server.json("/v1/datasets/texts")["snapshot"] != before)
        recorded["snapshot"] = server.json("/v1/datasets/texts")["snapshot"]
        recorded |= {"runs": runs, "epochs": {packing: digest(dataset(server, packing)) for packing in SPECS}}
        server.stop()
    open_notes(cache, data / "texts").rename(folder / "notes")
    (cache / "notes").rmdir()
    for path in cache.glob(".*"):
        path.unlink()
    (folder / "recorded.json").write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
