import math
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock_server.recipes.filter_sql import FilterError
from penstock_server.recipes.filters import parse_filter

SCHEMA = pa.schema(
    {
        "n": pa.int32(),
        "big": pa.int64(),
        "hash": pa.uint64(),
        "score": pa.float32(),
        "text": pa.string(),
        "a b": pa.large_string(),
        "ok": pa.bool_(),
        "meta": pa.struct({"lang": pa.string(), "source": pa.struct({"rank": pa.int8()})}),
        "ids": pa.list_(pa.int64()),
    }
)


def write_groups(path: Path) -> Path:
    """Three row groups of two rows each."""
    table = pa.table(
        {
            "n": pa.array([1, 2, 3, 4, 5, 6], pa.int8()),
            "hash": pa.array([1, 2, 3, 4, 2**64 - 2, 2**64 - 1], pa.uint64()),
            "score": pa.array([0.25, math.nan, 0.5, 0.5, 1.0, 2.0], pa.float32()),
            "text": ["a", "b", "c", "c", "e", None],
            "ok": [True, True, False, False, None, False],
            "day": pa.array(range(6), pa.date32()),
            "meta": [{"lang": "de"}, {"lang": "de"}, {"lang": "en"}, {"lang": "fr"}, {"lang": None}, None],
        }
    )
    pq.write_table(table, path, row_group_size=2, compression="none")
    return path


@pytest.mark.parametrize(
    ("condition", "groups"),
    [
        ("n > 4", [2]),
        ("4 < n", [2]),
        ("n > 1e1", []),
        ("not n > 4", [0, 1]),
        ("n between 3 and 4", [1]),
        ("n not between 2 and 5", [0, 2]),
        ("n in (1, 2)", [0]),
        ("n < 2 or n = 6", [0, 2]),
        ("not (n < 5 and score < 9)", [2]),
        ("not (n < 5 or text = 'x')", [2]),
        ("hash > 9223372036854775808", [2]),
        ("score > 0.5", [2]),
        ("not score <= 0.5", [2]),
        ("score <> 0.5", [0, 2]),
        ("text = 'e'", [2]),
        ("text <> 'c'", [0, 2]),
        ("text is null", [2]),
        ("n is null", []),
        ("ok", [0]),
        ("not ok", [1, 2]),
        ("day >= '1970-01-05'", [2]),
        ("meta.lang = 'de'", [0]),
        ("meta.lang is not null", [0, 1]),
        ("n > 4 and length(text) = 1", [2]),
        ("n > 4 or length(text) = 1", [0, 1, 2]),
    ],
)
def test_row_groups_are_ruled_out_by_their_statistics(tmp_path: Path, condition: str, groups: list[int]) -> None:
    path = write_groups(tmp_path / "rows.parquet")
    assert parse_filter(condition, pq.read_schema(path)).groups_that_may_match(path, pa.OSFile(str(path))) == groups


def test_a_row_group_that_is_ruled_out_is_not_read(tmp_path: Path) -> None:
    path = write_groups(tmp_path / "rows.parquet")
    start = pq.read_metadata(path).row_group(1).column(0).dictionary_page_offset
    content = bytearray(path.read_bytes())
    content[4:start] = bytes(start - 4)
    path.write_bytes(content)
    high = parse_filter("n >= 4", pq.read_schema(path))
    groups = high.groups_that_may_match(path, pa.OSFile(str(path)))
    file = pq.ParquetFile(path)
    [rows] = file.read_row_groups(groups, columns=["n"]).combine_chunks().to_batches()
    assert rows.column("n").filter(pa.array(high.keep(rows))).to_pylist() == [4, 5, 6]
    with pytest.raises(OSError, match="(?i)page"):
        file.read_row_group(0)


def one(type_: pa.DataType, *values: Any) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(list(values), type_)})


@pytest.mark.parametrize(
    ("rows", "condition", "kept"),
    [
        (one(pa.string_view(), "a", "b", None), "x like 'a%'", [True, False, False]),
        (one(pa.json_(), "a", "b", None), "x > 'a' or x is null", [False, True, True]),
        (one(pa.json_(), "{}", "[1]", None), "length(x) = 2 and x like '{%'", [True, False, False]),
        (one(pa.string(), "C:\\a", "C:\\\\a", "C:a"), r"x like 'C:\\a%' or x like '\C:a'", [True, False, True]),
        (one(pa.string(), "a\\b\n", "a\\b", "a\n"), r"x like '%\\b%' and x not like '%\\_'", [True, False, False]),
        (one(pa.string(), "Über", "b", None), "x ilike 'ÜB%'", [True, False, False]),
        (one(pa.string(), "Über", "b", None), "x not ilike 'ÜB%'", [False, True, False]),
        (one(pa.large_string(), "http://a/1", "a", None), r"regexp_like(x, '^https?://[a-z.]+/\d$')", [True, False, False]),
        (one(pa.string(), "a\nb", "B", None), "not regexp_like(x, '(?i)^b')", [True, False, False]),
        (one(pa.dictionary(pa.int8(), pa.string()), "a", "b", None), "upper(x) = 'A'", [True, False, False]),
        (one(pa.dictionary(pa.int8(), pa.int16()), 1, 2, None), "x > 1", [False, True, False]),
        (one(pa.string(), "über", "a\nb", "\N{SNOWMAN}"), "length(x) = 4 or x like 'a_b' or x like '_'", [True, True, True]),
        (one(pa.int64(), 1, 2, 3), "x + x % 2 = 2", [True, True, False]),
        (one(pa.int64(), 1, 2, 3), "x between x + x % 2 and 3", [False, True, False]),
        (one(pa.string(), "it's", "IT'S", 'it"s'), "x = 'it''s'", [True, False, False]),
        (one(pa.float16(), 1, 2, None), "x * 2 = 4", [False, True, False]),
        (one(pa.decimal128(9, 2), 1, 2, None), "x > 1.5", [False, True, False]),
        (one(pa.decimal128(9, 2), *map(Decimal, ("0.95", "0.94", "0.96"))), "x = 0.95 and x <= 0.95", [True, False, False]),
        (one(pa.decimal256(38, 18), *map(Decimal, ("0.1", "-0.1", "3"))), "x in (0.1) or x < -0.05", [True, True, False]),
        (one(pa.decimal64(18, -3), 4_000, 5_000, None), "x > 4000.5", [False, True, False]),
        (one(pa.int64(), 1, 0, None), "x = 0000000000000000000000001", [True, False, False]),
        (one(pa.bool_(), True, False, None), "x = false is null", [False, False, True]),
        (one(pa.bool_(), True, False, None), "x <> true is not null", [True, True, False]),
        (one(pa.decimal128(18, 0), 2**53, 2**53 + 1, None), f"x = {2**53 + 1} or x % 2 = 1", [False, True, False]),
        (one(pa.decimal32(9, 0), 1, 2, None), "x >= 2", [False, True, False]),
        (one(pa.decimal64(18, 0), 1, 2, None), "x >= 2", [False, True, False]),
        (one(pa.decimal256(18, 0), 1, 2, None), "x >= 2", [False, True, False]),
        (one(pa.float32(), math.nan, 1, None), "x is null", [True, False, True]),
        (one(pa.float64(), -0.0, 0.0, 0.5), "x in (0)", [True, True, False]),
        (one(pa.float64(), math.nan, 1, None), "not x > 5", [False, True, False]),
        (one(pa.float64(), 2.0**53, 2.0**53 + 2, None), "x <= 9007199254740993", [True, False, False]),
        (one(pa.float32(), 2.0**53, 2.0**64, None), "x in (9007199254740993, 18446744073709551615)", [True, True, False]),
        (one(pa.float64(), 1.0, -(2.0**63), None), "x / 9223372036854775807 = -1", [False, True, False]),
        (one(pa.uint64(), 2**64 - 1, 7, None), "x % 10 = 5", [True, False, False]),
        (one(pa.uint64(), 2**64 - 1, 7, None), "x > -1 and x in (-1, 18446744073709551615)", [True, False, False]),
        (one(pa.int64(), -(2**63), 7, None), "x % -1 = 0 and x = -9223372036854775808", [True, False, False]),
        (one(pa.int64(), 2**62 + 1, 1, 0), "x > 0.5", [True, True, False]),
        (one(pa.int8(), 100, -100, 0), "x * x > 9999", [True, True, False]),
        (one(pa.int64(), 7, 0, -7), "7 / x = 1 or x / 2 = -3.5", [True, False, True]),
        (one(pa.int64(), 0, 4_999, 5_000), f"x in ({', '.join(map(str, range(5_000)))})", [True, True, False]),
        (one(pa.list_(pa.int64(), 2), [1, 2], None, [3, 4]), "length(x) = 2", [True, False, True]),
        (one(pa.list_(pa.string()), ["a"], [], None), "x is not null and length(x) < 1", [False, True, False]),
        (one(pa.timestamp("us"), 0, 86_400_000_000, None), "x > '1970-01-01'", [False, True, False]),
        (one(pa.timestamp("ms", "UTC"), 0, 1, None), "x = '1970-01-01T00:00:00Z'", [True, False, False]),
        (one(pa.timestamp("ns"), 1, 2, None), "x in ('1970-01-01 00:00:00.000000002')", [False, True, False]),
        (one(pa.date32(), 0, 1, None), "x in ('1970-01-02')", [False, True, False]),
        (one(pa.date32(), 0, 1, None), "x = '1970-01-02 00:00:00'", [False, True, False]),
        (one(pa.timestamp("ms"), 0, 1, None), "x = '1970-01-01 00:00:00.001000'", [False, True, False]),
        (one(pa.bool_(), True, False, None), "x in (true)", [True, False, False]),
        (one(pa.large_string(), "a", "b", None), "x in ('a') or x not in ('a', 'c')", [True, True, False]),
        (one(pa.null(), None, None, None), "x = 1 or x is null", [True, True, True]),
        (one(pa.null(), None), "length(x) > 0 or lower(x) = 'a' or x like 'a%' or starts_with(x, 'a')", [False]),
        (one(pa.null(), None), "regexp_like(x, 'a') or x % 2 = 1 or -x < 1 or x / 2.5 > 1 or x + 1 > 2", [False]),
        (one(pa.int64(), 7, 8, None), f"{' or '.join(['x = 1'] * 5_000)} or x = 8", [False, True, False]),
        (one(pa.int64(), 7, 8, None), f"{' and '.join(['x > 1'] * 4_999)} and x = 8", [False, True, False]),
        (one(pa.bool_(), True, False, None), "x = false or x", [True, True, False]),
    ],
)  # fmt: skip
def test_columns_of_every_kind(rows: pa.RecordBatch, condition: str, kept: list[bool]) -> None:
    assert parse_filter(condition, rows.schema).keep(rows).tolist() == kept


def test_a_slice_of_rows_with_more_columns_than_are_read() -> None:
    rows = pa.RecordBatch.from_pylist([{"n": number, "text": "x"} for number in range(10)], SCHEMA)
    few = parse_filter("text = 'x' and n % 2 = 1", SCHEMA)
    assert few.columns == ("text", "n")
    assert few.keep(rows.slice(3, 4)).tolist() == [True, False, True, False]
    assert few.keep(rows.slice(0, 0)).tolist() == []


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("", "the filter is empty"),
        (" -- nothing", "cannot be read"),
        ("n = ", "cannot be read at '='"),
        ("n = 1 xor ok", "cannot be read at 'xor', after 'n = 1 '"),
        ("text = 'x", "a quote or a comment in it is not closed"),
        ("select n", "cannot be read"),
        ("n = 1; ok", "'n = 1; ok' is nothing that a filter can have"),
        ("cast(n as text) = 'x'", "'CAST(n AS TEXT)' is nothing that a filter can have. There are columns"),
        ("ok and soundex(text) = 'x'", "'SOUNDEX(text)' is nothing"),
        ("n in (select 1)", "'n IN (SELECT 1)' is nothing"),
        ("length(text, 2) = 1", "'LENGTH(text, 2)' is nothing"),
        ("regexp_like(text, 'x', 'i')", "REGEXP_LIKE(text, 'x', 'i')\" is nothing"),
        ("regexp_like(text, '(x')", "has no regular expression in RE2's syntax: Invalid regular expression: missing ): (x."),
        ("regexp_like(n, 'x')", "looks for a text in a number"),
        ("text like 'x' escape 'y'", "ESCAPE"),
        ("case when ok then true end", "CASE"),
        ("n = ?", "is nothing"),
        ("meta.* is null", "is not the name of a column"),
        ("ok is true", "asks for something else than null"),
        ("n in ()", "nothing between its parentheses"),
        ("n in (1, n)", "more than literals"),
        ("n not in (1, null)", "compares with null, and nothing equals it. Write: is null, or: is not null."),
        ("numb = 1", "a column 'numb'. There is none; there are: n, big, "),
        ("txet = 'x'", "Did you mean 'text'?"),
        ('text = "en"', "A text stands in single quotes: 'en'"),
        ("meta.lan = 'x'", "a field 'lan' of meta. There is none; there are: lang, source. Did you mean 'lang'?"),
        ("text.lang = 'x'", "text is of type string and has no fields"),
        ("text = 1", "'text = 1' compares a text with a number. A text stands in single quotes: '1'."),
        ("n = '1'", "compares a number with a text. A number stands without quotes."),
        ("ok = 1", "compares a truth value with a number. Write true or false."),
        ("ids = 1", "compares a value of type list<"),
        ("n = null", "Write: is null"),
        ("n", "'n' is a number and no condition"),
        ("n and ok", "'n AND ok' is a number"),
        ("text + 1 = 2", "calculates with a text"),
        ("score % 2 = 1", "remainder of a number that need not be whole"),
        ("hash + n = 1", "calculates with uint64 and int64"),
        ("-hash < 1", "a minus before a number that is never below zero"),
        ("-text = 'x'", "a minus before a text"),
        ("lower(n) = 'x'", "changes the case of a number"),
        ("length(n) = 1", "measures a number"),
        ("n like 'x'", "looks for a text in a number"),
        ("text like text", "needs a literal text"),
        ("text like 'x\\'", "has a pattern that ends with"),
        ("n = 99999999999999999999", "does not fit 64 bits"),
        (f"n = {'9' * 5_000}", "does not fit 64 bits"),
        ("1 = 1", "reads no column"),
        (" + ".join(["n"] * 5_000) + " = 1", "nested too deeply"),
        ("1 = 1 or text or ok", "is a text and no condition"),
        ("(" * 5_000 + "ok" + ")" * 5_000, "nested too deeply"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_filter_is_refused_with_the_part_and_the_way_out(condition: str, message: str) -> None:
    with pytest.raises(FilterError, match=re.escape(message)):
        parse_filter(condition, SCHEMA)


def test_names_with_dots_and_names_that_are_there_twice() -> None:
    dotted = pa.schema([("meta.lang", pa.string()), ("twice", pa.int64()), ("twice", pa.int64())])
    assert parse_filter("\"meta.lang\" = 'x'", dotted).columns == ("meta.lang",)
    with pytest.raises(FilterError, match=r'A name with a dot stands in double quotes: "meta.lang"\.'):
        parse_filter("meta.lang = 'x'", dotted)
    with pytest.raises(FilterError, match="There are two of them"):
        parse_filter("twice = 1", dotted)


def test_times_are_compared_with_times_of_their_kind_alone() -> None:
    schema = pa.schema({"here": pa.timestamp("us"), "there": pa.timestamp("us", "UTC")})
    with pytest.raises(FilterError, match="Cannot compare timestamp with timezone to timestamp without timezone"):
        parse_filter("here < there", schema)
    with pytest.raises(FilterError, match=re.escape("takes 'soon' for a timestamp[us], which it is not")):
        parse_filter("here < 'soon'", schema)
    for type_, text in ((pa.timestamp("ns"), "9999-12-31"), (pa.date32(), "2024-01-01 01:00:00")):
        with pytest.raises(FilterError, match=re.escape(f"compares '{text}' with a {type_}, which can be no such time")):
            parse_filter(f"here < '{text}'", pa.schema({"here": type_}))
    with pytest.raises(FilterError, match=re.escape("compares a time32[s] with a text, and pyarrow reads no text as one")):
        parse_filter("at = '00:00:03'", pa.schema({"at": pa.time32("s")}))


@pytest.mark.parametrize("zone", ["UTC", "+02:00"])
@pytest.mark.parametrize(
    ("said", "remedy"), [("2024-01-01", "2024-01-01T00:00:00Z"), ("2024-01-01 10:00:00.5", "2024-01-01 10:00:00.5Z")]
)
def test_a_time_without_the_zone_that_its_column_has_is_refused_with_one_that_works(zone: str, said: str, remedy: str) -> None:
    schema = pa.schema({"there": pa.timestamp("us", zone)})
    told = f"{pa.timestamp('us', zone)}, which it is not: its zone is missing. A time in UTC is written as '{remedy}'."
    with pytest.raises(FilterError, match=re.escape(told)):
        parse_filter(f"there >= '{said}'", schema)
    parse_filter(f"there >= '{remedy}'", schema)
    with pytest.raises(FilterError, match=r"which it is not\.$"):
        parse_filter("there >= 'soon'", schema)


def test_a_calculation_past_64_bits_is_an_error_and_not_another_number() -> None:
    with pytest.raises(FilterError, match="does not fit 64 bits"):
        parse_filter("big * 2 < 0", SCHEMA).keep(pa.RecordBatch.from_pylist([{"big": 2**62}], SCHEMA))


def test_a_row_group_with_one_uuid_may_match_a_filter_that_asks_for_null(tmp_path: Path) -> None:
    ids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16, None], pa.binary(16)))
    pq.write_table(table := pa.table({"id": ids}), path := tmp_path / "uuids.parquet", row_group_size=1)
    found = parse_filter("id is not null", table.schema)
    assert found.keep(table.to_batches()[0]).tolist() == [True, False]
    assert 0 in found.groups_that_may_match(path, pa.OSFile(str(path)))


def test_rows_and_shards_of_another_schema_are_refused(tmp_path: Path) -> None:
    other = pa.table({"n": ["x"]})
    pq.write_table(other, path := tmp_path / "other.parquet")
    for condition in ("n > 1", "ok"):
        with pytest.raises(FilterError, match=f"the filter '{condition}' fails"):
            parse_filter(condition, SCHEMA).keep(other.to_batches()[0])
        with pytest.raises(FilterError, match="other.parquet"):
            parse_filter(condition, SCHEMA).groups_that_may_match(path, pa.OSFile(str(path)))


@pytest.mark.parametrize(
    ("condition", "first", "rows", "kept"),
    [
        ("x > 2", pa.int64(), one(pa.float64(), 3.0, math.nan, None), [True, False, False]),
        ("x > 2", pa.int64(), one(pa.float64(), 2.5, 2.0, None), [True, False, False]),
        ("not x > 2", pa.int64(), one(pa.float64(), 3.0, math.nan, 1.5), [False, False, True]),
        ("x = 3 or x is null", pa.float64(), one(pa.int8(), 3, 2, None), [True, False, True]),
        ("x > 2", pa.int64(), one(pa.uint64(), 2**64 - 1, 1, None), [True, False, False]),
        ("x in (2, 3)", pa.int64(), one(pa.decimal128(9, 2), 3, 1, None), [True, False, False]),
        ("x = 'b'", pa.string(), one(pa.string_view(), "b", "a", None), [True, False, False]),
        ("x = 'b'", pa.string_view(), one(pa.dictionary(pa.int8(), pa.large_string()), "b", "a", None), [True, False, False]),
        ("x > 2 or x is null", pa.int64(), one(pa.null(), None), [True]),
        ("x % 2 = 1", pa.int64(), one(pa.float64(), 3.0, 2.0, None), [True, False, False]),
        ("length(x) > 1 and x like 'a%'", pa.string(), one(pa.null(), None), [False]),
        ("length(x) > 1 and x like 'a%'", pa.null(), one(pa.string(), "ab", "a"), [True, False]),
        ("x % 2 = 1", pa.null(), one(pa.int8(), 1, 2), [True, False]),
        ("x >= '1970-01-02T10:00:00'", pa.timestamp("us"), one(pa.date32(), 1, 2, None), [False, True, False]),
        ("x > '1970-01-01T00:00:00.000001'", pa.timestamp("us"), one(pa.timestamp("ms"), 0, 1, None), [False, True, False]),
    ],
)
def test_rows_of_other_types_than_in_the_first_shard_are_kept_by_their_own(
    tmp_path: Path, condition: str, first: pa.DataType, rows: pa.RecordBatch, kept: list[bool]
) -> None:
    found = parse_filter(condition, pa.schema({"x": first}))
    found.check(rows.schema)
    assert found.keep(rows).tolist() == kept
    pq.write_table(pa.table(rows), path := tmp_path / "rows.parquet", row_group_size=1)
    groups = found.groups_that_may_match(path, pa.OSFile(str(path)))
    assert set(np.flatnonzero(kept).tolist()) <= set(groups)


def test_row_groups_are_ruled_out_by_statistics_of_another_type_than_in_the_first_shard(tmp_path: Path) -> None:
    found = parse_filter("x > 2", pa.schema({"x": pa.int64()}))
    for type_, values in ((pa.float64(), [1.5, 2.5, math.nan]), (pa.uint64(), [1, 2**64 - 1, None])):
        pq.write_table(pa.table(one(type_, *values)), path := tmp_path / "rows.parquet", row_group_size=1)
        groups = found.groups_that_may_match(path, pa.OSFile(str(path)))
        assert 0 not in groups
        assert 1 in groups


def test_a_schema_that_the_filter_cannot_be_used_on_is_refused_with_the_types() -> None:
    found = parse_filter("text = 'x' and ok", SCHEMA)
    found.check(pa.schema({"ok": pa.bool_(), "text": pa.string_view()}))
    told = "the filter \"text = 'x' and ok\" fails: .*; text is int8 here and string in the first shard\\."
    with pytest.raises(FilterError, match=told):
        found.check(pa.schema({"text": pa.int8(), "ok": pa.bool_()}))


@pytest.mark.parametrize(
    ("condition", "first", "type_"),
    [
        ("x > 1", pa.null(), pa.string()),
        ("x in ('9999-12-31')", pa.timestamp("us"), pa.timestamp("ns")),
        ("x < '9999-12-31'", pa.date32(), pa.timestamp("ns")),
    ],
)
def test_a_shard_on_which_the_filter_means_nothing_is_refused_and_not_cast(
    condition: str, first: pa.DataType, type_: pa.DataType
) -> None:
    with pytest.raises(FilterError, match=re.escape(f"; x is {type_} here and {first} in the first shard.")):
        parse_filter(condition, pa.schema({"x": first})).check(pa.schema({"x": type_}))


def test_filters_of_one_text_are_equal() -> None:
    assert parse_filter("n > 1", SCHEMA) == parse_filter("n > 1", SCHEMA) != parse_filter("n > 2", SCHEMA)
