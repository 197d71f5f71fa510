import functools
import math
import operator
import re
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import pyarrow as pa
from hypothesis import given, reject
from hypothesis import strategies as st

from penstock_server.recipes.filter import Filter, FilterError
from support.corpora import FILTER_SCHEMA

Row = dict[str, Any]

small = st.integers(-4, 4)
words = st.text("aBc%_\\", max_size=3)
rows_strategy = st.lists(
    st.fixed_dictionaries(
        {
            "n": st.none() | small,
            "big": st.none() | small | st.sampled_from([2**53 + 1, -(2**53) - 1]),
            "hash": st.none() | st.integers(0, 4),
            "score": st.none() | st.sampled_from([-1.5, -0.0, 0.0, 0.5, 2.0, math.nan, math.inf]),
            "text": st.none() | words,
            "a b": st.none() | words,
            "ok": st.none() | st.booleans(),
            "meta": st.none()
            | st.fixed_dictionaries(
                {"lang": st.none() | words, "source": st.none() | st.fixed_dictionaries({"rank": st.none() | small})}
            ),
            "ids": st.none() | st.lists(small, max_size=3),
        }
    ),
    max_size=10,
)


class Part(NamedTuple):
    """A part of a condition in the filter's words and in SQLite's, and what Python says that it is."""

    text: str
    sqlite: str
    of: Callable[[Row], Any]


def known(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def strict(function: Callable[..., Any]) -> Callable[..., Any]:
    """Null if an argument is."""
    return lambda *given: None if any(value is None for value in given) else known(function(*given))


def leaf(text: str, sqlite: str, of: Callable[[Row], Any]) -> Part:
    return Part(text, sqlite, lambda row: known(of(row)))


def apply(form: str, sqlite: str, function: Callable[..., Any], *parts: Part) -> Part:
    def of(row: Row) -> Any:
        return function(*(part.of(row) for part in parts))

    return Part(form.format(*(part.text for part in parts)), sqlite.format(*(part.sqlite for part in parts)), of)


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def literals(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Part]:
    def part(value: Any) -> Part:
        said = "null" if value is None else quoted(value) if isinstance(value, str) else str(value).lower()
        return Part(said, said, lambda _: value)

    return values.map(part)


def remainder(a: int, b: int) -> int | None:
    return None if b == 0 else int(math.fmod(a, b))


def quotient(a: float, b: float) -> float | None:
    return float(a) / float(b) if b else None


def in_lang(row: Row) -> Any:
    return row["meta"] and row["meta"]["lang"]


def in_rank(row: Row) -> Any:
    return row["meta"] and row["meta"]["source"] and row["meta"]["source"]["rank"]


n = leaf("n", "n", lambda row: row["n"])
big = leaf("big", "big", lambda row: row["big"])
hash_ = leaf("hash", "hash", lambda row: row["hash"])
score = leaf("score", "score", lambda row: row["score"])
text = leaf("text", "text", lambda row: row["text"])
ok = leaf("ok", "ok", lambda row: row["ok"])
lang = leaf("meta.lang", "lang", in_lang)
whole = st.recursive(
    st.sampled_from(
        [
            n,
            leaf("meta.source.rank", "rank", in_rank),
            leaf("length(ids)", "num_ids", lambda row: None if row["ids"] is None else len(row["ids"])),
            leaf("length(text)", "length(text)", lambda row: None if row["text"] is None else len(row["text"])),
        ]
    )
    | literals(small),
    lambda part: st.one_of(
        st.builds(lambda a, b: apply("({} + {})", "({} + {})", strict(lambda x, y: x + y), a, b), part, part),
        st.builds(lambda a, b: apply("({} - {})", "({} - {})", strict(lambda x, y: x - y), a, b), part, part),
        st.builds(lambda a, b: apply("({} * {})", "({} * {})", strict(lambda x, y: x * y), a, b), part, part),
        st.builds(lambda a, b: apply("({} % {})", "({} % {})", strict(remainder), a, b), part, part),
        st.builds(lambda a: apply("(- {})", "(- {})", strict(lambda x: -x), a), part),
    ),
    max_leaves=4,
)
numbers = st.recursive(
    whole | literals(st.sampled_from([-1.5, 0.5, 2.0, 1e6])) | st.sampled_from([score, hash_]),
    lambda number: st.builds(
        lambda a, b: apply("({} / {})", "({} / cast({} as real))", strict(quotient), a, b), number, number
    ),
    max_leaves=3,
)
# Past 2^53, whole numbers that are compared with whole numbers are still exact.
exact = st.sampled_from([big, hash_, n]) | literals(st.sampled_from([2**53, 2**53 + 1, -(2**53) - 1, 2.0**53]))
texts = st.recursive(
    st.sampled_from([text, leaf('"a b"', '"a b"', lambda row: row["a b"]), lang]) | literals(words),
    lambda texts: st.one_of(
        st.builds(lambda a: apply("lower({})", "lower({})", strict(str.lower), a), texts),
        st.builds(lambda a: apply("upper({})", "upper({})", strict(str.upper), a), texts),
    ),
    max_leaves=2,
)


COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def compare(by: str, a: Part, b: Part) -> Part:
    form = f"({{}} {by} {{}})"
    return apply(form, form, strict(COMPARISONS[by]), a, b)


def within(form: str) -> Callable[..., Part]:
    def part(a: Part, low: Part, high: Part) -> Part:
        return apply(form, form, lambda x, y, z: both(strict(operator.ge)(x, y), strict(operator.le)(x, z)), a, low, high)

    return part


def among(a: Part, items: Sequence[Part]) -> Part:
    form = "({} in (" + ", ".join(["{}"] * len(items)) + "))"
    return apply(form, form, lambda x, *ys: functools.reduce(either, (strict(operator.eq)(x, y) for y in ys)), a, *items)


def null_test(a: Part) -> Part:
    return apply("({} is null)", "({} is null)", lambda x: x is None, a)


def like(how: str, a: Part, pattern: str) -> Part:
    regex = "".join({"%": ".*", "_": "."}.get(one, re.escape(one)) for one in pattern)
    form = f"({{}} {how} {quoted(pattern)})"
    cased = "({} like {} escape '\\')" if how == "like" else "(lower({}) like lower({}) escape '\\')"
    flags = re.NOFLAG if how == "like" else re.IGNORECASE
    matches = strict(lambda x: re.fullmatch(regex, x, flags) is not None)
    return apply(form, cased.format("{}", quoted(pattern)), matches, a)


def begins(a: Part, prefix: str) -> Part:
    form = f"starts_with({{}}, {quoted(prefix)})"
    return apply(form, form, strict(lambda x: x.startswith(prefix)), a)


def both(a: bool | None, b: bool | None) -> bool | None:
    return False if a is False or b is False else None if a is None or b is None else True


def either(a: bool | None, b: bool | None) -> bool | None:
    return True if a is True or b is True else None if a is None or b is None else False


comparisons = st.sampled_from(list(COMPARISONS))
leaves = st.one_of(
    st.builds(compare, comparisons, numbers, numbers),
    st.builds(compare, comparisons, exact, exact),
    st.builds(compare, comparisons, texts, texts),
    st.builds(within("({} between {} and {})"), numbers, numbers, numbers),
    st.builds(within("({} between {} and {})"), texts, texts, texts),
    st.builds(among, numbers, st.lists(literals(small | st.just(0.5)), min_size=1, max_size=3)),
    st.builds(among, texts, st.lists(literals(words), min_size=1, max_size=3)),
    st.builds(null_test, numbers | texts),
    st.builds(like, st.sampled_from(["like", "ilike"]), texts, st.text("aBc%_", max_size=4)),
    st.builds(begins, texts, words),
    st.just(ok),
    literals(st.sampled_from([True, False, None])),
)
conditions = st.recursive(
    leaves,
    lambda condition: st.one_of(
        st.builds(lambda a, b: apply("({} and {})", "({} and {})", both, a, b), condition, condition),
        st.builds(lambda a, b: apply("({} or {})", "({} or {})", either, a, b), condition, condition),
        st.builds(lambda a: apply("(not {})", "(not {})", strict(operator.not_), a), condition),
        st.builds(null_test, condition),
    ),
    max_leaves=5,
)


def batch(rows: Sequence[Row]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), FILTER_SCHEMA)


def parsed(text: str) -> Filter:
    """The filter, or another example where it says the same of all rows, which is refused."""
    try:
        return Filter.parse(text, FILTER_SCHEMA)
    except FilterError as error:
        if "reads no column" not in str(error) and "compares with null" not in str(error):
            raise
        reject()


def kept_by_sqlite(rows: Sequence[Row], condition: str) -> list[bool]:
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("pragma case_sensitive_like = on")
        database.create_function("starts_with", 2, strict(str.startswith))
        database.execute('create table t (at, n, big, hash, score, text, "a b", ok, lang, rank, num_ids)')
        for at, row in enumerate(rows):
            flat = [row[name] for name in ("n", "big", "hash", "score", "text", "a b", "ok")]
            num_ids = None if row["ids"] is None else len(row["ids"])
            database.execute(f"insert into t values ({','.join('?' * 11)})", [at, *flat, in_lang(row), in_rank(row), num_ids])
        kept = {at for (at,) in database.execute(f"select at from t where {condition}")}
    return [at in kept for at in range(len(rows))]


@given(rows_strategy, conditions)
def test_filter_keeps_rows_when_its_condition_is_true(rows: list[Row], condition: Part) -> None:
    keep = parsed(condition.text).keep(batch(rows))
    assert keep.dtype == bool
    assert keep.tolist() == [condition.of(row) is True for row in rows]


@given(rows_strategy, conditions)
def test_filter_keeps_the_rows_of_sqlite(rows: list[Row], condition: Part) -> None:
    assert parsed(condition.text).keep(batch(rows)).tolist() == kept_by_sqlite(rows, condition.sqlite)


terms = st.lists(st.sampled_from("n 2 -3 +n".split()), min_size=1, max_size=4).flatmap(
    lambda operands: st.lists(st.sampled_from("+-*%"), min_size=len(operands) - 1, max_size=len(operands) - 1).map(
        lambda operators: "".join(f" {o} {x}" for o, x in zip(["", *operators], operands, strict=True))
    )
)
tests_of = st.one_of(
    st.builds(lambda a, by, b: f"{a} {by} {b}", terms, comparisons, terms),
    st.builds(lambda a, b, no: f"{a} {no}between {b} and 3", terms, terms, st.sampled_from(["", "not "])),
    st.builds(lambda a, no: f"{a} {no}in (1, -3)", terms, st.sampled_from(["", "not "])),
    st.builds(lambda a, no: f"{a} is {no}null", terms, st.sampled_from(["", "not "])),
    st.just("ok"),
)


@given(
    rows_strategy,
    st.lists(
        st.tuples(st.sampled_from(["and", "or"]), st.sampled_from(["", "not ", "not not "]), tests_of), min_size=1, max_size=5
    ),
)
def test_operators_bind_as_in_sqlite(rows: list[Row], chain: list[tuple[str, str, str]]) -> None:
    text = "ok or " + " ".join(f"{word} {no}{test}" for word, no, test in chain).split(" ", 1)[1]
    assert parsed(text).keep(batch(rows)).tolist() == kept_by_sqlite(rows, text)
