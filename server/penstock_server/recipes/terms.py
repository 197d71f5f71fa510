"""Terms of a filter: Arrow expressions of columns and literals, and the operations that combine them.

Null propagates as in SQL, and NaN counts as null: a comparison and its opposite both exclude it. A division by zero is null.
Whole numbers never wrap: a result that does not fit 64 bits is an error when it is calculated. All operations raise Mismatch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from penstock_server.recipes.fields import is_text

_BOOL = pa.bool_()
_WHOLE = (pa.int64(), pa.uint64())
_NUMBERS = (*_WHOLE, pa.float64())
_BOTH_WHOLE = pa.decimal128(20, 0)  # holds every int64 and every uint64
_DIGITS = 18  # int64 holds every number of 18 digits
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view)


class Mismatch(ValueError):
    """An operation does not support the types of its terms; the message continues after the part's text."""


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """Part of a condition, computed by `value`. `literal` is its value if the part is a literal.

    Numbers are int64, uint64 or float64; other types are the column's.
    """

    value: pc.Expression
    type: pa.DataType = _BOOL
    literal: pa.Scalar | None = None

    @property
    def noun(self) -> str:
        """Return the kind of term, for a message."""
        if self.type in _NUMBERS:
            return "a number"
        if is_text(self.type):
            return "a text"
        if pa.types.is_boolean(self.type):
            return "a truth value"
        return "null" if pa.types.is_null(self.type) else f"a value of type {self.type}"


def literal(scalar: pa.Scalar) -> Term:
    """Make a term of a text, true, false or null."""
    return Term(pc.scalar(scalar), scalar.type, scalar)


def number(value: float) -> Term:
    """Make a term of a literal number, which must fit 64 bits."""
    if isinstance(value, float) and not math.isinf(value):
        return literal(pa.scalar(value, pa.float64()))
    for type_, least in ((pa.int64(), -(2**63)), (pa.uint64(), 0)):
        if isinstance(value, int) and least <= value < least + 2**64:
            return literal(pa.scalar(value, type_))
    raise Mismatch("does not fit 64 bits")


def column(path: Sequence[str], type_: pa.DataType) -> Term:
    """Make a term of a column, or of a field of a struct column."""
    value = pc.field(*path)
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
        value = value.cast(type_)
    if is_text(type_):
        return Term(value.cast(pa.large_string()), pa.large_string())
    if pa.types.is_integer(type_) and type_ != pa.uint64():
        return Term(value.cast(pa.int64()), pa.int64())
    if pa.types.is_floating(type_):
        return Term(_unless_nan(value.cast(pa.float64())), pa.float64())
    if pa.types.is_decimal(type_):
        if type_.scale == 0 and type_.precision <= _DIGITS:  # pyarrow cannot cast a 32-bit decimal directly
            return Term(value.cast(pa.decimal128(_DIGITS, 0)).cast(pa.int64()), pa.int64())
        # Cast through text, to the nearest float: directly Arrow makes 0.9500000000000001 of 0.95, which equals no literal.
        return Term(value.cast(pa.string()).cast(pa.float64()), pa.float64())
    return Term(value, type_)


def truth(term: Term) -> Term:
    """Return a term that is true, false or null."""
    if pa.types.is_null(term.type):
        return literal(pa.scalar(None, _BOOL))
    if not pa.types.is_boolean(term.type):
        raise Mismatch(f"is {term.noun} and no condition. Compare it with something")
    return term


def chain(by: Callable[[Any, Any], pc.Expression], *conditions: Term) -> Term:
    """Combine two or more conditions by AND or OR."""
    values = [truth(condition).value for condition in conditions]
    while len(values) > 1:  # in pairs: a plain loop would nest each in the next
        values = [a if b is None else by(a, b) for a, b in zip_longest(values[::2], values[1::2])]
    return Term(values[0])


def opposite(term: Term) -> Term:
    """Negate a condition: true becomes false, and false true."""
    return Term(~truth(term).value)


def compared(by: Callable[[Any, Any], pc.Expression], a: Term, b: Term) -> Term:
    """Compare two numbers, texts, booleans or times by = <> < <= > >=."""
    a, b = _coerced(a, b)
    return Term(by(a.value, b.value))


def between(term: Term, low: Term, high: Term) -> Term:
    """Test whether a term is at least `low` and at most `high`."""
    return chain(pc.and_kleene, compared(operator.ge, term, low), compared(operator.le, term, high))


def among(term: Term, *items: Term) -> Term:
    """Test whether a term is one of some literals."""
    if not items:
        raise Mismatch("has nothing between its parentheses")
    by_type: dict[pa.DataType, tuple[Term, list[pa.Scalar]]] = {}
    for item in items:
        if item.literal is None:
            raise Mismatch("has more than literals between its parentheses. Write it with = and or")
        subject, coerced = _coerced(term, item)
        by_type.setdefault(subject.type, (subject, []))[1].append(coerced.literal)
    tests = []
    for type_, (subject, scalars) in by_type.items():
        value, values = subject.value, pa.array(scalars, type_)
        if type_ == pa.float64():
            value, values = pc.add(value, 0.0), pc.add(values, 0.0)  # 0 and -0 are equal, but differ in a set
        tests.append(pc.if_else(pc.is_valid(value), pc.is_in(value, values), pa.scalar(None, _BOOL)))
    return Term(reduce(pc.or_kleene, tests))


def is_null(term: Term, null: Term) -> Term:
    """Test for null: the result is true or false, never null."""
    if null.literal is None or null.literal.is_valid:
        raise Mismatch("tests for something else than null. Write it with = or <>")
    return Term(pc.is_null(term.value))


def calculated(by: Literal["add", "subtract", "multiply"], a: Term, b: Term) -> Term:
    """Return the sum, difference or product of two numbers."""
    a, b = _two_numbers(a, b)
    if a.type == pa.float64():
        return Term(_unless_nan(getattr(pc, by)(a.value, b.value)), a.type)
    return Term(getattr(pc, f"{by}_checked")(a.value, b.value), a.type)


def quotient(a: Term, b: Term) -> Term:
    """Divide one number by another: 7 / 2 is 3.5."""
    a, b = _cast(_number(a), pa.float64()), _cast(_number(b), pa.float64())
    return Term(_unless_nan(pc.divide(a.value, _unless_zero(b))), a.type)


def remainder(a: Term, b: Term) -> Term:
    """Return the remainder of whole numbers, with the sign of the first."""
    a, b = _two_numbers(a, b)
    if a.type not in _WHOLE:
        raise Mismatch("takes the remainder of a number that need not be whole")
    divisor = pc.abs(_unless_zero(b))  # least / -1 would overflow, and the sign makes no difference
    return Term(pc.subtract(a.value, pc.multiply(pc.divide(a.value, divisor), divisor)), a.type)


def negated(term: Term) -> Term:
    """Negate a number."""
    if term.literal is not None and term.type in _NUMBERS:
        return number(-term.literal.as_py())
    term = _number(term)
    return Term((pc.negate_checked if term.type in _WHOLE else pc.negate)(term.value), term.type)


def matches(by: Callable[..., pc.Expression], term: Term, pattern: Term) -> Term:
    """Test a text by a literal prefix, LIKE pattern or regular expression in RE2's syntax, with a function of Arrow."""
    if pattern.literal is None or not is_text(pattern.type):
        raise Mismatch("needs a literal text for a pattern, as 'en%'")
    text = pattern.literal.as_py()
    if "\\" in text and by not in (pc.starts_with, pc.match_substring_regex):  # an escape in some patterns of LIKE only
        raise Mismatch(r"has a \ in its pattern. Use regexp_like")
    try:
        by("", pattern=text)
    except pa.ArrowInvalid as error:
        raise Mismatch(f"has no regular expression in RE2's syntax: {error}") from error
    return Term(by(_text(term), pattern=text))


def cased(by: Callable[[Any], pc.Expression], term: Term) -> Term:
    """Convert a text to lower or upper case."""
    return Term(by(_text(term)), pa.large_string())


def length(term: Term) -> Term:
    """Return the number of characters of a text, or of items of a list."""
    is_list = any(is_list(term.type) for is_list in _LISTS)
    value = pc.list_value_length(term.value) if is_list else pc.utf8_length(_text(term))
    return Term(value.cast(pa.int64()), pa.int64())


def _coerced(a: Term, b: Term) -> tuple[Term, Term]:
    """Cast two terms to one type for comparison."""
    if a.type in _NUMBERS and b.type in _NUMBERS:
        return _with_common_type(_as_whole(a, b), _as_whole(b, a))
    if a.noun == b.noun == "a text":
        return _cast(a, pa.large_string()), _cast(b, pa.large_string())
    if a.noun == b.noun == "a truth value" or (pa.types.is_temporal(a.type) and pa.types.is_temporal(b.type)):
        return a, b
    if any(term.literal is not None and pa.types.is_null(term.type) for term in (a, b)):
        raise Mismatch("compares with null, and nothing equals it. Write: is null, or: is not null")
    if _can_become(a, b.type):
        return _cast(a, b.type), b
    if _can_become(b, a.type):
        return a, _cast(b, a.type)
    raise Mismatch(f"compares {a.noun} with {b.noun}. Write texts in single quotes, and numbers without")


def _with_common_type(a: Term, b: Term) -> tuple[Term, Term]:
    """Cast two numbers to the type that holds both; for int64 and uint64 it is a decimal."""
    common = a.type
    if a.type != b.type:
        signed = a if a.type == pa.int64() else b
        is_natural = signed.literal is not None and signed.literal.as_py() >= 0
        common = pa.float64() if pa.float64() in (a.type, b.type) else pa.uint64() if is_natural else _BOTH_WHOLE
    return _cast(a, common), _cast(b, common)


def _as_whole(term: Term, other: Term) -> Term:
    """Convert a literal such as 1e6 to a whole number for comparison with one: large numbers coincide as floats."""
    value = term.literal.as_py() if term.literal is not None else None
    if isinstance(value, float) and value.is_integer() and -(2**63) <= value < 2**64 and other.type in _WHOLE:
        return number(int(value))
    return term


def _can_become(term: Term, type_: pa.DataType) -> bool:
    if term.literal is None:
        return pa.types.is_null(term.type) and not pa.types.is_nested(type_)
    return is_text(term.type) and pa.types.is_temporal(type_)


def _text(term: Term) -> pc.Expression:
    term = _filled(term, pa.large_string())
    if not is_text(term.type):
        raise Mismatch(f"takes {term.noun} for a text")
    return term.value


def _number(term: Term) -> Term:
    term = _filled(term, pa.int64())
    if term.type not in _NUMBERS:
        raise Mismatch(f"calculates with {term.noun}")
    return term


def _two_numbers(a: Term, b: Term) -> tuple[Term, Term]:
    numbers = _with_common_type(_number(a), _number(b))
    if numbers[0].type not in _NUMBERS:
        raise Mismatch(f"calculates with {a.type} and {b.type}, and no 64 bits hold both")
    return numbers


def _filled(term: Term, type_: pa.DataType) -> Term:
    """Cast a column of null type, as in a shard with only nulls, to nulls of a type; other terms stay."""
    return _cast(term, type_) if pa.types.is_null(term.type) and term.literal is None else term


def _cast(term: Term, type_: pa.DataType) -> Term:
    if term.type == type_:
        return term
    if term.literal is None:
        return Term(term.value.cast(type_, safe=False), type_)
    if not pa.types.is_temporal(type_):
        return literal(pc.cast(term.literal, type_, safe=False))  # beyond 2^53 to the nearest float, as columns are
    try:
        return literal(pc.cast(term.literal, type_))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise Mismatch(
            f"takes {term.literal.as_py()!r} for a {type_}, which it is not. With a zone, write '2024-01-01T00:00:00Z'"
        ) from error


def _unless_nan(value: pc.Expression) -> pc.Expression:
    return pc.if_else(pc.is_nan(value), pa.scalar(None, pa.float64()), value)


def _unless_zero(term: Term) -> pc.Expression:
    return pc.if_else(term.value == pa.scalar(0, term.type), pa.scalar(None, term.type), term.value)
