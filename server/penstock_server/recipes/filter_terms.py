"""What a filter's condition is made of, as Arrow expressions: columns, literals, comparisons, and, or and not.

A condition that is neither true nor false of a row is null there, and null spreads as in SQL. NaN is null, as in pandas and
SQLite: a comparison and its opposite leave it out alike. So a file's statistics, which pass over NaN, rule out no row that
is kept.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock_server.recipes.column_types import is_text

Comparison = Callable[[Any, Any], pc.Expression]

_OPPOSITES: dict[Comparison, Comparison] = {
    operator.eq: operator.ne,
    operator.ne: operator.eq,
    operator.lt: operator.ge,
    operator.ge: operator.lt,
    operator.gt: operator.le,
    operator.le: operator.gt,
}
WHOLE = (pa.int64(), pa.uint64())
_BOTH_WHOLE = pa.decimal128(20, 0)  # holds every int64 and every uint64
_DIGITS = 18  # of which int64 holds every number
NUMBERS = (*WHOLE, pa.float64())
_ANYWHERE, _NOWHERE = pc.scalar(True), pc.scalar(False)
_UNKNOWN = pc.scalar(pa.scalar(None, pa.bool_()))
_EQUALS_NULL = "compares with null, and nothing equals it. Write: is null, or: is not null"


class Mismatch(ValueError):
    """Something is done with terms that cannot be done with their types; the message goes on after the part's text."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Term:
    """A part of a condition.

    `value` computes it. Numbers are int64, uint64 or float64; other types are the column's own. `stored` is what the file
    holds, where the part is no more than a column, and `literal` is what the condition says, where it is no more than that.
    Every row of which a condition is true is in `true_in`, every row of which it is false in `false_in`, and others may be.
    Those two are made of columns and literals alone, so that a file's statistics can rule them out.
    """

    value: pc.Expression
    type: pa.DataType
    stored: pc.Expression | None = None
    literal: pa.Scalar | None = None
    true_in: pc.Expression = field(default_factory=lambda: _ANYWHERE)
    false_in: pc.Expression = field(default_factory=lambda: _ANYWHERE)

    @property
    def noun(self) -> str:
        """What it is, in a message."""
        if self.type in NUMBERS:
            return "a number"
        if is_text(self.type):
            return "a text"
        if pa.types.is_boolean(self.type):
            return "a truth value"
        return "null" if pa.types.is_null(self.type) else f"a value of type {self.type}"


def literal(scalar: pa.Scalar) -> Term:
    """What the condition says: a text, true, false or null."""
    says = scalar.as_py() if pa.types.is_boolean(scalar.type) else None
    return Term(
        value=pc.scalar(scalar),
        type=scalar.type,
        literal=scalar,
        true_in=_ANYWHERE if says is True else _NOWHERE,
        false_in=_ANYWHERE if says is False else _NOWHERE,
    )


def number(value: float) -> Term:
    """A number that the condition says. Raises Mismatch: it does not fit 64 bits."""
    if isinstance(value, float) and not math.isinf(value):
        return literal(pa.scalar(value, pa.float64()))
    for type_, least in ((pa.int64(), -(2**63)), (pa.uint64(), 0)):
        if isinstance(value, int) and least <= value < least + 2**64:
            return literal(pa.scalar(value, type_))
    raise Mismatch("does not fit 64 bits")


def column(path: Sequence[str], type_: pa.DataType) -> Term:
    """A column, or a field of a struct column."""
    value = pc.field(*path)
    if isinstance(type_, pa.BaseExtensionType) and is_text(type_):  # whose statistics Arrow does not compare
        return Term(value=value.cast(pa.large_string()), type=pa.large_string())
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
        value = value.cast(type_)
    if pa.types.is_string_view(type_):
        type_ = pa.string()
        value = value.cast(type_)
    if pa.types.is_boolean(type_):
        return Term(value=value, type=type_, stored=value, true_in=value == _ANYWHERE, false_in=value == _NOWHERE)
    if pa.types.is_integer(type_):
        value = value if type_ == pa.uint64() else value.cast(pa.int64())
        return Term(value=value, type=pa.uint64() if type_ == pa.uint64() else pa.int64(), stored=value)
    if pa.types.is_floating(type_):
        value = value.cast(pa.float64())
        return Term(value=unless_nan(value), type=pa.float64(), stored=value)
    if pa.types.is_decimal(type_):
        if type_.scale == 0 and type_.precision <= _DIGITS:  # of 32 bits pyarrow casts none at once
            return Term(value=value.cast(pa.decimal128(_DIGITS, 0)).cast(pa.int64()), type=pa.int64())
        # By way of its text, to the nearest: by itself Arrow makes 0.9500000000000001 of 0.95, which no literal is.
        return Term(value=value.cast(pa.string()).cast(pa.float64()), type=pa.float64())
    return Term(value=value, type=type_, stored=value)


def truth(term: Term) -> Term:
    """A term that is true, false or null. Raises Mismatch: it is something else."""
    if pa.types.is_null(term.type):
        return Term(value=_UNKNOWN, type=pa.bool_(), true_in=_NOWHERE, false_in=_NOWHERE)
    if not pa.types.is_boolean(term.type):
        raise Mismatch(f"is {term.noun} and no condition. Compare it with something")
    return term


def all_of(a: Term, b: Term) -> Term:
    """True if both are, false if one is false."""
    a, b = truth(a), truth(b)
    return condition(pc.and_kleene(a.value, b.value), a.true_in & b.true_in, a.false_in | b.false_in)


def any_of(a: Term, b: Term) -> Term:
    """True if one is, false if both are false."""
    a, b = truth(a), truth(b)
    return condition(pc.or_kleene(a.value, b.value), a.true_in | b.true_in, a.false_in & b.false_in)


def opposite(term: Term) -> Term:
    """True where a condition is false, and the other way round."""
    term = truth(term)
    return condition(~term.value, term.false_in, term.true_in)


def compared(by: Comparison, a: Term, b: Term) -> Term:
    """One of = <> < <= > >= of two numbers, texts, truths or times. Raises Mismatch: they are not alike."""
    a, b = alike(a, b)
    value = by(a.value, b.value)
    if (a.stored is None or b.literal is None) and (a.literal is None or b.stored is None):
        return condition(value)
    stored = [term.value if term.stored is None else term.stored for term in (a, b)]
    return condition(value, by(*stored), _OPPOSITES[by](*stored))


def among(term: Term, items: Sequence[Term]) -> Term:
    """Whether a term is one of some literals. Raises Mismatch: they are not alike, or one is null."""
    found: list[pc.Expression] = []
    true_in: list[pc.Expression] = [_NOWHERE]
    by_type: dict[pa.DataType, tuple[Term, list[pa.Scalar]]] = {}
    for item in items:
        if item.literal is None:
            raise Mismatch("has more than literals between its parentheses. Write it with = and or")
        if pa.types.is_null(item.type):  # in SQL no row is not in (1, null)
            raise Mismatch(_EQUALS_NULL)
        subject, like = alike(term, item)
        by_type.setdefault(subject.type, (subject, []))[1].append(like.literal)
    for type_, (subject, scalars) in by_type.items():
        value, values = subject.value, pa.array(scalars, type_)
        least, largest = pc.min_max(values).values()
        if type_ == pa.float64():
            value, values = pc.add(value, 0.0), pc.add(values, 0.0)  # 0 and -0, which are equal, are two in a set
        found.append(pc.if_else(pc.is_valid(value), pc.is_in(value, values), pa.scalar(None, pa.bool_())))
        stored = subject.stored
        true_in.append(_ANYWHERE if stored is None else (stored >= least) & (stored <= largest))
    return condition(reduce(pc.or_kleene, found), reduce(operator.or_, true_in))


def is_null(term: Term) -> Term:
    """Whether there is nothing: true or false, never null."""
    # Arrow does not compare what statistics tell of extension types, such as UUIDs.
    is_plain = not pa.types.is_nested(term.type) and not isinstance(term.type, pa.BaseExtensionType)
    stored = term.stored is not None and is_plain
    nan = term.type == pa.float64()
    return condition(
        pc.is_null(term.value),
        pc.is_null(term.stored) if stored and not nan else _ANYWHERE,
        pc.is_valid(term.stored) if stored else _ANYWHERE,
    )


def condition(value: pc.Expression, true_in: pc.Expression = _ANYWHERE, false_in: pc.Expression = _ANYWHERE) -> Term:
    """What is true, false or null."""
    return Term(value=value, type=pa.bool_(), true_in=true_in, false_in=false_in)


def unless_nan(value: pc.Expression) -> pc.Expression:
    """A float64, null for NaN."""
    return pc.if_else(pc.is_nan(value), pa.scalar(None, pa.float64()), value)


def alike(a: Term, b: Term) -> tuple[Term, Term]:
    """The two as one type that they can be compared in. Raises Mismatch: there is none."""
    if a.type in NUMBERS and b.type in NUMBERS:
        a, b = _as_whole(a, b), _as_whole(b, a)
        common = common_number(a, b)
        return cast(a, common), cast(b, common)
    if (is_text(a.type) and is_text(b.type)) or (pa.types.is_boolean(a.type) and pa.types.is_boolean(b.type)):
        return (a, cast(b, a.type)) if a.literal is None else (cast(a, b.type), b)
    if pa.types.is_temporal(a.type) and pa.types.is_temporal(b.type):
        return a, b
    for term in (a, b):
        if term.literal is not None and pa.types.is_null(term.type):
            raise Mismatch(_EQUALS_NULL)
    if _can_become(a, b.type):
        return cast(a, b.type), b
    if _can_become(b, a.type):
        return a, cast(b, a.type)
    raise Mismatch(f"compares {a.noun} with {b.noun}{_way_out(a, b) or _way_out(b, a)}")


def common_number(a: Term, b: Term) -> pa.DataType:
    """The type that holds both of two numbers; of int64 and uint64 it is a decimal."""
    if a.type == b.type:
        return a.type
    if pa.float64() in (a.type, b.type):
        return pa.float64()
    for term in (a, b):
        if term.type == pa.int64() and term.literal is not None and term.literal.as_py() >= 0:
            return pa.uint64()
    return _BOTH_WHOLE


def cast(term: Term, type_: pa.DataType) -> Term:
    """The term as another type. Raises Mismatch: it is a text that does not say a time."""
    if term.type == type_:
        return term
    if term.literal is None:
        return Term(value=term.value.cast(type_, safe=False), type=type_)
    if not is_text(term.type):
        return literal(pc.cast(term.literal, type_, safe=False))  # past 2^53 to the nearest float, as columns are
    try:
        return literal(pc.cast(term.literal, type_))
    except pa.ArrowInvalid as error:
        text = term.literal.as_py()
        if (found := _timestamp(text, type_)) is None:
            raise Mismatch(f"takes {text!r} for a {type_}, which it is not{_zone_hint(text, type_)}") from error
        with suppress(pa.ArrowInvalid):
            made = pc.cast(found, type_)
            if pc.cast(made, found.type) == found:  # a date would be the day, whatever the hour
                return literal(made)
        raise Mismatch(f"compares {text!r} with a {type_}, which can be no such time: write one that it can be") from error
    except pa.ArrowNotImplementedError as error:
        raise Mismatch(f"compares a {type_} with a text, and pyarrow reads no text as one") from error


def _timestamp(text: str, type_: pa.DataType) -> pa.Scalar | None:
    """The time that a text says, to the microsecond, where a type is one of dates or timestamps; None for none."""
    if pa.types.is_timestamp(type_) or pa.types.is_date(type_):
        with suppress(pa.ArrowInvalid):
            return pc.cast(pa.scalar(text), pa.timestamp("us", type_.tz if pa.types.is_timestamp(type_) else None))
    return None


def _as_whole(term: Term, other: Term) -> Term:
    """A literal such as 1e6 as a whole number, where it is compared with one: as floats the largest run together."""
    value = term.literal.as_py() if term.literal is not None else None
    if isinstance(value, float) and value.is_integer() and -(2**63) <= value < 2**64 and other.type in WHOLE:
        return number(int(value))
    return term


def _can_become(term: Term, type_: pa.DataType) -> bool:
    if term.literal is None:
        return pa.types.is_null(term.type) and not pa.types.is_nested(type_)
    return is_text(term.type) and pa.types.is_temporal(type_)


def _zone_hint(text: str, type_: pa.DataType) -> str:
    """How to write a time that lacks nothing but the zone that its type has; "" for any other text."""
    if not (pa.types.is_timestamp(type_) and type_.tz):
        return ""
    for zoned in (f"{text}Z", f"{text}T00:00:00Z"):
        with suppress(pa.ArrowInvalid):
            pc.cast(pa.scalar(zoned), type_)
            return f": its zone is missing. A time in UTC is written as '{zoned}'"
    return ""


def _way_out(a: Term, b: Term) -> str:
    if is_text(a.type) and b.type in NUMBERS and b.literal is not None:
        return f". A text stands in single quotes: '{b.literal.as_py()}'"
    if a.type in NUMBERS and is_text(b.type) and b.literal is not None:
        return ". A number stands without quotes"
    if pa.types.is_boolean(a.type) and b.type in NUMBERS:
        return ". Write true or false"
    return ""
