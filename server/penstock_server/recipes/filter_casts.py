"""Casts for comparisons of a filter: numbers to a type that holds both, texts to the times or texts that they meet."""

from __future__ import annotations

from contextlib import suppress

import pyarrow as pa
import pyarrow.compute as pc

from penstock_server.recipes.column_types import is_text
from penstock_server.recipes.filter_terms import NUMBERS, WHOLE, Mismatch, Term, literal, number

EQUALS_NULL = "compares with null, and nothing equals it. Write: is null, or: is not null"
_BOTH_WHOLE = pa.decimal128(20, 0)  # holds every int64 and every uint64


def alike(a: Term, b: Term) -> tuple[Term, Term]:
    """Cast two terms to one type for comparison. Raises Mismatch: they have no common type."""
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
            raise Mismatch(EQUALS_NULL)
    if _can_become(a, b.type):
        return cast(a, b.type), b
    if _can_become(b, a.type):
        return a, cast(b, a.type)
    raise Mismatch(f"compares {a.noun} with {b.noun}{_way_out(a, b) or _way_out(b, a)}")


def common_number(a: Term, b: Term) -> pa.DataType:
    """Return the type that holds both of two numbers; for int64 and uint64 it is a decimal."""
    if a.type == b.type:
        return a.type
    if pa.float64() in (a.type, b.type):
        return pa.float64()
    for term in (a, b):
        if term.type == pa.int64() and term.literal is not None and term.literal.as_py() >= 0:
            return pa.uint64()
    return _BOTH_WHOLE


def cast(term: Term, type_: pa.DataType) -> Term:
    """Cast a term to another type. Raises Mismatch: it is a text that is not a time."""
    if term.type == type_:
        return term
    if term.literal is None:
        return Term(value=term.value.cast(type_, safe=False), type=type_)
    if not is_text(term.type):
        return literal(pc.cast(term.literal, type_, safe=False))  # beyond 2^53 to the nearest float, as columns are
    try:
        return literal(pc.cast(term.literal, type_))
    except pa.ArrowInvalid as error:
        text = term.literal.as_py()
        if (found := _timestamp(text, type_)) is None:
            raise Mismatch(f"takes {text!r} for a {type_}, which it is not{_zone_hint(text, type_)}") from error
        with suppress(pa.ArrowInvalid):
            made = pc.cast(found, type_)
            if pc.cast(made, found.type) == found:  # a date would drop the hour
                return literal(made)
        raise Mismatch(f"compares {text!r} with a {type_}, which can be no such time: write one that it can be") from error
    except pa.ArrowNotImplementedError as error:
        raise Mismatch(f"compares a {type_} with a text, and pyarrow reads no text as one") from error


def _timestamp(text: str, type_: pa.DataType) -> pa.Scalar | None:
    """Parse a time, to the microsecond, if `type_` is a date or timestamp; None if the text is not a time."""
    if pa.types.is_timestamp(type_) or pa.types.is_date(type_):
        with suppress(pa.ArrowInvalid):
            return pc.cast(pa.scalar(text), pa.timestamp("us", type_.tz if pa.types.is_timestamp(type_) else None))
    return None


def _as_whole(term: Term, other: Term) -> Term:
    """Convert a literal such as 1e6 to a whole number for comparison with one: large numbers coincide as floats."""
    value = term.literal.as_py() if term.literal is not None else None
    if isinstance(value, float) and value.is_integer() and -(2**63) <= value < 2**64 and other.type in WHOLE:
        return number(int(value))
    return term


def _can_become(term: Term, type_: pa.DataType) -> bool:
    if term.literal is None:
        return pa.types.is_null(term.type) and not pa.types.is_nested(type_)
    return is_text(term.type) and pa.types.is_temporal(type_)


def _zone_hint(text: str, type_: pa.DataType) -> str:
    """Return how to write a time that lacks only the zone of its type; "" for any other text."""
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
