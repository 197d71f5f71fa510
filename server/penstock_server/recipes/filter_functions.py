"""Functions of a filter's condition: + - * / %, length, lower and upper, and patterns for texts.

`/` is true division, 7 / 2 is 3.5; a division by zero is null. Whole numbers never wrap: a result that does not fit 64 bits
is an error when it is calculated.
"""

from __future__ import annotations

import re
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from penstock_server.recipes.column_types import is_text
from penstock_server.recipes.filter_casts import cast, common_number
from penstock_server.recipes.filter_terms import NUMBERS, WHOLE, Mismatch, Term, condition, number, unless_nan

_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view)


def calculated(by: Literal["add", "subtract", "multiply"], a: Term, b: Term) -> Term:
    """Return a sum, difference or product. Raises Mismatch: a term is not a number."""
    a, b = _numbers(a, b)
    if a.type == pa.float64():
        return Term(value=unless_nan(getattr(pc, by)(a.value, b.value)), type=a.type)
    return Term(value=getattr(pc, f"{by}_checked")(a.value, b.value), type=a.type)


def quotient(a: Term, b: Term) -> Term:
    """Divide one number by another; by zero is null. Raises Mismatch: a term is not a number."""
    a, b = cast(_number(a), pa.float64()), cast(_number(b), pa.float64())
    return Term(value=unless_nan(pc.divide(a.value, _unless_zero(b.value, b.type))), type=a.type)


def remainder(a: Term, b: Term) -> Term:
    """Return the remainder of whole numbers, with the sign of the first; by zero is null. Raises Mismatch."""
    a, b = _numbers(a, b)
    if a.type not in WHOLE:
        raise Mismatch("takes the remainder of a number that need not be whole")
    divisor = _unless_zero(pc.abs(b.value), b.type)  # least / -1 would overflow, and the sign makes no difference
    return Term(value=pc.subtract(a.value, pc.multiply(pc.divide(a.value, divisor), divisor)), type=a.type)


def negated(term: Term) -> Term:
    """Negate a number. Raises Mismatch: the term is not a number."""
    if term.literal is not None and term.type in NUMBERS:
        return number(-term.literal.as_py())
    term = _filled(term, pa.int64())
    if term.type not in (pa.int64(), pa.float64()):
        raise Mismatch(f"puts a minus before {'a number that is never below zero' if term.type in NUMBERS else term.noun}")
    return Term(value=(pc.negate_checked if term.type in WHOLE else pc.negate)(term.value), type=term.type)


def like(term: Term, pattern: Term, *, ignore_case: bool = False) -> Term:
    """Test whether a text is LIKE a pattern. Raises Mismatch: they are not a text and a literal text."""
    term, text = _pattern(term, pattern)
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise Mismatch(r"has a pattern that ends with \, which takes the next character as it is. Write \\ for one")
    if "\\" in text:  # pyarrow does not treat it as an escape in an otherwise plain pattern, such as 'a\\\\%'
        return condition(pc.match_substring_regex(term.value, pattern=_as_regex(text), ignore_case=ignore_case))
    return condition(pc.match_like(term.value, pattern=text, ignore_case=ignore_case))


def _as_regex(pattern: str) -> str:
    """Convert a LIKE pattern to RE2's syntax."""
    parts = (
        re.escape(escaped) if escaped else {"%": ".*", "_": "."}.get(plain) or re.escape(plain)
        for escaped, plain in re.findall(r"\\(.)|(.)", pattern, re.DOTALL)
    )
    return rf"(?s)\A{''.join(parts)}\z"


def starts_with(term: Term, pattern: Term) -> Term:
    """Test whether a text begins with another. Raises Mismatch: they are not a text and a literal text."""
    term, text = _pattern(term, pattern)
    return condition(pc.starts_with(term.value, pattern=text))


def regexp_like(term: Term, pattern: Term) -> Term:
    """Search a text for a regular expression in RE2's syntax. Raises Mismatch: not texts, or an invalid expression."""
    term, text = _pattern(term, pattern)
    try:
        pc.match_substring_regex("", pattern=text)
    except pa.ArrowInvalid as error:
        raise Mismatch(f"has no regular expression in RE2's syntax: {error}") from error
    return condition(pc.match_substring_regex(term.value, pattern=text))


def cased(how: Literal["utf8_lower", "utf8_upper"], term: Term) -> Term:
    """Convert a text to lower or upper case. Raises Mismatch: the term is not a text."""
    term = _filled(term, pa.string())
    if not is_text(term.type):
        raise Mismatch(f"changes the case of {term.noun}")
    return Term(value=getattr(pc, how)(term.value), type=term.type)


def length(term: Term) -> Term:
    """Return the number of characters of a text, or of items of a list. Raises Mismatch: the term is neither."""
    term = _filled(term, pa.string())
    if is_text(term.type):
        return Term(value=pc.utf8_length(term.value).cast(pa.int64()), type=pa.int64())
    if not any(is_list(term.type) for is_list in _LISTS):
        raise Mismatch(f"measures {term.noun}. Only a text and a list have a length")
    return Term(value=pc.list_value_length(term.value).cast(pa.int64()), type=pa.int64())


def _pattern(term: Term, pattern: Term) -> tuple[Term, str]:
    """Return a text, and its pattern. Raises Mismatch: the term is not a text, or the pattern is not a literal text."""
    term = _filled(term, pa.string())
    if pattern.literal is None or not is_text(pattern.type):
        raise Mismatch("needs a literal text for a pattern, as 'en%'")
    if not is_text(term.type):
        raise Mismatch(f"looks for a text in {term.noun}")
    return term, pattern.literal.as_py()


def _numbers(a: Term, b: Term) -> tuple[Term, Term]:
    """Cast two numbers to one type. Raises Mismatch: one is not a number, or no type holds both."""
    a, b = _number(a), _number(b)
    common = common_number(a, b)
    if common not in NUMBERS:
        raise Mismatch(f"calculates with {a.type} and {b.type}, and no 64 bits hold both")
    return cast(a, common), cast(b, common)


def _number(term: Term) -> Term:
    """Return a term that is a number. Raises Mismatch: it is not a number."""
    term = _filled(term, pa.int64())
    if term.type not in NUMBERS:
        raise Mismatch(f"calculates with {term.noun}")
    return term


def _filled(term: Term, type_: pa.DataType) -> Term:
    """Cast a column of null type, as in a shard with only nulls, to nulls of a type; other terms stay."""
    return cast(term, type_) if pa.types.is_null(term.type) and term.literal is None else term


def _unless_zero(value: pc.Expression, type_: pa.DataType) -> pc.Expression:
    return pc.if_else(value == pa.scalar(0, type_), pa.scalar(None, type_), value)
