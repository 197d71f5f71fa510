"""`penstock import` from object stores and the hub, and to object stores."""

from __future__ import annotations

import gzip
import json
import signal
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock_server.importing.run import Import
from penstock_server.importing.schema import ImportRefused
from penstock_server.importing.shards import Shape
from penstock_server.sources.objects import ObjectStore
from support.corpora import imported
from support.hub import TOKEN, file_server
from support.processes import Fork, until
from support.row_files import write_litdata, write_mds
from support.servers import penstock
from support.stores import Uploaded, object_store

ROWS = [{"text": f"the quick brown fox number {n}", "n": n} for n in range(300)]
INPUTS = [
    *("mds", "mds-zstd", "mds-snappy", "litdata", "litdata-chunk", "litdata-batch", "litdata-footer"),
    *("x.csv", "x.csv.gz", "x.jsonl", "x.jsonl.zst", "x.arrow", "x.parquet"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows in each format."""
    folder, table = tmp_path_factory.mktemp("in"), pa.Table.from_pylist(ROWS)
    for compression in (None, "zstd", "snappy"):
        name = f"mds-{compression}" if compression else "mds"
        write_mds(
            folder / name, {"text": "str", "n": "int"}, ROWS, shard_rows=70, compression=compression, hashes=["sha1", "xxh64"]
        )
    items = [{"text": row["text"], "n": row["n"]} for row in ROWS]
    for level in (None, "chunk", "batch"):
        name = f"litdata-{level}" if level else "litdata"
        write_litdata(folder / name, ["str", "int"], items, chunk_rows=70, level=level)
    ids = [np.arange(row, row + 5) for row in range(20)]
    write_litdata(folder / "litdata-footer", ["no_header_tensor:18"], ids, item_loader="TokensLoader")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "x.jsonl").write_text(lines)
    (folder / "x.jsonl.zst").write_bytes(pa.compress(lines.encode(), "zstd", asbytes=True))
    commas = "text,n\n" + "".join(f"{row['text']},{row['n']}\n" for row in ROWS)
    (folder / "x.csv").write_text(commas)
    (folder / "x.csv.gz").write_bytes(gzip.compress(commas.encode()))
    with pa.ipc.new_file(str(folder / "x.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    pq.write_table(table, folder / "x.parquet", row_group_size=70)
    return folder


@pytest.fixture(scope="module")
def uploaded(folder: Path) -> Iterator[Uploaded]:
    with closing(Uploaded(folder)) as uploaded:
        yield uploaded


@pytest.fixture
def out_url() -> str:
    object_store()
    return f"s3://penstock/{uuid.uuid4().hex}/out"


def keys_below(url: str) -> list[str]:
    prefix = url.removeprefix("s3://penstock/")
    return sorted(each["path"].removeprefix(f"{prefix}/") for each in obstore.list(object_store(), prefix).collect())


def read_object(url: str, name: str) -> pa.Table:
    content = obstore.get(object_store(), f"{url.removeprefix('s3://penstock/')}/{name}").bytes()
    return pq.read_table(pa.BufferReader(bytes(content)))


@pytest.mark.parametrize("name", INPUTS)
def test_import_from_a_store_equals_that_from_a_folder(folder: Path, uploaded: Uploaded, tmp_path: Path, name: str) -> None:
    far = imported(tmp_path / "far", f"{uploaded.url}/{name}")
    assert far.equals(imported(tmp_path / "near", folder / name))
    assert far.num_rows == (20 if name == "litdata-footer" else len(ROWS))


def test_objects_are_named_by_a_pattern(folder: Path, uploaded: Uploaded, tmp_path: Path) -> None:
    far = imported(tmp_path / "far", f"{uploaded.url}/x.*sv*", folder / "x.jsonl", f"{uploaded.url}/x.jsonl.zst")
    near = imported(tmp_path / "near", *(folder / name for name in ("x.csv", "x.csv.gz", "x.jsonl", "x.jsonl.zst")))
    assert far.equals(near)


def test_folder_of_the_hub_is_imported(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with file_server(files) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        far = imported(tmp_path / "far", "hf://datasets/org/name/mds-zstd", "hf://datasets/org/name/x.jsonl")
    assert far.equals(imported(tmp_path / "near", folder / "mds-zstd", folder / "x.jsonl"))


def test_damaged_object_is_refused(folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "in" / "mds"
    damaged.mkdir(parents=True)
    for path in (folder / "mds").iterdir():
        content = bytearray(path.read_bytes())
        if path.name == "shard.00001.mds":
            content[-3] ^= 1
        (damaged / path.name).write_bytes(content)
    with closing(Uploaded(tmp_path / "in")) as uploaded, pytest.raises(ImportRefused, match=r"mds/shard.00001.mds .*its sha1"):
        imported(tmp_path / "out", f"{uploaded.url}/mds")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.csv", "/none.csv: there is no such object. Correct the URL"),
        ("none/*.csv", "/none/*.csv: there is no such object. Correct the URL"),
        ("x.bin", "/x.bin: token ids are read from this machine only. Copy the file, and the files beside it"),
    ],
)
def test_input_that_cannot_be_read_is_named(uploaded: Uploaded, tmp_path: Path, name: str, message: str) -> None:
    obstore.put(object_store(), f"{uploaded.url.removeprefix('s3://penstock/')}/x.bin", b"12")
    done = penstock("import", f"{uploaded.url}/{name}", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.startswith(f"penstock import: {uploaded.url}{message}")


def test_import_writes_to_a_store(folder: Path, uploaded: Uploaded, out_url: str, tmp_path: Path) -> None:
    done = penstock("import", f"{uploaded.url}/mds-zstd", out_url)
    assert done.stdout.startswith(f"{out_url}: 300 rows in 1 shard, 1 row group; ")
    assert keys_below(out_url) == ["part-00000.parquet"]
    assert read_object(out_url, "part-00000.parquet").equals(imported(tmp_path / "near", folder / "mds-zstd"))


def test_import_refuses_to_replace_objects(folder: Path, out_url: str) -> None:
    assert penstock("import", folder / "x.csv", out_url).returncode == 0
    again = penstock("import", folder / "x.jsonl", out_url)
    assert "holds Parquet files already, such as part-00000.parquet. Name another URL, or delete the objects." in again.stderr
    assert "--overwrite replaces shards in folders only" in penstock("import", folder / "x.csv", out_url, "--overwrite").stderr
    assert keys_below(out_url) == ["part-00000.parquet"]


def test_output_that_is_no_store_is_refused(folder: Path) -> None:
    done = penstock("import", folder / "x.csv", "hf://datasets/org/name")
    assert "shards can be written to folders and to URLs such as s3://BUCKET/PREFIX" in done.stderr


def test_failed_import_leaves_no_object(folder: Path, out_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, names = ObjectStore.copy, list[str]()

    def fail(store: ObjectStore, key: str, other: str) -> None:
        names.append(other)
        if len(names) > 2:
            raise PermissionError(13, "the store answered 403")
        copy(store, key, other)

    monkeypatch.setattr(ObjectStore, "copy", fail)
    with pytest.raises(ImportRefused, match="cannot be written: the store answered 403"):
        Import(files=[folder / "x.parquet"], out_dir=out_url, shape=Shape(shard_bytes=1)).run()
    assert len(names) > 2
    assert keys_below(out_url) == []


def test_stopped_import_leaves_no_object(out_url: str, tmp_path: Path) -> None:
    with (tmp_path / "x.jsonl").open("w") as file:
        for row in range(60_000):
            file.write(json.dumps({"text": f"{row} " + "the quick brown fox " * 90}) + "\n")
    with closing(Fork("import", tmp_path / "x.jsonl", out_url, "--shard-bytes", "1MB")) as process:
        until(lambda: len(keys_below(out_url)) > 3, 300)  # it is writing
        assert not [key for key in keys_below(out_url) if not key.startswith(".import-")]
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60) == (130, "", "penstock: stopped\n")
    assert keys_below(out_url) == []
