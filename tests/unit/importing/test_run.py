"""One dataset of several files: formats, columns and options that go together, and those that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock_server.importing.schema import ImportRefused
from penstock_server.importing.shards import Shape
from support.corpora import Rows, imported, shards_in, types_of


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def test_files_of_all_formats_make_one_dataset_in_the_order_given(tmp_path: Path) -> None:
    rows: list[Rows] = [[{"text": f"{part}-{row}", "n": row} for row in range(50)] for part in range(4)]
    lines = tmp_path / "b.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows[0]))
    commas = tmp_path / "c.csv"
    commas.write_text("n,text\n" + "".join(f"{row['n']},{row['text']}\n" for row in rows[1]))
    arrow, table = tmp_path / "d.arrow", pa.Table.from_pylist(rows[2])
    with pa.ipc.new_file(str(arrow), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    texts = pa.array([row["text"] for row in rows[3]]).dictionary_encode()
    parquet = write_parquet(tmp_path / "a.parquet", {"text": texts}, row_group_size=9)
    read = imported(tmp_path / "out", lines, commas, arrow, parquet)
    assert read.to_pylist() == [*rows[0], *rows[1], *rows[2], *({"text": row["text"], "n": None} for row in rows[3])]
    assert types_of(read) == {"text": "string", "n": "int64"}


def test_objects_get_the_fields_of_all_files(tmp_path: Path) -> None:
    one = write_parquet(tmp_path / "a.parquet", {"m": [[{"role": "x", "n": 1}]]})
    two = write_parquet(tmp_path / "b.parquet", {"m": [[{"n": 0.5, "more": {"k": True}}], None]})
    assert imported(tmp_path / "out", one, two).column("m").to_pylist() == [
        [{"role": "x", "n": 1.0, "more": None}],
        [{"role": None, "n": 0.5, "more": {"k": True}}],
        None,
    ]


@pytest.mark.parametrize("type_", [pa.float16(), pa.date32(), pa.decimal128(9, 2), pa.map_(pa.string(), pa.int8())], ids=str)
def test_json_column_of_nulls_takes_the_type_of_another_file(tmp_path: Path, type_: pa.DataType) -> None:
    (tmp_path / "x.jsonl").write_text('{"id": 1, "c": null}\n')
    other = write_parquet(tmp_path / "y.parquet", {"id": [2], "c": pa.nulls(1, type_)})
    assert imported(tmp_path / "out", tmp_path / "x.jsonl", other).schema.field("c").type == type_


def test_columns_are_selected_in_the_order_given(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('a,a.b,c\n1,2,"x,y"\n')
    files = [tmp_path / "x.csv", write_parquet(tmp_path / "x.parquet", {"a": [1], "a.b": [2], "c": ["x,y"]})]
    (tmp_path / "x.jsonl").write_text('{"a": 1, "a.b": 2, "c": "x,y"}\n')
    for number, path in enumerate([*files, tmp_path / "x.jsonl"]):
        read = imported(tmp_path / f"{number}", path, columns=["c", "a.b"])
        assert [list(row.items()) for row in read.to_pylist()] == [[("c", "x,y"), ("a.b", 2)]]


def test_json_rows_are_null_when_no_json_file_has_a_chosen_column(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    (tmp_path / "b.csv").write_text("b\n3\n")
    read = imported(tmp_path / "out", tmp_path / "a.jsonl", tmp_path / "b.csv", columns=["b"])
    assert read.to_pylist() == [{"b": None}, {"b": None}, {"b": 3}]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (None, "b.parquet differs from an earlier file: .*Field n.*int64 vs string.*--columns"),
        (["texd"], "no file has a column 'texd'"),
    ],
)
def test_files_without_a_common_schema_are_refused(tmp_path: Path, columns: list[str] | None, message: str) -> None:
    one = write_parquet(tmp_path / "a.parquet", {"text": ["x"], "n": [1]})
    two = write_parquet(tmp_path / "b.parquet", {"text": ["y"], "n": ["1"], "other": [2]})
    with pytest.raises(ImportRefused, match=message):
        imported(tmp_path / "out", one, two, columns=columns)
    assert imported(tmp_path / "out", one, two, columns=["text"]).column("text").to_pylist() == ["x", "y"]


def test_dataset_is_overwritten_in_place(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "one.parquet", {"text": [str(row) for row in range(1_000)]})
    read = imported(tmp_path, path, shape=Shape(shard_bytes=2_000, group_bytes=500), overwrite=True)
    assert read["text"].to_pylist() == [str(row) for row in range(1_000)]
    assert not path.exists()
    assert len(shards_in(tmp_path)) > 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.csv", "does not exist"),
        ("x.txt", "its ending is not .csv, .*JSON lines, a document a line"),
        ("x.parquet.gz", "its ending is not"),
        ("folder.csv/", "is not a file. Name files"),
        ("shard.00000.mds", "its ending is not .*docs/guides/import.md"),
    ],
)
def test_skipped_file_is_named(tmp_path: Path, name: str, message: str) -> None:
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    elif "none" not in name:
        path.touch()
    with pytest.raises(ImportRefused, match=f"{path}.*{message}"):
        imported(tmp_path / "out", path)
