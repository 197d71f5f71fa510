"""CSV, JSON lines, Arrow and Parquet: values and types that come back, and the place that an error names."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather as pf
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.importing import tables
from penstock_server.importing.schema import ImportRefused
from penstock_server.importing.shards import Shape
from support.corpora import Rows, imported, types_of

INTEGERS = st.integers(-(2**63), 2**63 - 1)
DECIMALS = st.floats(-1e100, 1e100, allow_subnormal=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12) | st.sampled_from(
    ["NA", "null", "true", "2024-02-29", "10:00:00", "007", "-0", " 1", 'a "b"', "a,b\n", "12345678901234567890"]
)


def write_json(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Iterable[object]], **options: Any) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, **options).writerows([header, *rows])
    return path


def write_table(path: Path, table: pa.Table, rows: int = 1 << 16) -> Path:
    """Write a table in the format of the name, in record batches or row groups of `rows` rows."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows)
    elif path.suffix == ".feather":
        pf.write_feather(table, str(path), compression="lz4", chunksize=rows)
    else:
        kind = pa.ipc.new_stream if path.name.startswith("stream") else pa.ipc.new_file
        with kind(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    return path


# CSV


@given(
    rows=st.lists(st.tuples(TEXTS, TEXTS, st.integers(-(10**18) + 1, 10**18 - 1) | st.just("")), min_size=1), tabs=st.booleans()
)
@pytest.mark.parametrize("table_bytes", [30, 4 << 20])
def test_csv_rows_come_back_with_empty_fields_null(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, int | str]], tabs: bool, table_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("csv")
    name, delimiter = ("x.tsv", "\t") if tabs else ("x.csv", ",")
    path = write_csv(folder / name, ["text", "words", "n"], rows, delimiter=delimiter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_TABLE_BYTES", table_bytes)
        table = imported(folder / "out", path, text=["words"])
    assert [tuple(row.values()) for row in table.to_pylist()] == [tuple(None if v == "" else v for v in row) for row in rows]


@pytest.mark.parametrize(
    ("fields", "type_"),
    [
        (["1", "-20", "", "0"], "int64"),
        (["1", "2.5"], "double"),
        (["1e3", "-0.5E-7", "3.14159265358979323846"], "double"),
        (["1234567890123456.5"], "string"),
        (["123456789012345e299"], "string"),
        (["1", "007"], "string"),
        (["12345678901234567890"], "string"),
        (["123456789012345678", "0.5"], "string"),
        (["1", "NA"], "string"),
        (["true", "2024-01-01"], "string"),
        (["", ""], "string"),
    ],
)
def test_csv_column_is_numeric_only_without_loss(tmp_path: Path, fields: list[str], type_: str) -> None:
    table = imported(tmp_path / "out", write_csv(tmp_path / "x.csv", ["id", "a"], [("x", field) for field in fields]))
    assert types_of(table)["a"] == type_
    expected = [None if not field else field if type_ == "string" else float(field) for field in fields]
    assert table["a"].to_pylist() == expected


@given(text=st.from_regex(re.compile(tables._NUMBERS[pa.float64()], re.ASCII), fullmatch=True))
def test_csv_number_changes_only_far_after_its_point(text: str) -> None:
    number, read = Fraction(text), Fraction(float(text))
    assert abs(read - number) <= abs(number) / 2**53
    if "e" not in text.lower():
        assert read == number or (number.denominator > 1 and abs(read - number) <= Fraction(1, 4))


def test_csv_column_with_a_text_in_a_late_row_or_file_is_text(tmp_path: Path) -> None:
    numbers = write_csv(tmp_path / "a.csv", ["id", "n"], [(number, 1) for number in range(70_000)])
    late = write_csv(tmp_path / "b.csv", ["n", "id"], [(2, "none")])
    table = imported(tmp_path / "out", numbers, late)
    assert types_of(table) == {"id": "string", "n": "int64"}
    assert table["id"].to_pylist() == [*map(str, range(70_000)), "none"]


def test_csv_columns_read_as_text_by_the_server_are_text(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "x.csv", ["prompt", "response", "text", "n", "note"], [range(5)])
    assert list(types_of(imported(tmp_path / "out", path, text=["note"])).values()) == [*["string"] * 3, "int64", "string"]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_csv_byte_order_mark_blank_lines_and_compression_do_not_matter(tmp_path: Path, ending: str) -> None:
    content = b"\xef\xbb\xbfa,b\r\n\r\n1,x\r\n\r\n" + b"2,y\r\n" * 200_000 + b"\r\n\r\n"
    if ending:
        content = pa.compress(content, {".gz": "gzip", ".zst": "zstd"}[ending], asbytes=True)
    (path := tmp_path / f"x.csv{ending}").write_bytes(content)
    assert imported(tmp_path / "out", path)["a"].to_pylist() == [1] + [2] * 200_000


@pytest.mark.parametrize(
    ("quoting", "content", "texts"),
    [
        ("doubled", '"he said ""a"""\t1\n"a\r\nb"\t2\n5" or 6"\t3', ['he said "a"', "a\r\nb", '5" or 6"']),
        ("backslash", '"a \\" b"\t1\n"x\\\\"\t2\n"a\\\tb"\t3\n', ['a " b', "x\\", "a\tb"]),
        ("none", '"Hello," he said.\t1\n"\t2\n""\t3\n', ['"Hello," he said.', '"', '""']),
    ],
)
def test_csv_quoting(tmp_path: Path, quoting: str, content: str, texts: list[str]) -> None:
    (tmp_path / "x.tsv").write_bytes(f"text\tn\n{content}".encode())
    table = imported(tmp_path / "out", tmp_path / "x.tsv", quoting=quoting)
    assert table.to_pylist() == [{"text": text, "n": number} for number, text in enumerate(texts, 1)]


@pytest.mark.parametrize("columns", [None, ["a"]])
@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (b"1,x\n3,NA,9\n", 2, "2 fields, and this row 3"),
        (b'"x\ny",z\n"p\nq"\n', 3, "2 fields, and this row 1"),
        (b'1,"a\nb"\n2,"There was ""a""\n', 3, "unexpected end"),
        (b'"Hello," he said.,1\n', 1, "expected after"),
        (b'1,"x\n' + b"2,y\n" * (5 << 20), 1, "field limit"),
        (b"1,x\n2,y\xff\n", 2, "UTF-8.*iconv"),
    ],
)
def test_csv_error_names_the_line(tmp_path: Path, content: bytes, line: int, message: str, columns: list[str] | None) -> None:
    (path := tmp_path / "x.csv").write_bytes(b"a,b\n" + b"5,five\n" * 20_000 + content)
    with pytest.raises(ImportRefused, match=f"{path}, line {20_001 + line:,}.*{message}"):
        imported(tmp_path / "out", path, columns=columns)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"", "no column"),
        ("x.csv", b"a,b\n", "no row"),
        ("x.csv", b"a,a\n1,2\n", "2 columns are called 'a'"),
        ("x.csv", b"a;b\n1;2\n", "header: .*--delimiter ';', or --delimiter ','"),
        ("x.csv", "a,b\n1,2\n".encode("utf-16"), "line 1 is not UTF-8"),
        ("x.csv.gz", b"a,b\n1,2\n", "cannot be read"),
        ("x.csv.gz", gzip.compress(b"a,b\n1,2\n" * 90_000, mtime=0)[:-20], "cannot be read"),
    ],
)
def test_csv_file_that_is_not_a_table_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ImportRefused, match=f"{name}.*{message}"):
        imported(tmp_path / "out", tmp_path / name)
    assert not (tmp_path / "out").exists()


# JSON lines

MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXTS, "content": TEXTS | st.none(), "weight": INTEGERS | st.none()}))


@given(
    st.lists(
        st.fixed_dictionaries(
            {"id": INTEGERS},
            optional={"text": TEXTS, "x": DECIMALS, "b": st.booleans(), "m": MESSAGES, "t": st.lists(INTEGERS)},
        ),
        min_size=1,
    )
)
def test_json_rows_come_back_with_missing_keys_null(tmp_path_factory: pytest.TempPathFactory, rows: Rows) -> None:
    folder = tmp_path_factory.mktemp("json")
    table = imported(folder / "out", write_json(folder / "x.jsonl", rows))
    assert table.to_pylist() == [{name: row.get(name) for name in table.column_names} for row in rows]


@pytest.mark.parametrize(
    ("rows", "type_"),
    [
        ([{"a": 1}, {"a": 0.5}, {"a": -7}], "double"),
        ([{"a": 2**63 - 1}, {}], "int64"),
        ([{"a": 2**64 - 1}], "uint64"),
        ([{"a": 1}, {"a": -1}], "int64"),
        ([{"a": 2**70}, {"a": -1}], "double"),
        ([{"a": {}}, {"a": {"x": [-1, 1]}}], "struct<x: list<item: int32>>"),
        ([{"a": [1, 2]}, {"a": []}, {"a": [None, 3]}], "list<item: int32>"),
        ([{"a": [1, 2**31]}], "list<item: int64>"),
        ([{"a": [[1], [0.5]]}], "list<item: list<item: double>>"),
        ([{"a": {"x": 1}}, {"a": {"y": ["t"]}}, {"a": None}], "struct<x: int64, y: list<item: string>>"),
        ([{"a": None}], "string"),
        ([{"a": "2024-01-01"}, {"a": "8f2e9b1c-0000-4000-8000-123456789ABC"}], "string"),
    ],
)
def test_json_column_has_a_type_for_all_its_values(tmp_path: Path, rows: Rows, type_: str) -> None:
    files = [write_json(tmp_path / f"{number}[1].jsonl", [{"id": number, **row}]) for number, row in enumerate(rows)]
    for name, order in (("one", files), ("back", files[::-1])):
        table = imported(tmp_path / name, *order)
        assert name == "back" or types_of(table)["a"] == type_  # fields stand in the order of the lines
        for row in table.to_pylist():
            value, read = rows[row["id"]].get("a"), row["a"]
            assert (read if not isinstance(value, dict) else {k: v for k, v in read.items() if v is not None}) == value


@pytest.mark.parametrize(
    "values",
    [
        [1, "x", None],
        [[1], {"b": 2}, True],
        [{}],
        [{"A": 1, "a": 2}],
        [{f"key {number}": number} for number in range(1_200)],
    ],
)
def test_json_values_without_a_common_type_are_stored_as_json(tmp_path: Path, values: list[object]) -> None:
    table = imported(tmp_path / "out", write_json(tmp_path / "x.jsonl", [{"a": value} for value in values]))
    assert types_of(table) == {"a": "extension<arrow.json>"}
    assert [None if text is None else json.loads(text) for text in table["a"].to_pylist()] == values


def test_json_objects_nested_deeply_are_stored_as_json(tmp_path: Path) -> None:
    value: Any = 1
    for _ in range(30):
        value = [value]
    table = imported(tmp_path / "out", write_json(tmp_path / "x.jsonl", [{"a": value}]))
    assert table.num_rows == 1
    assert "arrow.json" in types_of(table)["a"]


def test_json_column_kept_as_text_is_its_json(tmp_path: Path) -> None:
    values = [{"n": 7, "none": None}, [1, 123456789012345678901234567890], 'a "text"\n', None, "null", {}, True]
    path = write_json(tmp_path / "x.jsonl", [{"id": 1, "calls": value} for value in values] + [{"id": 2}])
    for columns in (None, ["calls"]):
        texts = imported(tmp_path / f"{columns}", path, columns=columns, text=["calls"])["calls"].to_pylist()
        assert [value if isinstance(value, str) else json.dumps(value).replace(" ", "") for value in values] == [
            "null" if text is None else text for text in texts[:-1]
        ]
    with pytest.raises(ImportRefused, match="--text: no file has a column 'call'"):
        imported(tmp_path / "wrong", path, text=["call"])


@pytest.mark.parametrize("name", ["x.jsonl", "x.ndjson", "X.JSON", "x.jsonl.gz", "x.json.zst"])
def test_json_ending_compression_and_line_ends_do_not_matter(tmp_path: Path, name: str) -> None:
    content = b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": 2}\n\n {"a": 3} '
    if name.endswith(("gz", "zst")):
        content = pa.compress(content, "gzip" if name.endswith("gz") else "zstd", asbytes=True)
    (tmp_path / name).write_bytes(content)
    assert imported(tmp_path / "out", tmp_path / name)["a"].to_pylist() == [1, 2, 3]


def test_json_file_is_refused_when_its_rows_are_not_as_many_as_its_lines(tmp_path: Path) -> None:
    path = write_json(tmp_path / "x.jsonl", [{"a": 1}, {"a": 2}])
    reader = tables.JsonReader([path], [])
    reader.schemas()
    rows = reader.tables(path, ["a"])
    assert next(rows).num_rows == 2
    with path.open("a") as file:
        file.write('\n \n{"a": 3}\n')
    with pytest.raises(
        ImportRefused, match=r"x.jsonl has 3 lines that are not blank, but 2 rows were read. Nothing was written"
    ):
        next(rows)


def test_json_columns_in_different_case_are_not_mixed_up(tmp_path: Path) -> None:
    path = write_json(tmp_path / "x.jsonl", [{"Text": "x", "text": "y"}])
    with pytest.raises(ImportRefused, match="Duplicate"):
        imported(tmp_path / "out", path)
    assert imported(tmp_path / "out", path, columns=["text"]).to_pylist() == [{"text": "y"}]


@pytest.mark.parametrize("columns", [None, ["a"]])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n\n{"a": oops}\n', "line 43: Expecting value"),
        (b'{"a": 1}\n{"a": 2', "line 42: .*Each line must be one JSON object"),
        (b'{"a": 1}\n7\n', "line 42: it is not an object"),
        (b'{"a": 1}\n{"a": 1} {"a": 2}\n', "line 42: "),
        (b'{"a": 1}\n{"a": 1, "a": 2}\n', "duplicate key"),
        (b'{"a": "x"}\n{"a": "\xff"}\n', "line 42 is not UTF-8.*iconv"),
        (b'{"a": ' + b"[" * 60_000 + b"]" * 60_000 + b"}\n", "recursion"),
    ],
)
def test_json_error_names_the_line(tmp_path: Path, content: bytes, message: str, columns: list[str] | None) -> None:
    (path := tmp_path / "x.jsonl").write_bytes(b'{"a": null}\n' * 40 + content)
    with pytest.raises(ImportRefused, match=f"{path}.*{message}") as refused:
        imported(tmp_path / "out", path, columns=columns)
    assert "Nothing was written" in str(refused.value)
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b' [{"a": 1},\n{"a": 2}]', "line 1: "),
        ("x.jsonl", '{"a": 1}\n'.encode("utf-16"), "line 1 is not UTF-8"),
        ("x.jsonl", b"", "no column"),
        ("x.jsonl", b"{}\n{}\n", "no column"),
        ("x.jsonl.gz", b'{"a": 1}\n', "cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_json_file_without_objects_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ImportRefused, match=message):
        imported(tmp_path / "out", tmp_path / name)
    assert not (tmp_path / "out").exists()


# Arrow and Parquet

FORMATS = ["file.arrow", "stream.arrow", "lz4.feather", "x.parquet"]
TEXT = pa.string()
WORDS, BYTES, IDS = ["a", "é b", ""], [b"0001", b"\xff\xfe00"], [[], [1], [2, 3]]
TYPES: list[tuple[pa.DataType, str, Sequence[object]]] = [
    (pa.int8(), "int8", [1, -2]),
    (pa.uint64(), "int64", [1, 2]),
    (pa.float32(), "float", [0.5, -2.0]),
    (pa.bool_(), "bool", [True, False]),
    (pa.timestamp("us"), "timestamp[us]", [datetime(2024, 2, 29), datetime(1969, 1, 1, 1, 2, 3, 4)]),
    (pa.decimal128(9, 2), "decimal128(9, 2)", [Decimal("0.25"), Decimal("-7.00")]),
    (pa.binary(4), "fixed_size_binary[4]", BYTES),
    (pa.large_string(), "string", WORDS),
    (pa.dictionary(pa.int16(), TEXT), "string", WORDS),
    (pa.large_binary(), "binary", BYTES),
    (pa.list_(pa.uint16()), "list<item: int32>", IDS),
    (pa.large_list(pa.int64()), "list<item: int32>", IDS),
    (pa.list_(pa.int32(), 2), "list<item: int32>", [[1, 2], [3, 4]]),
    (pa.list_(pa.list_(pa.int64())), "list<item: list<item: int32>>", [[], [[1], []], [[2, 3]]]),
    (pa.map_(pa.large_string(), pa.int64()), "map<string, int64>", [[("a", 1)], [("a", 2), ("b", 3)]]),
    (pa.json_(), "extension<arrow.json>", WORDS),
    (pa.json_(pa.large_string()), "extension<arrow.json>", WORDS),
    (
        pa.struct([("role", pa.large_string()), ("lang", pa.dictionary(pa.int8(), TEXT))]),
        "struct<role: string, lang: string>",
        [{"role": "a", "lang": "b"}, {"role": "a", "lang": "c"}],
    ),
    (pa.list_(pa.dictionary(pa.int8(), TEXT)), "list<item: string>", [WORDS, [], ["a"]]),
    (pa.null(), "string", [None]),
]


@pytest.mark.parametrize("name", FORMATS)
def test_every_type_comes_back_plain_with_its_values(tmp_path: Path, name: str) -> None:
    columns = [pa.array(([*values, None] * 50)[:100], type_) for type_, _, values in TYPES]
    table = pa.table(columns, [f"c{number}" for number in range(len(TYPES))])
    read = imported(tmp_path / "out", write_table(tmp_path / name, table, 30))
    assert list(types_of(read).values()) == [plain for _, plain, _ in TYPES]
    assert read.to_pylist() == table.to_pylist()


@given(
    lengths=st.lists(st.none() | st.integers(0, 50), min_size=1, max_size=60),
    rows=st.integers(1, 60),
    start=st.integers(0, 5),
    name=st.sampled_from(FORMATS),
)
def test_rows_come_back_in_order_from_batches_and_slices_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int | None], rows: int, start: int, name: str
) -> None:
    folder = tmp_path_factory.mktemp("columnar")
    tokens = [None if length is None else list(range(number, number + length)) for number, length in enumerate(lengths)]
    texts = [None if length is None else "é" * length for length in lengths]
    columns = {"tokens": pa.array(tokens, pa.list_(pa.int64())), "text": texts, "view": pa.array(texts, pa.string_view())}
    table = pa.table({**columns, "n": range(len(lengths))}).slice(start)
    if table.num_rows:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tables, "_TABLE_BYTES", 300)
            shape = Shape(group_bytes=500, shard_bytes=900, group_rows=7)
            read = imported(folder / "out", write_table(folder / name, table, rows), shape=shape)
        assert read.to_pylist() == table.to_pylist()


@pytest.mark.parametrize("name", ["file.arrow", "x.parquet"])
@pytest.mark.parametrize(
    ("kind", "largest", "type_"),
    [
        (pa.int64(), 2**31 - 1, "list<item: int32>"),
        (pa.int64(), 2**31, "list<item: int64>"),
        (pa.int64(), -(2**31) - 1, "list<item: int64>"),
        (pa.uint32(), 2**32 - 1, "list<item: int64>"),
    ],
)
def test_token_ids_are_int32_where_all_fit(tmp_path: Path, name: str, kind: pa.DataType, largest: int, type_: str) -> None:
    rows: list[list[int] | None] = [[1], None, [], *([[2, 3]] * 70_000), [4, largest]]
    table = pa.table({"tokens": pa.array(rows, pa.list_(kind)), "n": pa.array(range(len(rows)), pa.uint64())})
    read = imported(tmp_path / "out", write_table(tmp_path / name, table))
    assert types_of(read)["tokens"] == type_
    assert read["tokens"].to_pylist() == rows


@pytest.mark.parametrize("name", FORMATS)
def test_truncated_or_foreign_file_is_refused(tmp_path: Path, name: str) -> None:
    path = write_table(tmp_path / name, pa.table({"n": np.arange(100_000), "text": ["x"] * 100_000}), 10_000)
    content = path.read_bytes()
    for damaged in (b"", content[:20], content[: len(content) // 2], b"no such thing" * 40):
        path.write_bytes(damaged)
        with pytest.raises(ImportRefused, match=f"{path} cannot be (read|imported): "):
            imported(tmp_path / "out", path)
        assert list(tmp_path.iterdir()) == [path]


def test_parquet_times_of_96_bits_beyond_the_year_2262(tmp_path: Path) -> None:
    table = pa.table({"at": pa.array([datetime(2500, 1, 1)], pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "x.parquet", use_deprecated_int96_timestamps=True)
    assert imported(tmp_path / "out", tmp_path / "x.parquet").to_pydict() == {"at": [datetime(2500, 1, 1)]}


@pytest.mark.parametrize("name", ["file.arrow", "x.parquet"])
def test_text_that_is_not_utf8_is_refused(tmp_path: Path, name: str) -> None:
    broken = pa.Array.from_buffers(TEXT, 2, [None, pa.array([0, 1, 2], pa.int32()).buffers()[1], pa.py_buffer(b"a\xff")])
    with pytest.raises(ImportRefused, match=f"{name} cannot be imported: .*UTF8.*Nothing was written"):
        imported(tmp_path / "out", write_table(tmp_path / name, pa.table({"text": broken})))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table([[1], [2]], names=["a", "a"]), "2 columns are called 'a'"),
        (pa.table({"a": pc.run_end_encode(pa.array([1, 1]))}), "Parquet cannot hold"),
        (pa.table({"a": [{}]}), "Parquet cannot hold"),
        (pa.table({"a": [1]}).slice(1), "no row to import"),
        (pa.table({"a": pa.array([[2**63]], pa.list_(pa.uint64()))}), "column 'a' does not fit list<item: int64>"),
    ],
)
def test_types_without_a_parquet_form_are_refused(tmp_path: Path, table: pa.Table, message: str) -> None:
    path = write_table(tmp_path / "file.arrow", table)
    with pytest.raises(ImportRefused, match=message):
        imported(tmp_path / "out", path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("rows_in_footer", [4_500, 9_001])
def test_parquet_footer_with_more_rows_than_the_file_is_refused(tmp_path: Path, rows_in_footer: int) -> None:
    def encoded(number: int) -> bytes:  # zigzag, then seven bits a byte
        return bytes([2 * number & 0x7F | 0x80, 2 * number >> 7 & 0x7F | 0x80, 2 * number >> 14])

    path, schema = tmp_path / "x.parquet", pa.schema([pa.field("n", pa.int64(), nullable=False)])
    pq.write_table(pa.table({"n": range(18_000)}, schema=schema), path, row_group_size=9_000, write_statistics=False)
    content = path.read_bytes()
    begin = content.rindex(encoded(9_000))  # the rows of the second row group
    path.write_bytes(content[:begin] + encoded(rows_in_footer) + content[begin + 3 :])
    if rows_in_footer < 9_000:
        with pytest.raises(ImportRefused, match="footer has 18,000 rows"):
            imported(tmp_path / "out", path)
    else:
        assert imported(tmp_path / "out", path)["n"].to_pylist() == list(range(18_000))


def test_arrow_stream_followed_by_another_is_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path / "stream.arrow", pa.table({"a": [1, 2]}))
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(ImportRefused, match="import each one"):
        imported(tmp_path / "out", path)


def test_wrong_offsets_in_arrow_are_refused(tmp_path: Path) -> None:
    """To follow them would crash the process."""
    path = write_table(tmp_path / "x.arrow", pa.table({"ids": [[1], [2, 3], [4]]}))
    content, offsets = path.read_bytes(), np.array([0, 1, 3, 4], "<i4")
    assert content.count(offsets.tobytes()) == 1
    path.write_bytes(content.replace(offsets.tobytes(), np.array([0, 1 << 30, 3, 4], "<i4").tobytes()))
    with pytest.raises(ImportRefused, match="x.arrow cannot be imported: In column 0: Invalid: Offset invariant failure"):
        imported(tmp_path / "out", path)
