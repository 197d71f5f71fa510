"""CSV and TSV: what comes back, what is a number, and rows that are wrong."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from importing import imported, types_of
from penstock_server.importing import delimited
from penstock_server.importing import rows as rows_module
from penstock_server.importing.source import ImportRefused

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12) | st.sampled_from(
    [
        "NA",
        "null",
        "nan",
        "true",
        "2024-02-29",
        "007",
        "-0",
        "+1",
        " 1",
        "1e999",
        "0x10",
        "12345678901234567890",
        'a "b"',
        "a,b\n",
    ]
)
WHOLE = st.integers(-(10**18) + 1, 10**18 - 1)


def is_given_back(number: float) -> bool:
    """Whether the digits of a float64 say that it is one: close to what it does not hold, that needs a second look."""
    size = abs(number)
    return size == 0 or (size > 1e-290 and not 9e15 <= size < 1e16 and not (4.5e15 <= size < 2**52 and size % 1))


DECIMAL = st.floats(-1e290, 1e290, allow_subnormal=False).filter(is_given_back)


def write(path: Path, header: Sequence[str], rows: Sequence[Iterable[object]], delimiter: str = ",") -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return path


@given(
    rows=st.lists(st.tuples(TEXTS, TEXTS, WHOLE | st.just(""), DECIMAL | st.integers(-(10**15) + 1, 10**15 - 1)), min_size=1),
    tabs=st.booleans(),
)
@pytest.mark.parametrize("block_bytes", [256, 1 << 20])
def test_every_row_comes_back_with_empty_fields_null(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, int | str, float]], tabs: bool, block_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("csv")
    header = ["text", "words", "whole", "decimal"]
    path = write(folder / ("x.tsv" if tabs else "x.csv"), header, rows, "\t" if tabs else ",")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_BLOCK_BYTES", block_bytes)
        table = imported(folder / "out", path, text=["words"])
    expected = [tuple(None if value == "" else value for value in row) for row in rows]
    assert [tuple(row.values()) for row in table.to_pylist()] == expected
    types = types_of(table)
    assert (types["text"], types["words"]) == ("string", "string")
    assert types["whole"] == ("int64" if any(row[2] != "" for row in rows) else "string")
    assert types["decimal"] == ("int64" if all(isinstance(row[3], int) for row in rows) else "double")


@pytest.mark.parametrize(
    ("fields", "type_"),
    [
        (["1", "-20", "0"], "int64"),
        (["1", "", "3"], "int64"),
        (["1", "2.5"], "double"),
        (["1e3", "-0.5E-7"], "double"),
        (["3.14159265358979323846"], "double"),
        (["1234567890123456.5"], "double"),
        (["4499999999999999.5", "8999999999999999.0"], "double"),
        (["0e-299", "0.0", "-0.000001", "1.5E+005", "1e299", "9.9e-299", "123456789012345e99"], "double"),
        (["12345678901234567.5"], "string"),
        (["9007199254740993.0"], "string"),
        (["4503599627370497.5"], "string"),
        (["4503599627370497.0e5"], "string"),
        (["123456789012345e299"], "string"),
        (["0.00000000000000000000000000000000000001e-299"], "string"),
        ([f"0.{'0' * 330}1"], "string"),
        (["1", "x"], "string"),
        (["1", "007"], "string"),
        (["12345678901234567890"], "string"),
        (["123456789012345678", "0.5"], "string"),
        (["1.5", "1e999"], "string"),
        (["1", "NA"], "string"),
        (["true", "false"], "string"),
        (["2024-01-01"], "string"),
        (["", ""], "string"),
    ],
)
def test_a_column_is_of_numbers_only_if_nothing_is_lost_by_it(tmp_path: Path, fields: list[str], type_: str) -> None:
    table = imported(tmp_path / "out", write(tmp_path / "x.csv", ["id", "a"], [("x", field) for field in fields]))
    assert types_of(table)["a"] == type_
    read = [field if field is None or type_ == "string" else float(field) for field in (f or None for f in fields)]
    assert table.column("a").to_pylist() == read


FIELDS = st.lists(st.sampled_from(['"', ",", "\t", "\r", "\n", "\r\n", "x", "é", "\ufeff"]), min_size=1).map("".join)


@given(
    rows=st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=5), block_bytes=st.integers(1, 9), line_break=st.booleans()
)
def test_line_breaks_and_quotes_come_back_wherever_a_block_ends(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], block_bytes: int, line_break: bool
) -> None:
    folder = tmp_path_factory.mktemp("csv")
    path = write(folder / "x.csv", ["a", "b"], rows)
    path.write_bytes(path.read_bytes() if line_break else path.read_bytes().removesuffix(b"\r\n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_BLOCK_BYTES", block_bytes)
        table = imported(folder / "out", path, text=["a", "b"])
    assert [tuple(row.values()) for row in table.to_pylist()] == rows


@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz"])
def test_a_line_break_between_two_blocks_is_kept_within_quotes(tmp_path: Path, name: str) -> None:
    begin = b'text,n\r\n"'
    first = b"x" * (2**20 - 1 - len(begin))
    data = begin + first + b'\r\nSECOND LINE",1\r\n"b\r\nc",2\r\n'
    (tmp_path / name).write_bytes(gzip.compress(data, mtime=0) if name.endswith("gz") else data)
    table = imported(tmp_path / "out", tmp_path / name)
    assert table.column("text").to_pylist() == [f"{first.decode()}\r\nSECOND LINE", "b\r\nc"]


@pytest.mark.parametrize(
    ("end", "field"),
    [
        (b'"he said ""a"""', 'he said "a"'),
        (b'""""', '"'),
        (b'"a\nb"', "a\nb"),
        (b'5" or 6"', '5" or 6"'),
        (b'5 "', '5 "'),
        (b'x""', 'x""'),
        (b'""', None),
    ],
)
@pytest.mark.parametrize("line_break", [b"", b"\n", b"\r\n", b"\n\n"])
def test_a_file_may_end_in_quotes(tmp_path: Path, end: bytes, field: str | None, line_break: bytes) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b'n,a\n1,"Once"\n2,' + end + line_break)
    assert imported(tmp_path / "out", path).column("a").to_pylist() == ["Once", field]


@given(text=st.from_regex(re.compile(delimited._NUMBERS[pa.float64()], re.ASCII), fullmatch=True))
def test_a_number_changes_only_far_after_its_point(text: str) -> None:
    number, read = Fraction(text), Fraction(float(text))
    assert abs(read - number) <= abs(number) / 2**53
    if "e" not in text.lower():
        assert abs(read - number) <= Fraction(1, 4)
        assert read == number or number.denominator > 1


def test_a_number_column_that_turns_to_text_late_is_text_from_its_first_row(tmp_path: Path) -> None:
    rows = [(number, "x" * 90) for number in range(30_000)] + [("none", "y")]
    table = imported(tmp_path / "out", write(tmp_path / "x.csv", ["id", "text"], rows))
    assert table.column("id").to_pylist() == [str(number) for number, _ in rows]


def test_what_the_server_reads_as_text_is_text_whatever_it_looks_like(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", ["prompt", "response", "text", "chosen", "answer", "n", "completion"], [range(7)])
    table = imported(tmp_path / "out", path, text=["answer"])
    assert table.to_pylist() == [
        {"prompt": "0", "response": "1", "text": "2", "chosen": "3", "answer": "4", "n": 5, "completion": "6"}
    ]


def test_columns_are_picked_in_the_order_given(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", ["a", "b", "c"], [(1, 2, "x,y\nz")])
    assert list(imported(tmp_path / "out", path, columns=["c", "a"]).to_pylist()[0].items()) == [("c", "x,y\nz"), ("a", 1)]
    assert imported(tmp_path / "more", path, columns=["b"]).to_pylist() == [{"b": 2}]


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_compressed_files_byte_order_marks_and_blank_lines_do_not_matter(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"x.csv.{ending}"
    with pa.CompressedOutputStream(str(path), {"gz": "gzip", "zst": "zstd"}[ending]) as file:
        file.write(b"\xef\xbb\xbfa,b\r\n\r\n1,x\r\n\r\n" + b"2,y\r\n" * 200_000 + b"\r\n\r\n")
    table = imported(tmp_path / "out", path)
    assert table.column_names == ["a", "b"]
    assert table.column("a").to_pylist() == [1] + [2] * 200_000


def test_rows_larger_than_what_is_read_at_a_time_are_read_and_larger_ones_refused(tmp_path: Path) -> None:
    rows = [("a" * 100,)] * 20_000 + [("b" * 3_900_000,), ("c",)]
    table = imported(tmp_path / "out", write(tmp_path / "x.csv", ["text"], rows))
    assert table.column("text").to_pylist() == [text for (text,) in rows]
    path = write(tmp_path / "y.csv", ["text"], [*rows, ("d" * 9_000_000,), ("e",)])
    with pytest.raises(ImportRefused, match=r"y.csv, line 20,004: the row is longer than 4 MiB.*quote in it is never closed"):
        imported(tmp_path / "more", path)


@pytest.mark.parametrize("columns", [None, ["a"]])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1,x\n3,NA,9\n", "line {2}: the header has 2 fields and this row 3: '3,NA,9'.*Put quotes around a field"),
        (b"1,x\n3\n4,y\n", "line {2}: the header has 2 fields and this row 1: '3'"),
        (b'"x\ny",z\n\n"p\nq"\n', "line {4}: the header has 2 fields and this row 1"),
        (b"x" * 90 + b"\n", "line {1}: the header has 2 fields and this row 1: 'x{80}'"),
        (b"x" * 500 + b"\n", "line {1}: the header has 2 fields and this row 1: 'x{80}'"),
        (("é" * 90 + "\n").encode(), "line {1}: the header has 2 fields and this row 1: 'é"),
        (b'1,"x\n2,y\n3,z\n', "line {1}: a quote is opened and never closed.*'x.n2,y.n3,z.n'"),
        (b'1,"x\n2,y\n3,z', "line {1}: a quote is opened and never closed"),
        (b'1,"x,y', "line {1}: a quote is opened and never closed"),
        (b'1,"There was a ki', "line {1}: a quote is opened and never closed.*'There was a ki'"),
        (b'1,"There was, ""a""', "line {1}: a quote is opened and never closed"),
        (b'1,"a\nb"\n2,"There was ""a""\n', "line {3}: a quote is opened and never closed"),
        (b'1,"', "line {1}: a quote is opened and never closed"),
        (b"1,x\n2,y\xff\n", "line {2}: it is not UTF-8.*iconv"),
    ],
)
def test_a_wrong_row_is_named_with_its_line(tmp_path: Path, content: bytes, message: str, columns: list[str] | None) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"a,b\n" + b"5,five\n" * 200_000 + content)
    place, what = message.split(": ", 1)
    line = int(place.removeprefix("line {").removesuffix("}")) + 200_001
    with pytest.raises(ImportRefused, match=f"{path}, line {line:,}: {what}") as refused:
        imported(tmp_path / "out", path, columns=columns)
    assert "Nothing was written." in str(refused.value)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"", "there is no column to import"),
        ("x.csv", b"a,b\n", "there is not one row to import"),
        ("x.csv", b"a,a\n1,2\n", "header: 2 columns are called 'a'.*Rename all but one"),
        (
            "x.csv",
            b"a;b\n1;2\n",
            "header: it would be one column, 'a;b'.*--delimiter ';', or --delimiter ',' if it really is one",
        ),
        ("x.csv", b"a\tb\n1\t2\n", r"--delimiter '\\t', or --delimiter ','"),
        ("x.tsv", b"a,b\n1,2\n", r"--delimiter ',', or --delimiter '\\t'"),
        ("x.csv", b'"a,b\n1,2\n', "line 1: a quote is opened and never closed"),
        ("x.csv", b'\n\n"a\n,b\n1,2\n', "line 3: a quote is opened and never closed"),
        ("x.csv", b"\r\n\n\r", "there is no column to import"),
        ("x.csv", b"a,\xff\n1,2\n", "line 1: it is not UTF-8"),
        ("x.csv", "a,b\n1,2\n".encode("utf-16"), "is UTF-16.*iconv"),
        ("x.csv", "a,b\n1,2\n".encode("utf-16-le"), "is UTF-16.*iconv"),
        ("x.csv", gzip.compress(b"a,b\n1,2\n", mtime=0), "x.csv is compressed.*Rename it to x.csv.gz"),
        ("x.csv.gz", b"a,b\n1,2\n", "cannot be read: .*not what its ending says"),
        ("x.csv.gz", gzip.compress(b"a,b\n1,2\n" * 90_000, mtime=0)[:-20], "cannot be read: Truncated"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ImportRefused, match=message):
        imported(tmp_path / "out", tmp_path / name)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'"Hello," he said.\t1\n', 'line {1}: text follows the quote that closes a field: \'"Hello," he said.'),
        (b'"Hello," he said.\t1', "line {1}: text follows the quote that closes a field"),
        (b'x\t1\n"a\nb""c" \t2\n"a \\" b"\t3\n', "line {4}: text follows the quote that closes a field"),
        (b'x\t"1\ny\t"2"\n' + b"z\t3\n" * 2_000_000, "line {2}: text follows the quote that closes a field"),
    ],
)
def test_text_behind_a_closing_quote_is_refused_with_the_ways_out(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.tsv"
    path.write_bytes(b"text\tn\n" + b'"a"  \t"b"\n' * 200_000 + content)
    place, what = message.split(": ", 1)
    line = int(place.removeprefix("line {").removesuffix("}")) + 200_001
    with pytest.raises(ImportRefused, match=f"{path}, line {line:,}: {what}.*--quoting none.*--quoting backslash"):
        imported(tmp_path / "out", path)


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (b'"A\t1\nB"\t2\nC\t3', [('"A', 1), ('B"', 2), ("C", 3)]),
        (b'"Hello," he said.\t1\n"\t2\n""\t3\r\n\\"\t4\n', [('"Hello," he said.', 1), ('"', 2), ('""', 3), ('\\"', 4)]),
    ],
)
def test_without_quoting_a_quote_is_a_character(tmp_path: Path, content: bytes, rows: list[tuple[str, int]]) -> None:
    (tmp_path / "x.tsv").write_bytes(b"text\tn\n" + content)
    table = imported(tmp_path / "out", tmp_path / "x.tsv", quoting="none")
    assert [tuple(row.values()) for row in table.to_pylist()] == rows


@given(
    rows=st.lists(st.tuples(st.lists(st.sampled_from([*'",\t\r\n\\x'])).map("".join), st.just("y")), min_size=1),
    style=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONE]),
    block_bytes=st.integers(1, 9),
)
def test_behind_backslashes_all_comes_back_wherever_a_block_ends(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], style: int, block_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("csv")
    if style == csv.QUOTE_NONE:  # a line break behind a backslash is kept, a CRLF is not one there
        rows = [(text.replace("\r", ""), other) for text, other in rows]
    with (folder / "x.csv").open("w", newline="") as file:
        writer = csv.writer(file, doublequote=False, escapechar="\\", quoting=style)  # type: ignore[arg-type]
        writer.writerows([("a", "b"), *rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_BLOCK_BYTES", block_bytes)
        table = imported(folder / "out", folder / "x.csv", text=["a"], quoting="backslash")
    assert [tuple(row.values()) for row in table.to_pylist()] == [(text or None, other) for text, other in rows]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'"C:\\new",1\n', r"line 2: a backslash stands before something else.*'\"C:..new\",1"),
        (b'"x",1\nC:\\new,1\n', r"line 3: a backslash stands before something else"),
        (b"x,\\N\n", r"line 2: a backslash stands before something else"),
        (b'"a\\" b" c,1\n', "line 2: text follows the quote that closes a field"),
        (b'1,"a\\"\n', "line 2: a quote is opened and never closed"),
        (b"1,a\n2,b\\", "line 3: the file ends in a backslash"),
    ],
)
def test_a_backslash_that_marks_nothing_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.csv").write_bytes(b"text,n\n" + content)
    with pytest.raises(ImportRefused, match=message):
        imported(tmp_path / "out", tmp_path / "x.csv", quoting="backslash")


def test_a_delimiter_that_is_told_is_believed(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", ["a", "b"], [[1, "x;y"], [2, "z"]], delimiter=";")
    assert imported(tmp_path / "two", path, delimiter=";").to_pydict() == {"a": [1, 2], "b": ["x;y", "z"]}
    assert imported(tmp_path / "one", path, delimiter=",").to_pydict() == {"a;b": ['1;"x;y"', "2;z"]}


def test_a_blank_may_be_the_delimiter(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b'"a" b c\n"x y" "" "z"\n"w"  "v"\n')
    rows = imported(tmp_path / "out", path, delimiter=" ").to_pylist()
    assert [tuple(row.values()) for row in rows] == [("x y", None, "z"), ("w", None, "v")]


def test_of_several_columns_the_first_may_have_another_delimiter_in_its_name(tmp_path: Path) -> None:
    assert imported(tmp_path / "out", write(tmp_path / "x.csv", ["a;b", "c"], [[1, 2]])).to_pydict() == {"a;b": [1], "c": [2]}
