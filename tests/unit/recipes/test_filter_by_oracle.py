import math
import sqlite3
from collections.abc import Sequence
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
    """A part of a condition in the filter's words, and in SQLite's."""

    text: str
    sqlite: str


def apply(form: str, *parts: Part, sqlite: str = "") -> Part:
    return Part(form.format(*(part.text for part in parts)), (sqlite or form).format(*(part.sqlite for part in parts)))


def applied(forms: Sequence[str], *parts: st.SearchStrategy[Part]) -> st.SearchStrategy[Part]:
    return st.builds(apply, st.sampled_from(forms), *parts)


def columns(*names: str) -> st.SearchStrategy[Part]:
    return st.sampled_from([Part(name, name) for name in names])


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def literals(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Part]:
    def part(value: Any) -> Part:
        said = "null" if value is None else quoted(value) if isinstance(value, str) else str(value).lower()
        return Part(said, said)

    return values.map(part)


whole = st.recursive(
    columns("n", "length(text)")
    | st.sampled_from([Part("meta.source.rank", "rank"), Part("length(ids)", "num_ids")])
    | literals(small),
    lambda part: applied(["({} + {})", "({} - {})", "({} * {})", "({} % {})"], part, part) | applied(["(- {})"], part),
    max_leaves=4,
)
numbers = st.recursive(
    whole | literals(st.sampled_from([-1.5, 0.5, 2.0, 1e6])) | columns("score", "hash"),
    lambda number: st.builds(lambda a, b: apply("({} / {})", a, b, sqlite="({} / cast({} as real))"), number, number),
    max_leaves=3,
)
# Past 2^53, whole numbers that are compared with whole numbers are still exact.
exact = columns("big", "hash", "n") | literals(st.sampled_from([2**53, 2**53 + 1, -(2**53) - 1, 2.0**53]))
texts = st.recursive(
    columns("text", '"a b"') | st.just(Part("meta.lang", "lang")) | literals(words),
    lambda texts: applied(["lower({})", "upper({})"], texts),
    max_leaves=2,
)


def among(a: Part, items: Sequence[Part]) -> Part:
    return apply("({} in (" + ", ".join(["{}"] * len(items)) + "))", a, *items)


def like(how: str, a: Part, pattern: str) -> Part:
    cased = "({} like {} escape '\\')" if how == "like" else "(lower({}) like lower({}) escape '\\')"
    return apply(f"({{}} {how} {quoted(pattern)})", a, sqlite=cased.format("{}", quoted(pattern)))


COMPARISONS = ["=", "<>", "<", "<=", ">", ">="]
comparisons = [f"({{}} {by} {{}})" for by in COMPARISONS]
between = ["({} between {} and {})"]
leaves = st.one_of(
    applied(comparisons, numbers, numbers),
    applied(comparisons, exact, exact),
    applied(comparisons, texts, texts),
    applied(between, numbers, numbers, numbers),
    applied(between, texts, texts, texts),
    st.builds(among, numbers, st.lists(literals(small | st.just(0.5)), min_size=1, max_size=3)),
    st.builds(among, texts, st.lists(literals(words), min_size=1, max_size=3)),
    applied(["({} is null)"], numbers | texts),
    st.builds(like, st.sampled_from(["like", "ilike"]), texts, st.text("aBc%_", max_size=4)),
    st.builds(lambda a, prefix: apply(f"starts_with({{}}, {quoted(prefix)})", a), texts, words),
    columns("ok"),
    literals(st.sampled_from([True, False, None])),
)
conditions = st.recursive(
    leaves,
    lambda condition: (
        applied(["({} and {})", "({} or {})"], condition, condition) | applied(["(not {})", "({} is null)"], condition)
    ),
    max_leaves=5,
)


def kept(rows: Sequence[Row], text: str) -> list[bool]:
    """The rows that the filter keeps; another example if it says the same of all rows, which is refused."""
    try:
        keep = Filter.parse(text, FILTER_SCHEMA).keep(pa.RecordBatch.from_pylist(list(rows), FILTER_SCHEMA))
    except FilterError as error:
        if "reads no column" not in str(error) and "compares with null" not in str(error):
            raise
        reject()
    assert keep.dtype == bool
    found: list[bool] = keep.tolist()
    return found


def starts_with(text: str | None, prefix: str | None) -> bool | None:
    return None if text is None or prefix is None else text.startswith(prefix)


def kept_by_sqlite(rows: Sequence[Row], condition: str) -> list[bool]:
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("pragma case_sensitive_like = on")
        database.create_function("starts_with", 2, starts_with)
        database.execute('create table t (at, n, big, hash, score, text, "a b", ok, lang, rank, num_ids)')
        for at, row in enumerate(rows):
            flat = [row[name] for name in ("n", "big", "hash", "score", "text", "a b", "ok")]
            meta = row["meta"] or {}
            nested = [meta.get("lang"), (meta.get("source") or {}).get("rank"), None if row["ids"] is None else len(row["ids"])]
            database.execute(f"insert into t values ({','.join('?' * 11)})", [at, *flat, *nested])
        found = {at for (at,) in database.execute(f"select at from t where {condition}")}
    return [at in found for at in range(len(rows))]


@given(rows_strategy, conditions)
def test_filter_keeps_the_rows_that_sqlite_keeps(rows: list[Row], condition: Part) -> None:
    assert kept(rows, condition.text) == kept_by_sqlite(rows, condition.sqlite)


terms = st.lists(st.sampled_from("n 2 -3 +n".split()), min_size=1, max_size=4).flatmap(
    lambda operands: st.lists(st.sampled_from("+-*%"), min_size=len(operands) - 1, max_size=len(operands) - 1).map(
        lambda operators: "".join(f" {o} {x}" for o, x in zip(["", *operators], operands, strict=True))
    )
)
tests_of = st.one_of(
    st.builds(lambda a, by, b: f"{a} {by} {b}", terms, st.sampled_from(COMPARISONS), terms),
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
    assert kept(rows, text) == kept_by_sqlite(rows, text)
