import math
import re
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from penstock_server.recipes.filter import Filter, FilterError
from support.corpora import FILTER_SCHEMA


def one(type_: pa.DataType, *values: Any) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(list(values), type_)})


@pytest.mark.parametrize(
    ("rows", "condition", "kept"),
    [
        (one(pa.string_view(), "a", "b", None), "x like 'a%'", [True, False, False]),
        (one(pa.json_(), "a", "b", None), "x > 'a' or x is null", [False, True, True]),
        (one(pa.json_(), "{}", "[1]", None), "length(x) = 2 and x like '{%'", [True, False, False]),
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
        (one(pa.timestamp("ms"), 0, 1, None), "x = '1970-01-01 00:00:00.001'", [False, True, False]),
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
def test_filter_reads_columns_of_every_type(rows: pa.RecordBatch, condition: str, kept: list[bool]) -> None:
    assert Filter.parse(condition, rows.schema).keep(rows).tolist() == kept


def test_filter_reads_only_its_columns_of_a_slice() -> None:
    rows = pa.RecordBatch.from_pylist([{"n": number, "text": "x"} for number in range(10)], FILTER_SCHEMA)
    few = Filter.parse("text = 'x' and n % 2 = 1", FILTER_SCHEMA)
    assert few.columns == ("text", "n")
    assert few.keep(rows.slice(3, 4)).tolist() == [True, False, True, False]
    assert few.keep(rows.slice(0, 0)).tolist() == []


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (" -- nothing", "cannot be read"),
        ("n = 1 xor ok", "cannot be read: "),
        ("text = 'x", "cannot be read: "),
        ("n = 1; ok", "cannot have 'n = 1; ok'"),
        ("cast(n as text) = 'x'", "cannot have 'CAST(n AS TEXT)'. A filter may have columns"),
        ("ok and soundex(text) = 'x'", "cannot have 'SOUNDEX(text)'"),
        ("n in (select 1)", "cannot have 'N IN (SELECT 1)'"),
        ("length(text, 2) = 1", "cannot have 'LENGTH(text, 2)'"),
        ("regexp_like(text, 'x', 'i')", "cannot have"),
        ("regexp_like(text, '(x')", "missing ): (x."),
        ("text like 'x' escape 'y'", "ESCAPE"),
        ("meta.* is null", "not the name of a column"),
        ("ok is true", "something else than null"),
        ("n in ()", "nothing between its parentheses"),
        ("n in (1, n)", "more than literals"),
        ("n not in (1, null)", "Write: is null, or: is not null."),
        ("txet = 'x'", "no column 'txet'; there are: n, big, hash, score, text, a b, ok, meta, ids"),
        ('text = "en"', "Write texts in single quotes"),
        ("meta.lan = 'x'", "no field 'lan'; it has: lang, source"),
        ("text.lang = 'x'", "'text' is string, which has no fields"),
        ("text = 1", "'text = 1' compares a text with a number. Write texts in single quotes"),
        ("n = '1'", "compares a number with a text. Write texts in single quotes, and numbers without."),
        ("ok = 1", "compares a truth value with a number."),
        ("ids = 1", "compares a value of type list<"),
        ("n = null", "Write: is null"),
        ("n and ok", "'n AND ok' is a number and no condition"),
        ("text + 1 = 2", "calculates with a text"),
        ("score % 2 = 1", "remainder of a number that need not be whole"),
        ("hash + n = 1", "calculates with uint64 and int64"),
        ("-hash < 1", "fails"),
        ("lower(n) = 'x'", "takes a number for a text"),
        ("text like text", "needs a literal text"),
        ("text like 'x\\'", "has a \\ in its pattern"),
        ("n = 99999999999999999999", "does not fit 64 bits"),
        ("1 = 1", "reads no column"),
    ],
)  # fmt: skip
def test_filter_is_refused_with_its_wrong_part(condition: str, message: str) -> None:
    with pytest.raises(FilterError, match=f"(?i){re.escape(message)}"):
        Filter.parse(condition, FILTER_SCHEMA)


def test_columns_with_dots_are_named_in_quotes_and_ambiguous_ones_are_refused() -> None:
    dotted = pa.schema([("meta.lang", pa.string()), ("twice", pa.int64()), ("twice", pa.int64())])
    assert Filter.parse("\"meta.lang\" = 'x'", dotted).columns == ("meta.lang",)
    with pytest.raises(FilterError, match="2 columns are called 'twice'"):
        Filter.parse("twice = 1", dotted)


def test_times_are_compared_with_times_of_their_kind() -> None:
    schema = pa.schema({"here": pa.timestamp("us"), "there": pa.timestamp("us", "UTC"), "at": pa.time32("s")})
    with pytest.raises(FilterError, match="Cannot compare timestamp with timezone to timestamp without timezone"):
        Filter.parse("here < there", schema)
    for condition in ("here < 'soon'", "at = '00:00:03'"):
        with pytest.raises(FilterError, match=r"takes '.*' for a time.*, which it is not\."):
            Filter.parse(condition, schema)
    with pytest.raises(FilterError, match="With a zone, write '2024-01-01T00:00:00Z'"):
        Filter.parse("there >= '2024-01-01'", schema)
    Filter.parse("there >= '2024-01-01T00:00:00Z'", schema)


def test_calculation_fails_when_it_exceeds_64_bits() -> None:
    with pytest.raises(FilterError, match="does not fit 64 bits"):
        Filter.parse("big * 2 < 0", FILTER_SCHEMA).keep(pa.RecordBatch.from_pylist([{"big": 2**62}], FILTER_SCHEMA))


def test_null_test_works_on_extension_types() -> None:
    ids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16, None], pa.binary(16)))
    rows = pa.record_batch({"id": ids})
    assert Filter.parse("id is not null", rows.schema).keep(rows).tolist() == [True, False]


@pytest.mark.parametrize("condition", ["n > 1", "ok"])
def test_rows_of_another_schema_are_refused(condition: str) -> None:
    with pytest.raises(FilterError, match=f"the filter.*{condition}"):
        Filter.parse(condition, FILTER_SCHEMA).keep(pa.record_batch({"n": ["x"]}))


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
        ("length(x) > 1 and x like 'a%'", pa.string(), one(pa.null(), None), [False]),
        ("length(x) > 1 and x like 'a%'", pa.null(), one(pa.string(), "ab", "a"), [True, False]),
        ("x % 2 = 1", pa.null(), one(pa.int8(), 1, 2), [True, False]),
    ],
)
def test_rows_are_compared_by_the_types_of_their_shard(
    condition: str, first: pa.DataType, rows: pa.RecordBatch, kept: list[bool]
) -> None:
    found = Filter.parse(condition, pa.schema({"x": first}))
    found.check(rows.schema)
    assert found.keep(rows).tolist() == kept


def test_shard_of_other_types_is_refused() -> None:
    found = Filter.parse("text = 'x' and ok", FILTER_SCHEMA)
    found.check(pa.schema({"ok": pa.bool_(), "text": pa.string_view()}))
    with pytest.raises(FilterError, match="compares a number with a text"):
        found.check(pa.schema({"text": pa.int8(), "ok": pa.bool_()}))
