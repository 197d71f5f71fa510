"""The shape of shards and row groups, and how they come to where they are served from."""

from __future__ import annotations

import os
from collections.abc import Callable
from errno import EIO
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.output import CommandError
from penstock_server.importing.run import Import
from penstock_server.importing.schema import ImportRefused
from penstock_server.importing.shards import Shape, old_shards, row_groups, staged, write_shards
from support.corpora import imported, read_back, shards_in, write_tokenizer
from support.engine import open_snapshot

TEXT = pa.string()
SCHEMA = pa.schema([("text", TEXT)])


def table_of(texts: list[str]) -> pa.Table:
    return pa.table({"text": pa.array(texts, pa.string())})


@given(
    lengths=st.lists(st.lists(st.integers(0, 300), max_size=40), max_size=12),
    bounds=st.tuples(st.integers(1, 1_500), st.integers(1, 1_500)),
    group_rows=st.integers(1, 30),
)
def test_row_groups_are_full_within_all_bounds_and_keep_the_order(
    lengths: list[list[int]], bounds: tuple[int, int], group_rows: int
) -> None:
    texts = [[f"{a}-{b}-" + "x" * length for b, length in enumerate(table)] for a, table in enumerate(lengths)]
    shape = Shape(group_bytes=bounds[0], shard_bytes=bounds[1], group_rows=group_rows)
    groups = list(row_groups(map(table_of, texts), shape))
    rows = [text for group in groups for text in group.column("text").to_pylist()]
    assert rows == [text for table in texts for text in table]
    for group in groups:
        assert group.num_rows == 1 or (group.nbytes <= min(bounds) and 1 < group.num_rows <= group_rows)
    for group, after in pairwise(groups):
        larger = pa.concat_tables([group, after.slice(0, 1)]).combine_chunks()
        assert larger.num_rows > group_rows or larger.nbytes > min(bounds)


@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=60), shard_bytes=st.integers(1, 2_000))
def test_shards_are_full_up_to_their_bound(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], shard_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    groups = [table_of(["x" * size]) for size in sizes]
    written = write_shards(groups, folder, SCHEMA, Shape(shard_bytes=shard_bytes))
    assert [len(text) for text in read_back(folder).column("text").to_pylist()] == sizes
    held = [pq.read_table(path).nbytes for path in shards_in(folder)]
    groups_in = [pq.ParquetFile(path).num_row_groups for path in shards_in(folder)]
    assert (written.num_rows, written.num_groups, written.num_shards) == (len(sizes), sum(groups_in), len(held))
    assert written.file_bytes == sum(path.stat().st_size for path in shards_in(folder))
    for nbytes, num_groups in zip(held, groups_in, strict=True):
        assert nbytes <= shard_bytes + 4 * num_groups or num_groups == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: pa.array(["some words that are all alike " * 9] * 200_000),
        lambda: pa.array([os.urandom(40).hex() for _ in range(150_000)]),
        lambda: pa.array([list(range(row % 900)) for row in range(12_000)], pa.list_(pa.int32())),
        lambda: pa.ListArray.from_arrays(np.arange(1_000_001, dtype=np.int32), np.arange(1_000_000, dtype=np.int32) % 50_000),
    ],
    ids=["equal texts", "unequal texts", "token lists", "short token lists"],
)
def test_row_group_is_one_block_of_the_server(tmp_path: Path, make: Callable[[], pa.Array]) -> None:
    column = make()
    tokens = pa.types.is_list(column.type)
    table = pa.table({"tokens" if tokens else "text": column})
    write_shards(row_groups([table], Shape()), tmp_path, table.schema, Shape())
    snapshot = open_snapshot(tmp_path, None if tokens else write_tokenizer(tmp_path / "tokenizer.json"))
    assert snapshot.num_rows == len(column)
    assert snapshot.blocks_per_group.tolist() == [1] * len(snapshot.blocks_per_group)
    assert len(snapshot.blocks_per_group) <= 2 + max(table.nbytes // (7 << 20), len(column) // 60_000)


def test_shard_footer_has_statistics(tmp_path: Path) -> None:
    table = pa.table({"tokens": pa.array([[3, 70_000], [1]], pa.list_(pa.int32())), "text": ["a", None]})
    write_shards([table], tmp_path, table.schema, Shape())
    group = pq.read_metadata(tmp_path / "part-00000.parquet").row_group(0)
    tokens, text = group.column(0), group.column(1)
    assert (tokens.statistics.min, tokens.statistics.max, text.statistics.null_count) == (1, 70_000, 1)
    assert {tokens.compression, text.compression} == {"ZSTD"}


def put(folder: Path, *texts: str) -> None:
    write_shards([table_of(list(texts))], folder, SCHEMA, Shape())


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_staged_new_folder_appears_with_all_shards(tmp_path: Path) -> None:
    out_dir = tmp_path / "a" / "b"
    with staged(out_dir, overwrite=False) as folder:
        put(folder, "x")
        assert not out_dir.exists()
        assert folder.name.startswith(".")
    assert names_in(tmp_path / "a") == ["b", "part-00000.parquet"]
    (tmp_path / "plain").mkdir()
    assert out_dir.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_staged_keeps_other_files(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text("")
    with staged(tmp_path, overwrite=False) as folder:
        put(folder, "x")
    assert names_in(tmp_path) == ["part-00000.parquet", "penstock.toml"]


def test_staged_replaces_old_shards_when_complete(tmp_path: Path) -> None:
    put(tmp_path, "old")
    (tmp_path / "part-00000.parquet").rename(tmp_path / "other.parquet")
    put(tmp_path, "old")
    with staged(tmp_path, overwrite=True) as folder:
        put(folder, "new")
        assert read_back(tmp_path).column("text").to_pylist() == ["old", "old"]
    assert names_in(tmp_path) == ["part-00000.parquet"]
    assert read_back(tmp_path).column("text").to_pylist() == ["new"]


def stage(out_dir: Path, write: Callable[[Path], object], *, overwrite: bool = False) -> None:
    with staged(out_dir, overwrite=overwrite) as folder:
        write(folder)


def test_staged_refuses_shards_that_appear_meanwhile(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        put(folder, "new")
        put(tmp_path, "old")

    with pytest.raises(ImportRefused, match="holds Parquet files already, such as part-00000.parquet"):
        stage(tmp_path, write)
    assert names_in(tmp_path) == ["part-00000.parquet"]
    assert read_back(tmp_path).column("text").to_pylist() == ["old"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ImportRefused, ZeroDivisionError])
@pytest.mark.parametrize("new", [True, False])
def test_staged_changes_nothing_when_stopped(tmp_path: Path, error: type[BaseException], new: bool) -> None:
    def write(folder: Path) -> None:
        put(folder, "x")
        raise error

    with pytest.raises(error):
        stage(tmp_path / "out" if new else tmp_path, write)
    assert names_in(tmp_path) == []


def fail_from(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, number: int) -> None:
    """Each call from this one on fails, as on a disk that went away."""
    real, calls = getattr(module, name), iter(range(number))

    def call(*arguments: Any) -> Any:
        if next(calls, None) is None:
            raise OSError(EIO, os.strerror(EIO))
        return real(*arguments)

    monkeypatch.setattr(module, name, call)


def test_staged_leaves_the_folder_as_it_was_when_an_exchange_fails(tmp_path: Path) -> None:
    put(tmp_path, "old")
    (tmp_path / "part-00001.parquet").mkdir()  # a folder is no shard, and in the way of one
    (tmp_path / "part-00001.parquet" / "x").touch()
    before = names_in(tmp_path)

    def write(folder: Path) -> None:
        write_shards([table_of(["a"]), table_of(["b"])], folder, SCHEMA, Shape(shard_bytes=1))

    with pytest.raises(ImportRefused, match="cannot be written"):
        stage(tmp_path, write, overwrite=True)
    assert names_in(tmp_path) == before
    assert pq.read_table(tmp_path / "part-00000.parquet").column("text").to_pylist() == ["old"]


@pytest.mark.parametrize("number", range(2))  # after the old shard was moved, and after the new one was
def test_staged_leaves_the_folder_as_it_was_when_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    put(tmp_path, "old")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real, calls = Path.rename, count()

    def rename(path: Path, target: Path) -> Path:
        moved = real(path, target)
        if next(calls) == number:
            raise KeyboardInterrupt
        return moved

    def write(folder: Path) -> None:
        put(folder, "new")
        monkeypatch.setattr(Path, "rename", rename)

    with pytest.raises(KeyboardInterrupt):
        stage(tmp_path, write, overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("number", range(1, 4))
def test_staged_names_the_folder_of_old_shards_when_stopped_halfway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write_shards([table_of(["a"]), table_of(["b"])], tmp_path, SCHEMA, Shape(shard_bytes=1))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def write(folder: Path) -> None:
        write_shards([table_of(["new"]), table_of(["newer"])], folder, SCHEMA, Shape(shard_bytes=1))
        fail_from(monkeypatch, Path, "rename", number)

    with pytest.raises(ImportRefused, match="The old ones are in") as refusal:
        stage(tmp_path, write, overwrite=True)
    monkeypatch.undo()
    [aside] = tmp_path.glob(".import-*")
    assert str(aside) in str(refusal.value)
    for path in aside.iterdir():
        path.rename(tmp_path / path.name)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.parquet")} == before


@pytest.mark.parametrize("number", range(2))  # the sync of the shard, and of the hidden folder
@pytest.mark.parametrize("new", [True, False])
def test_staged_changes_nothing_when_the_disk_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, new: bool
) -> None:
    out_dir = tmp_path / "out"
    if not new:
        out_dir.mkdir()
        put(out_dir, "old")
    before = names_in(tmp_path), [path.read_bytes() for path in out_dir.glob("*")]

    def write(folder: Path) -> None:
        put(folder, "new")
        fail_from(monkeypatch, os, "fsync", number)

    with pytest.raises(ImportRefused, match="out cannot be written: Input/output error"):
        stage(out_dir, write, overwrite=True)
    assert (names_in(tmp_path), [path.read_bytes() for path in out_dir.glob("*")]) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_staged_changes_nothing_when_the_disk_is_full(tmp_path: Path) -> None:
    put(tmp_path, "old")

    def write(folder: Path) -> None:
        (folder / "part-00001.parquet").symlink_to("/dev/full")
        write_shards([table_of(["a"]), table_of([os.urandom(9_000).hex()])], folder, SCHEMA, Shape(shard_bytes=1))

    with pytest.raises(ImportRefused, match="cannot be written: No space left on device"):
        stage(tmp_path, write, overwrite=True)
    assert names_in(tmp_path) == ["part-00000.parquet"]
    assert read_back(tmp_path).column("text").to_pylist() == ["old"]


def test_output_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").touch()
    with pytest.raises(ImportRefused, match="is a file, not a folder. The last name"):
        old_shards(tmp_path / "x.jsonl", overwrite=True)
    with pytest.raises(ImportRefused, match="cannot be written"):
        stage(tmp_path / "x.jsonl" / "y", put)


@pytest.mark.parametrize("name", ["s3:x", "file:x", "x[1]*"])
@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "arrow"])
def test_file_with_an_unusual_name_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ending: str) -> None:
    monkeypatch.chdir(tmp_path)
    path, table = Path(f"{name}.{ending}"), pa.table({"n": [1]})
    if ending == "parquet":
        with path.open("wb") as file:
            pq.write_table(table, file)
    elif ending == "arrow":
        with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write(table)
    else:
        path.write_text('{"n": 1}\n' if ending == "jsonl" else "n\n1\n")
    Import(files=[path], out_dir=Path("gs:out")).run()
    assert read_back(tmp_path / "gs:out").to_pylist() == [{"n": 1}]


def test_output_path_that_is_a_url_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"n": 1}\n')
    with pytest.raises(CommandError, match="s3:/bucket/x is a URL"):
        imported(Path("s3://bucket/x"), tmp_path / "x.jsonl")
