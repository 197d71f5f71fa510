"""JSON lines: what comes back, types that change on the way, and lines that are wrong."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from importing import Rows, imported, read_back, types_of
from penstock_server.importing import stream
from penstock_server.importing.run import Import
from penstock_server.importing.source import ImportRefused

TEXTS = st.text(max_size=20) | st.sampled_from(["2024-02-29", "2024-02-29T12:00:00Z", "12", "null", "\u2028", "\r\n", "\0"])
INTEGERS = st.integers(-(2**63), 2**63 - 1)
MESSAGES = st.lists(st.fixed_dictionaries({}, optional={"role": TEXTS, "content": TEXTS | st.none(), "n": st.integers(0, 9)}))
VALUES = {
    "text": TEXTS,
    "whole": INTEGERS,
    "decimal": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53),
    "flag": st.booleans(),
    "ids": st.lists(INTEGERS, max_size=5),
    "messages": MESSAGES,
    "nested": st.fixed_dictionaries({"a": st.lists(st.lists(TEXTS, max_size=2), max_size=2)}, optional={"b": TEXTS}),
}
ROWS = st.lists(st.fixed_dictionaries({}, optional={name: value | st.none() for name, value in VALUES.items()}), max_size=30)


@pytest.fixture(params=[16, 1 << 16], ids=["portions of a line or two", "one portion"])
def portion_bytes(request: pytest.FixtureRequest) -> Iterator[int]:
    """Small portions bring every change of type between two of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "_FIRST_PORTION_BYTES", request.param)
        patch.setattr(stream, "TABLE_BYTES", request.param)
        yield request.param


def write(path: Path, rows: Rows, *, ascii_only: bool = False) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows), encoding="utf-8", newline="")
    return path


def filled(value: Any, type_: pa.DataType) -> Any:
    """The value with null for whatever fields its type has besides."""
    if value is None:
        return None
    if pa.types.is_list(type_):
        return [filled(item, type_.value_type) for item in value]
    if pa.types.is_struct(type_):
        return {field.name: filled(value.get(field.name), field.type) for field in type_}
    return value


@given(rows=ROWS, in_first=st.integers(0, 30), ascii_only=st.booleans())
@pytest.mark.usefixtures("portion_bytes")
def test_every_row_comes_back_whatever_is_missing_null_or_nested(
    tmp_path_factory: pytest.TempPathFactory, rows: Rows, in_first: int, ascii_only: bool
) -> None:
    folder = tmp_path_factory.mktemp("jsonl")
    rows = [{"id": number, **row} for number, row in enumerate(rows)] or [{"id": 0}]
    files = [
        write(folder / f"{number}.jsonl", some, ascii_only=ascii_only)
        for number, some in enumerate((rows[:in_first], rows[in_first:]))
    ]
    table = imported(folder / "out", *files)
    types = {field.name: field.type for field in table.schema}
    expected = [{name: filled(row.get(name), type_) for name, type_ in types.items()} for row in rows]
    assert table.to_pylist() == expected
    for name in {name for row in rows for name in row} - set(types):
        assert all(row.get(name) in (None, {}) or not any(row[name]) for row in rows)  # nothing was in what is left out
    if ids := [item for row in rows for item in row.get("ids") or ()]:
        narrow = all(-(2**31) <= item < 2**31 for item in ids)
        assert types["ids"] == pa.list_(pa.int32() if narrow else pa.int64())


@pytest.mark.parametrize(
    ("rows", "type_"),
    [
        ([{"a": None}, {"a": 1}], "int64"),
        ([{"a": 1}, {"a": 2.5}], "double"),
        ([{}, {"a": "x"}, {}], "string"),
        ([{"a": None}, {"a": None}], "string"),
        ([{"a": "2024-01-01"}, {"a": "not a date"}], "string"),
        ([{"a": []}, {"a": [{"b": None}]}, {"a": [{"b": 1, "c": "x"}]}], "list<item: struct<b: int64, c: string>>"),
        ([{"a": {"b": 1}}, {"a": {"c": {}}}, {"a": {"b": 0.5}}], "struct<b: double>"),
        ([{"a": [1, 2]}, {"a": [70_000]}], "list<item: int32>"),
        ([{"a": [1, 2]}, {"a": [2**31]}], "list<item: int64>"),
        ([{"a": [1, 2]}, {"a": [0.5]}], "list<item: double>"),
    ],
)
@pytest.mark.usefixtures("portion_bytes")
def test_a_column_whose_type_changes_gets_one_that_holds_all(tmp_path: Path, rows: Rows, type_: str) -> None:
    rows = [{"id": 1, **row} for row in rows]
    files = [write(tmp_path / f"{number}.jsonl", [row]) for number, row in enumerate(rows)]
    for name, parts in (("one", [write(tmp_path / "x.jsonl", rows)]), ("many", files), ("back", files[::-1])):
        table = imported(tmp_path / name, *parts)
        assert types_of(table)["a"] == type_
        if "c: {}" not in str(rows):
            kind = table.schema.field("a").type
            expected = [filled(row.get("a"), kind) for row in (rows[::-1] if name == "back" else rows)]
            assert table.column("a").to_pylist() == expected


@pytest.mark.parametrize("first", [None, "x", 7, 0.5, [1], {}, {"b": None}, {"b": [None, 1]}, True])
@pytest.mark.usefixtures("portion_bytes")
def test_a_list_may_begin_with_null(tmp_path: Path, first: object) -> None:
    rows: Rows = [{"id": number, "a": value} for number, value in enumerate([None, [None, first], None, [first, None], []])]
    table = imported(tmp_path / "out", write(tmp_path / "x.jsonl", rows))
    assert table.column("id").to_pylist() == [0, 1, 2, 3, 4]
    if "a" in table.column_names:  # of objects that never have a field there is no column
        assert table.column("a").to_pylist() == [filled(row["a"], table.schema.field("a").type) for row in rows]


def test_a_number_that_json_does_not_have_stops_no_look_for_rounding(tmp_path: Path) -> None:
    assert rounded_by(tmp_path, ['{"x": Inf, "y": 12345678901234567891}', '{"y": 12345678901234567893}']) == {
        "y": "12345678901234567893"
    }


def test_a_late_column_is_found_and_columns_stand_in_the_order_of_their_first_row(tmp_path: Path) -> None:
    rows = [{"b": 1, "a": "x" * 100}] * 60_000 + [{"c": True, "a": "y"}]
    table = imported(tmp_path / "out", write(tmp_path / "x.jsonl", rows))
    assert types_of(table) == {"b": "int64", "a": "string", "c": "bool"}
    assert table.slice(59_999).to_pylist() == [{"b": 1, "a": "x" * 100, "c": None}, {"b": None, "a": "y", "c": True}]


@pytest.mark.parametrize("name", ["x.jsonl", "x.ndjson", "x.json", "X.JSONL"])
def test_endings_and_ends_of_lines_do_not_matter(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": 2}\n\n {"a": 3} ')
    assert imported(tmp_path / "out", tmp_path / name).column("a").to_pylist() == [1, 2, 3]


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_compressed_lines_are_read(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / "x.jsonl", [{"a": number} for number in range(50_000)])
    packed = tmp_path / f"x.jsonl.{ending}"
    with pa.CompressedOutputStream(str(packed), {"gz": "gzip", "zst": "zstd"}[ending]) as file:
        file.write(path.read_bytes())
    assert imported(tmp_path / "out", packed).column("a").to_pylist() == list(range(50_000))


def test_what_is_not_among_the_columns_may_be_of_any_type_or_number(tmp_path: Path) -> None:
    rows: Rows = [{"id": number, "by_key": {str(number): number}, "b": "x", "a": number} for number in range(3_000)]
    rows += [{"id": "seven", "by_key": [], "a": 0.5}]
    path = write(tmp_path / "x.jsonl", rows)
    with path.open("a") as file:
        file.write('{"id": "\\ud800", "a": null}\n{"id": 1e400, "id": 2}\n')
    rows += [{}, {}]
    table = imported(tmp_path / "out", path, columns=["a", "b"])
    assert types_of(table) == {"a": "double", "b": "string"}
    assert table.to_pylist() == [{"a": row.get("a"), "b": row.get("b")} for row in rows]


def test_what_is_kept_as_text_is_the_json_that_is_written(tmp_path: Path) -> None:
    lines = [
        '{"id": 1, "calls": {"n": 7, "x": 1.50, "none": null}, "other": {"a": 1}}',
        '{ "calls" : [ 1e400, 123456789012345678901234567890 ] , "id" : 2 }',
        '{"id": 3, "calls": "a text\\n", "other": {"b": null}}',
        '{"id": 4, "calls": null}\r',
        "{}",
        "",
        '{"id": 6, "calls": "null"}',
        '{"id": 7, "calls": {"\\ud800": "é", "a\\"}": "]"}}',
        '{"id": 8, "ca\\u006cls": true}',
        '{"calls": {}, "id": 9}',
    ]
    (tmp_path / "x.jsonl").write_text("\ufeff" + "\n".join(lines), encoding="utf-8", newline="")
    expected = [
        '{"n": 7, "x": 1.50, "none": null}', "[ 1e400, 123456789012345678901234567890 ]", "a text\n", None, None, "null",
        '{"\\ud800": "é", "a\\"}": "]"}', "true", "{}",
    ]  # fmt: skip
    for columns in (None, ["id", "calls"]):
        table = imported(tmp_path / f"{columns}", tmp_path / "x.jsonl", columns=columns, text=["calls"])
        assert table.column("calls").to_pylist() == expected
        assert table.column("id").to_pylist() == [1, 2, 3, 4, None, 6, 7, 8, 9]
    with pytest.raises(ImportRefused, match="--text: no file has a column 'call'. Did you mean 'calls'"):
        imported(tmp_path / "wrong", tmp_path / "x.jsonl", text=["calls", "call"])
    with pytest.raises(ImportRefused, match="--text names 'calls', which --columns leaves out"):
        imported(tmp_path / "wrong", tmp_path / "x.jsonl", columns=["id"], text=["calls"])


ANY_JSON = st.recursive(INTEGERS | TEXTS | st.none(), lambda values: st.lists(values) | MESSAGES, max_leaves=4)


@given(rows=st.lists(st.dictionaries(TEXTS, ANY_JSON, max_size=2), max_size=3))
def test_any_json_comes_back_from_its_text(tmp_path_factory: pytest.TempPathFactory, rows: Rows) -> None:
    folder = tmp_path_factory.mktemp("text")
    rows = [{"id": "", **{f"of {name}": value for name, value in row.items()}} for row in [{}, *rows]]
    names = {name for row in rows for name in row}
    table = imported(folder / "out", write(folder / "x.jsonl", rows), text=[*names])
    assert set(types_of(table).values()) == {"string"}

    def value_of(row: dict[str, Any], name: str, text: str | None) -> Any:
        return text if text is None or isinstance(row.get(name), str) else json.loads(text)

    for row, came in zip(rows, table.to_pylist(), strict=True):
        assert {name: value_of(row, name, text) for name, text in came.items()} == {name: row.get(name) for name in came}


BAD = {
    b'{"a": 1}\n\n{"a": oops}\n{"a": 2}\n': "line 3: invalid value",
    b'{"a": 1}\n{"a": 2': "line 2: missing a comma",
    b'{"a": 1}\n{"a": "x"}\n': "line 2: column 'a' is string here, and (number|int64) in .* before.*leave it out",
    b'{"a": [{"b": "x"}]}\n{"a": [{"b": [1]}, {"b": "x"}]}\n': r"line 2: column 'a\[\]\.b' is .*the column that it is in",
    b'{"a": [{"b": 1}]}\n{"a": [{"b": true}]}\n': "line 2: column 'a.*' is .*bool.* here, and .* before",
    b'{"a": 1}\n7\n': "line 2: it is not an object.*Each line must be one whole JSON object",
    b'{"a": 1}\n null\n': "line 2: it is not an object",
    b'{"a": 1}\n{"a": 1} {"a": 2}\n': "line 2: it is not exactly one object",
    b'{"a": 1}\n{"a": 1},\n{"a": 2}\n': "line 2: it is not exactly one object",
    b'{"a": 1}\n{\n"a": 1\n}\n': "line 2: missing a name",
    b'{"a": 1}\n{"a": 1, "a": 2}\n': "line 2: column 'a' is given twice.*Remove one",
    b'{"a": "x"}\n{"a": "\xff"}\n': "line 2: byte 8 is not UTF-8.*iconv",
    b'{"a": "x"}\n{"a": "\\ud800"}\n': "line 2: the surrogate pair",
    b'{"a": 1}\n{"a": %s1%s}\n' % (b"[" * 100, b"]" * 100): "line 2: objects and lists stand more than 100 deep.*as text",
    b'{"a": 1}\n' + b'{"a": ' * 60_000 + b"1" + b"}" * 60_000: "line 2: objects and lists stand more than 100 deep",
    b'{"a": 1}\n{"a": "' + b'[\\"' * 100_000: "line 2: missing a closing quotation mark",  # at once, not in hours
}


@pytest.mark.parametrize(("content", "message"), BAD.items())
@pytest.mark.parametrize(("columns", "text"), [(None, []), (["a"], []), (None, ["b"])], ids=str)
@pytest.mark.usefixtures("portion_bytes")
def test_a_wrong_line_is_named_with_its_number(
    tmp_path: Path, content: bytes, message: str, columns: list[str] | None, text: list[str]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": null}\n' * 40 + content)
    number = int(message.split(":")[0].removeprefix("line ")) + 40
    with pytest.raises(ImportRefused, match=f"{path}, line {number}: .*Nothing was written") as refused:
        imported(tmp_path / "out", path, columns=columns, text=text)
    if columns is None and not text:
        assert re.search(message.split(": ", 1)[1], str(refused.value))
    assert sorted(tmp_path.iterdir()) == [path]


def test_what_is_nested_too_deeply_to_be_read_from_parquet_is_refused(tmp_path: Path) -> None:
    for depth, is_held in ((49, True), (50, False)):
        path = write(tmp_path / "x.jsonl", [{"text": "x", "deep": json.loads("[" * depth + "1" + "]" * depth)}])
        if is_held:
            assert imported(tmp_path / f"{depth}", path).num_rows == 1
            continue
        with pytest.raises(ImportRefused, match="column 'deep': Parquet does not hold list.*Leave it out with --columns"):
            imported(tmp_path / f"{depth}", path)
        assert imported(tmp_path / f"{depth}", path, columns=["text"]).num_rows == 1
    path.write_bytes(b'{"deep": ' + b"[" * 60_000 + b"]" * 60_000 + b"}\n")
    with pytest.raises(ImportRefused, match="line 1: objects and lists stand more than 100 deep"):
        imported(tmp_path / "deep", path, columns=["deep"])


def test_brackets_in_text_or_side_by_side_are_not_nested(tmp_path: Path) -> None:
    rows = [{"text": '[{"' * 500, "lists": [[n] for n in range(500)]}] * 3
    assert imported(tmp_path / "out", write(tmp_path / "x.jsonl", rows)).to_pylist() == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b' [{"a": 1},\n{"a": 2}]', "is one JSON array.*jq -c '.\\[\\]'"),
        ("x.jsonl", '{"a": 1}\n'.encode("utf-16"), "is UTF-16.*iconv"),
        ("x.jsonl", '{"a": 1}\n'.encode("utf-16-be"), "is UTF-16.*iconv -f UTF-16BE -t"),
        ("x.jsonl", '{"a": 1}\n'.encode("utf-16-le"), "is UTF-16.*iconv -f UTF-16LE -t"),
        ("x.jsonl", '{"a": 1}\n'.encode("utf-32"), "is UTF-32.*iconv -f UTF-32 -t"),
        ("x.jsonl", '{"a": 1}\n'.encode("utf-32-be"), "is UTF-32.*iconv -f UTF-32BE -t"),
        ("x.jsonl", '{"a": 1}\n'.encode("utf-32-le"), "is UTF-32.*iconv -f UTF-32LE -t"),
        ("x.jsonl", gzip.compress(b'{"a": 1}\n', mtime=0), "x.jsonl is compressed.*Rename it to x.jsonl.gz"),
        ("x.jsonl", pa.compress(b'{"a": 1}\n', "zstd", asbytes=True), "Rename it to x.jsonl.zst"),
        ("x.jsonl", bz2.compress(b'{"a": 1}\n'), "x.jsonl is compressed by bzip2, which is not read.*Unpack it"),
        ("x.jsonl", lzma.compress(b'{"a": 1}\n'), "x.jsonl is compressed by xz"),
        ("x.json", b'\xef\xbb\xbf[{"a": 1}]', "is one JSON array"),
        ("x.jsonl", b'\xef\xbb\xbf\n{"a": oops}', "line 2: invalid value"),
        ("x.jsonl", b'{"x": 12345678901234567890}{"x": 1}\n\n', "line 1: it is not exactly one object"),
        ("x.jsonl", b"null", "line 1: it is not an object"),
        ("x.jsonl", b"\xef\xbb\xbf null", "line 1: it is not an object"),
        ("x.jsonl", b"", "there is no column to import"),
        ("x.jsonl", b"{}\n{}\n", "there is no column to import"),
        ("x.jsonl", b"".join(b'{"a": {"%d": 1}}\n' % n for n in range(2_000)), "line 1,001: .*1,001 columns.*most are in 'a'"),
        ("x.jsonl", b'{"a": "%s"}\n' % (b"x" * (17 << 20)), "line 1: the line is longer than 16 MiB.*Split the row"),
        ("x.jsonl.gz", b'{"a": 1}\n', "x.jsonl.gz cannot be read: .*not what its ending says"),
        ("x.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 90_000, mtime=0)[:-20], "x.jsonl.gz cannot be read: Truncated"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_no_json_lines_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ImportRefused, match=message):
        imported(tmp_path / "out", tmp_path / name)
    assert not (tmp_path / "out").exists()


def test_a_line_that_is_large_but_not_too_large_is_read(tmp_path: Path) -> None:
    texts = ["a", "x" * ((16 << 20) - 1000), *["b" * 1000] * 5000]
    table = imported(tmp_path / "out", write(tmp_path / "x.jsonl", [{"text": text} for text in texts]))
    assert table.column("text").to_pylist() == texts


def rounded_by(tmp_path: Path, lines: list[str], columns: list[str] | None = None) -> dict[str, str]:
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    done = Import(files=[tmp_path / "x.jsonl"], out_dir=tmp_path / "out", columns=columns, overwrite=True).run()
    assert all(path == tmp_path / "x.jsonl" for path, _, _ in done.rounded)
    return {name: str(number) for _, name, number in done.rounded}


@pytest.mark.parametrize(
    ("lines", "rounded"),
    [
        (['{"a": 1}', '{"a": 18446744073709551615}'], {"a": "18446744073709551615"}),
        (['{"a": 9007199254740993}', '{"a": 1}', '{"a": 0.5}'], {"a": "9007199254740993"}),
        (['{"a": 0.5}', '{"a": 9007199254740993}'], {"a": "9007199254740993"}),  # parsed as the bound itself
        (['{"a": 0.5}', '{"a": -9007199254740992}'], {}),
        (['{"a": {"b": [1, -9223372036854775809], "c": 3}}'], {"a.b[]": "-9223372036854775809"}),
        (['{"a": [{"b": 9223372036854775809}, {}]}', '{"a": null}', "{}"], {"a[].b": "9223372036854775809"}),
        (['{"a": 1' + "0" * 5000 + "}"], {"a": "1" + "0" * 5000}),
        (['{"a": 9007199254740993}', '{"a": 9223372036854775807}'], {}),  # int64
        (['{"a": 9007199254740992}', '{"a": 0.5}'], {}),
        (['{"a": 100000000000000000000}', '{"a": 1e300}', '{"a": 0.12345678901234567}'], {}),  # as JavaScript writes 1e20
        (['{"a": 1e300, "b": "18446744073709551615, 18446744073709551615"}'], {}),
    ],
)
@pytest.mark.usefixtures("portion_bytes")
def test_whole_numbers_that_float64_rounds_are_told_by_column(
    tmp_path: Path, lines: list[str], rounded: dict[str, str]
) -> None:
    assert rounded_by(tmp_path, [f'{{"id": 1, {line[1:]}'.replace(", }", "}") for line in lines]) == rounded


def test_what_is_not_imported_is_not_told_to_be_rounded(tmp_path: Path) -> None:
    lines = ['{"a": 18446744073709551615, "b": 1}']
    assert rounded_by(tmp_path, lines, ["b"]) == {}
    assert rounded_by(tmp_path, lines, ["a"]) == {"a": "18446744073709551615"}


@given(st.lists(st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
@pytest.mark.usefixtures("portion_bytes")
def test_no_digit_is_lost_without_a_word(tmp_path_factory: pytest.TempPathFactory, values: list[int | float]) -> None:
    folder = tmp_path_factory.mktemp("jsonl")
    told = rounded_by(folder, [json.dumps({"a": [value]}) for value in values])
    got = [row["a"][0] for row in read_back(folder / "out").to_pylist()]
    lost = {str(value) for value, now in zip(values, got, strict=True) if value != now}
    assert bool(told) == bool(lost)
    assert set(told.values()) <= lost
