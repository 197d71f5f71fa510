"""Terms of a filter: Arrow expressions of columns and literals, and the operations that combine them.

Null propagates as in SQL, and NaN counts as null: a comparison and its opposite both exclude it. A division by zero is null.
Whole numbers never wrap: a result that does not fit 64 bits is an error when it is calculated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from penstock_server.recipes.fields import is_text

_WHOLE = (pa.int64(), pa.uint64())
_NUMBERS = (*_WHOLE, pa.float64())
_BOTH_WHOLE = pa.decimal128(20, 0)  # holds every int64 and every uint64
_DIGITS = 18  # int64 holds every number of 18 digits
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view)


class Mismatch(ValueError):
    """An operation does not support the types of its terms; the message continues after the part's text."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Term:
    """Part of a condition, computed by `value`. `literal` is its value if the part is a literal.

    Numbers are int64, uint64 or float64; other types are the column's.
    """

    value: pc.Expression
    type: pa.DataType
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
    return Term(value=pc.scalar(scalar), type=scalar.type, literal=scalar)


def number(value: float) -> Term:
    """Make a term of a literal number. Raises Mismatch: it does not fit 64 bits."""
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
        return Term(value=value.cast(pa.large_string()), type=pa.large_string())
    if pa.types.is_integer(type_) and type_ != pa.uint64():
        return Term(value=value.cast(pa.int64()), type=pa.int64())
    if pa.types.is_floating(type_):
        return Term(value=_unless_nan(value.cast(pa.float64())), type=pa.float64())
    if pa.types.is_decimal(type_):
        if type_.scale == 0 and type_.precision <= _DIGITS:  # pyarrow cannot cast a 32-bit decimal directly
            return Term(value=value.cast(pa.decimal128(_DIGITS, 0)).cast(pa.int64()), type=pa.int64())
        # Cast through text, to the nearest float: directly Arrow makes 0.9500000000000001 of 0.95, which equals no literal.
        return Term(value=value.cast(pa.string()).cast(pa.float64()), type=pa.float64())
    return Term(value=value, type=type_)


def truth(term: Term) -> Term:
    """Return a term that is true, false or null. Raises Mismatch: it is something else."""
    if pa.types.is_null(term.type):
        return literal(pa.scalar(None, pa.bool_()))
    if not pa.types.is_boolean(term.type):
        raise Mismatch(f"is {term.noun} and no condition. Compare it with something")
    return term


def all_of(a: Term, b: Term) -> Term:
    """Combine two conditions by AND: true if both are true, false if one is false."""
    return _condition(pc.and_kleene(a.value, b.value))


def any_of(a: Term, b: Term) -> Term:
    """Combine two conditions by OR: true if one is true, false if both are false."""
    return _condition(pc.or_kleene(a.value, b.value))


def opposite(term: Term) -> Term:
    """Negate a condition: true becomes false, and false true."""
    return _condition(~truth(term).value)


def compared(by: Callable[[Any, Any], pc.Expression], a: Term, b: Term) -> Term:
    """Compare two numbers, texts, booleans or times by = <> < <= > >=. Raises Mismatch: their types differ."""
    a, b = coerce(a, b)
    return _condition(by(a.value, b.value))


def among(term: Term, *items: Term) -> Term:
    """Test whether a term is one of some literals. Raises Mismatch: their types differ, or one is null."""
    by_type: dict[pa.DataType, tuple[Term, list[pa.Scalar]]] = {}
    for item in items:
        if item.literal is None:
            raise Mismatch("has more than literals between its parentheses. Write it with = and or")
        subject, coerced = coerce(term, item)
        by_type.setdefault(subject.type, (subject, []))[1].append(coerced.literal)
    tests = []
    for type_, (subject, scalars) in by_type.items():
        value, values = subject.value, pa.array(scalars, type_)
        if type_ == pa.float64():
            value, values = pc.add(value, 0.0), pc.add(values, 0.0)  # 0 and -0 are equal, but differ in a set
        tests.append(pc.if_else(pc.is_valid(value), pc.is_in(value, values), pa.scalar(None, pa.bool_())))
    return _condition(reduce(pc.or_kleene, tests))


def is_null(term: Term) -> Term:
    """Test for null: the result is true or false, never null."""
    return _condition(pc.is_null(term.value))


def coerce(a: Term, b: Term) -> tuple[Term, Term]:
    """Cast two terms to one type for comparison. Raises Mismatch: they have no common type."""
    if a.type in _NUMBERS and b.type in _NUMBERS:
        a, b = _as_whole(a, b), _as_whole(b, a)
        common = _common_number(a, b)
        return _cast(a, common), _cast(b, common)
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


def calculated(by: Literal["add", "subtract", "multiply"], a: Term, b: Term) -> Term:
    """Return a sum, difference or product. Raises Mismatch: a term is not a number."""
    a, b = _two_numbers(a, b)
    if a.type == pa.float64():
        return Term(value=_unless_nan(getattr(pc, by)(a.value, b.value)), type=a.type)
    return Term(value=getattr(pc, f"{by}_checked")(a.value, b.value), type=a.type)


def quotient(a: Term, b: Term) -> Term:
    """Divide one number by another: 7 / 2 is 3.5. Raises Mismatch: a term is not a number."""
    a, b = _cast(_number(a), pa.float64()), _cast(_number(b), pa.float64())
    return Term(value=_unless_nan(pc.divide(a.value, _unless_zero(b))), type=a.type)


def remainder(a: Term, b: Term) -> Term:
    """Return the remainder of whole numbers, with the sign of the first. Raises Mismatch: a number may not be whole."""
    a, b = _two_numbers(a, b)
    if a.type not in _WHOLE:
        raise Mismatch("takes the remainder of a number that need not be whole")
    divisor = pc.abs(_unless_zero(b))  # least / -1 would overflow, and the sign makes no difference
    return Term(value=pc.subtract(a.value, pc.multiply(pc.divide(a.value, divisor), divisor)), type=a.type)


def negated(term: Term) -> Term:
    """Negate a number. Raises Mismatch: the term is not a number, or uint64."""
    if term.literal is not None and term.type in _NUMBERS:
        return number(-term.literal.as_py())
    term = _number(term)
    return Term(value=(pc.negate_checked if term.type in _WHOLE else pc.negate)(term.value), type=term.type)


def like(term: Term, pattern: Term, *, ignore_case: bool = False) -> Term:
    """Test whether a text is LIKE a pattern. Raises Mismatch: they are not a text and a literal text."""
    value, text = _text(term), _pattern(pattern)
    if "\\" in text:  # pyarrow treats it as an escape in some patterns only
        raise Mismatch(r"has a \ in its pattern. Use regexp_like")
    return _condition(pc.match_like(value, pattern=text, ignore_case=ignore_case))


def starts_with(term: Term, pattern: Term) -> Term:
    """Test whether a text begins with another. Raises Mismatch: they are not a text and a literal text."""
    return _condition(pc.starts_with(_text(term), pattern=_pattern(pattern)))


def regexp_like(term: Term, pattern: Term) -> Term:
    """Search a text for a regular expression in RE2's syntax. Raises Mismatch: not texts, or an invalid expression."""
    value, text = _text(term), _pattern(pattern)
    try:
        pc.match_substring_regex("", pattern=text)
    except pa.ArrowInvalid as error:
        raise Mismatch(f"has no regular expression in RE2's syntax: {error}") from error
    return _condition(pc.match_substring_regex(value, pattern=text))


def cased(how: Literal["utf8_lower", "utf8_upper"], term: Term) -> Term:
    """Convert a text to lower or upper case. Raises Mismatch: the term is not a text."""
    return Term(value=getattr(pc, how)(_text(term)), type=pa.large_string())


def length(term: Term) -> Term:
    """Return the number of characters of a text, or of items of a list. Raises Mismatch: the term is neither."""
    if any(is_list(term.type) for is_list in _LISTS):
        return Term(value=pc.list_value_length(term.value).cast(pa.int64()), type=pa.int64())
    return Term(value=pc.utf8_length(_text(term)).cast(pa.int64()), type=pa.int64())


def _condition(value: pc.Expression) -> Term:
    return Term(value=value, type=pa.bool_())


def _text(term: Term) -> pc.Expression:
    """Return the value of a text. Raises Mismatch: the term is not a text."""
    term = _filled(term, pa.large_string())
    if not is_text(term.type):
        raise Mismatch(f"takes {term.noun} for a text")
    return term.value


def _pattern(pattern: Term) -> str:
    """Return a literal text. Raises Mismatch: the term is another."""
    if pattern.literal is None or not is_text(pattern.type):
        raise Mismatch("needs a literal text for a pattern, as 'en%'")
    text: str = pattern.literal.as_py()
    return text


def _number(term: Term) -> Term:
    """Return a term that is a number. Raises Mismatch: it is not a number."""
    term = _filled(term, pa.int64())
    if term.type not in _NUMBERS:
        raise Mismatch(f"calculates with {term.noun}")
    return term


def _two_numbers(a: Term, b: Term) -> tuple[Term, Term]:
    """Cast two numbers to one type. Raises Mismatch: one is not a number, or no type holds both."""
    a, b = _number(a), _number(b)
    common = _common_number(a, b)
    if common not in _NUMBERS:
        raise Mismatch(f"calculates with {a.type} and {b.type}, and no 64 bits hold both")
    return _cast(a, common), _cast(b, common)


def _common_number(a: Term, b: Term) -> pa.DataType:
    """Return the type that holds both of two numbers; for int64 and uint64 it is a decimal."""
    if a.type == b.type:
        return a.type
    if pa.float64() in (a.type, b.type):
        return pa.float64()
    for term in (a, b):
        if term.type == pa.int64() and term.literal is not None and term.literal.as_py() >= 0:
            return pa.uint64()
    return _BOTH_WHOLE


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


def _cast(term: Term, type_: pa.DataType) -> Term:
    """Cast a term to another type. Raises Mismatch: it is a text that is not a time."""
    if term.type == type_:
        return term
    if term.literal is None:
        return Term(value=term.value.cast(type_, safe=False), type=type_)
    if not pa.types.is_temporal(type_):
        return literal(pc.cast(term.literal, type_, safe=False))  # beyond 2^53 to the nearest float, as columns are
    try:
        return literal(pc.cast(term.literal, type_))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise Mismatch(
            f"takes {term.literal.as_py()!r} for a {type_}, which it is not. With a zone, write '2024-01-01T00:00:00Z'"
        ) from error


def _filled(term: Term, type_: pa.DataType) -> Term:
    """Cast a column of null type, as in a shard with only nulls, to nulls of a type; other terms stay."""
    return _cast(term, type_) if pa.types.is_null(term.type) and term.literal is None else term


def _unless_nan(value: pc.Expression) -> pc.Expression:
    """Replace NaN by null in a float64."""
    return pc.if_else(pc.is_nan(value), pa.scalar(None, pa.float64()), value)


def _unless_zero(term: Term) -> pc.Expression:
    return pc.if_else(term.value == pa.scalar(0, term.type), pa.scalar(None, term.type), term.value)
