"""What a filter's condition may calculate: + - * / %, length, lower and upper, and what texts may be compared with: patterns.

`/` divides as numbers do, 7 / 2 is 3.5; a division by zero is null. Whole numbers never wrap: what does not fit 64 bits
fails when it is calculated.
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
    """A sum, difference or product. Raises Mismatch: they are no numbers."""
    a, b = _numbers(a, b)
    if a.type == pa.float64():
        return Term(value=unless_nan(getattr(pc, by)(a.value, b.value)), type=a.type)
    return Term(value=getattr(pc, f"{by}_checked")(a.value, b.value), type=a.type)


def quotient(a: Term, b: Term) -> Term:
    """One number divided by another, null by zero. Raises Mismatch: they are no numbers."""
    a, b = cast(_number(a), pa.float64()), cast(_number(b), pa.float64())
    return Term(value=unless_nan(pc.divide(a.value, _unless_zero(b.value, b.type))), type=a.type)


def remainder(a: Term, b: Term) -> Term:
    """What is left of one whole number divided by another, with the sign of the first, null by zero. Raises Mismatch."""
    a, b = _numbers(a, b)
    if a.type not in WHOLE:
        raise Mismatch("takes the remainder of a number that need not be whole")
    divisor = _unless_zero(pc.abs(b.value), b.type)  # least / -1 would overflow, and the sign makes no difference
    return Term(value=pc.subtract(a.value, pc.multiply(pc.divide(a.value, divisor), divisor)), type=a.type)


def negated(term: Term) -> Term:
    """Minus a number. Raises Mismatch: it is none."""
    if term.literal is not None and term.type in NUMBERS:
        return number(-term.literal.as_py())
    term = _filled(term, pa.int64())
    if term.type not in (pa.int64(), pa.float64()):
        raise Mismatch(f"puts a minus before {'a number that is never below zero' if term.type in NUMBERS else term.noun}")
    return Term(value=(pc.negate_checked if term.type in WHOLE else pc.negate)(term.value), type=term.type)


def like(term: Term, pattern: Term, *, ignore_case: bool = False) -> Term:
    """Whether a text is LIKE a pattern. Raises Mismatch: they are no text and no literal text."""
    term, text = _pattern(term, pattern)
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise Mismatch(r"has a pattern that ends with \, which takes the next character as it is. Write \\ for one")
    if "\\" in text:  # pyarrow takes it for a character of its own where the rest is plain, as in 'a\\\\%'
        return condition(pc.match_substring_regex(term.value, pattern=_as_regex(text), ignore_case=ignore_case))
    return condition(pc.match_like(term.value, pattern=text, ignore_case=ignore_case))


def _as_regex(pattern: str) -> str:
    """A pattern of LIKE in RE2's syntax."""
    parts = (
        re.escape(escaped) if escaped else {"%": ".*", "_": "."}.get(plain) or re.escape(plain)
        for escaped, plain in re.findall(r"\\(.)|(.)", pattern, re.DOTALL)
    )
    return rf"(?s)\A{''.join(parts)}\z"


def starts_with(term: Term, pattern: Term) -> Term:
    """Whether a text begins with another. Raises Mismatch: they are no text and no literal text."""
    term, text = _pattern(term, pattern)
    return condition(pc.starts_with(term.value, pattern=text))


def regexp_like(term: Term, pattern: Term) -> Term:
    """Whether a regular expression is found in a text, in RE2's syntax. Raises Mismatch: they are no text, or it is none."""
    term, text = _pattern(term, pattern)
    try:
        pc.match_substring_regex("", pattern=text)
    except pa.ArrowInvalid as error:
        raise Mismatch(f"has no regular expression in RE2's syntax: {error}") from error
    return condition(pc.match_substring_regex(term.value, pattern=text))


def cased(how: Literal["utf8_lower", "utf8_upper"], term: Term) -> Term:
    """A text in lower or upper case. Raises Mismatch: it is none."""
    term = _filled(term, pa.string())
    if not is_text(term.type):
        raise Mismatch(f"changes the case of {term.noun}")
    return Term(value=getattr(pc, how)(term.value), type=term.type)


def length(term: Term) -> Term:
    """The characters of a text, or the items of a list. Raises Mismatch: it is neither."""
    term = _filled(term, pa.string())
    if is_text(term.type):
        return Term(value=pc.utf8_length(term.value).cast(pa.int64()), type=pa.int64())
    if not any(is_list(term.type) for is_list in _LISTS):
        raise Mismatch(f"measures {term.noun}. Only a text and a list have a length")
    return Term(value=pc.list_value_length(term.value).cast(pa.int64()), type=pa.int64())


def _pattern(term: Term, pattern: Term) -> tuple[Term, str]:
    """A text, and what it is compared with. Raises Mismatch: it is no text, or the pattern is no literal text."""
    term = _filled(term, pa.string())
    if pattern.literal is None or not is_text(pattern.type):
        raise Mismatch("needs a literal text for a pattern, as 'en%'")
    if not is_text(term.type):
        raise Mismatch(f"looks for a text in {term.noun}")
    return term, pattern.literal.as_py()


def _numbers(a: Term, b: Term) -> tuple[Term, Term]:
    """Two numbers as one type. Raises Mismatch: one is none, or no type holds both."""
    a, b = _number(a), _number(b)
    common = common_number(a, b)
    if common not in NUMBERS:
        raise Mismatch(f"calculates with {a.type} and {b.type}, and no 64 bits hold both")
    return cast(a, common), cast(b, common)


def _number(term: Term) -> Term:
    """A number. Raises Mismatch: it is none."""
    term = _filled(term, pa.int64())
    if term.type not in NUMBERS:
        raise Mismatch(f"calculates with {term.noun}")
    return term


def _filled(term: Term, type_: pa.DataType) -> Term:
    """A column of no type, as that of a shard in which it is all null, as nulls of a type; other terms as they are."""
    return cast(term, type_) if pa.types.is_null(term.type) and term.literal is None else term


def _unless_zero(value: pc.Expression, type_: pa.DataType) -> pc.Expression:
    return pc.if_else(value == pa.scalar(0, type_), pa.scalar(None, type_), value)
