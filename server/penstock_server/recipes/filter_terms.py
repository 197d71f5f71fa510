"""Terms of a filter's condition, as Arrow expressions: columns, literals, and combinations of them.

A condition that is neither true nor false for a row is null, and null propagates as in SQL. NaN is null, as in pandas and
SQLite: a comparison and its opposite both exclude it. So a file's statistics, which ignore NaN, rule out no row that
is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from penstock_server.recipes.column_types import is_text

WHOLE = (pa.int64(), pa.uint64())
_DIGITS = 18  # int64 holds every number of 18 digits
NUMBERS = (*WHOLE, pa.float64())
ANYWHERE, NOWHERE = pc.scalar(True), pc.scalar(False)


class Mismatch(ValueError):
    """An operation does not support the types of its terms; the message continues after the part's text."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Term:
    """Part of a condition.

    `value` computes it. Numbers are int64, uint64 or float64; other types are the column's own. `stored` is the column in the
    file, if the part is just a column. `literal` is the value, if the part is just a literal. `true_in` is a superset of the
    rows that make a condition true, and `false_in` of those that make it false. Both consist of columns and literals alone, so
    that a file's statistics can rule them out.
    """

    value: pc.Expression
    type: pa.DataType
    stored: pc.Expression | None = None
    literal: pa.Scalar | None = None
    true_in: pc.Expression = field(default_factory=lambda: ANYWHERE)
    false_in: pc.Expression = field(default_factory=lambda: ANYWHERE)

    @property
    def noun(self) -> str:
        """Return the kind of term, for a message."""
        if self.type in NUMBERS:
            return "a number"
        if is_text(self.type):
            return "a text"
        if pa.types.is_boolean(self.type):
            return "a truth value"
        return "null" if pa.types.is_null(self.type) else f"a value of type {self.type}"


def literal(scalar: pa.Scalar) -> Term:
    """Make a term of a literal: a text, true, false or null."""
    says = scalar.as_py() if pa.types.is_boolean(scalar.type) else None
    return Term(
        value=pc.scalar(scalar),
        type=scalar.type,
        literal=scalar,
        true_in=ANYWHERE if says is True else NOWHERE,
        false_in=ANYWHERE if says is False else NOWHERE,
    )


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
    if isinstance(type_, pa.BaseExtensionType) and is_text(type_):  # Arrow does not compare its statistics
        return Term(value=value.cast(pa.large_string()), type=pa.large_string())
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
        value = value.cast(type_)
    if pa.types.is_string_view(type_):
        type_ = pa.string()
        value = value.cast(type_)
    if pa.types.is_boolean(type_):
        return Term(value=value, type=type_, stored=value, true_in=value == pc.scalar(True), false_in=value == pc.scalar(False))
    if pa.types.is_integer(type_) and type_ != pa.uint64():
        value = value.cast(pa.int64())
        return Term(value=value, type=pa.int64(), stored=value)
    if pa.types.is_floating(type_):
        value = value.cast(pa.float64())
        return Term(value=unless_nan(value), type=pa.float64(), stored=value)
    if pa.types.is_decimal(type_):
        if type_.scale == 0 and type_.precision <= _DIGITS:  # pyarrow cannot cast a 32-bit decimal directly
            return Term(value=value.cast(pa.decimal128(_DIGITS, 0)).cast(pa.int64()), type=pa.int64())
        # Cast through text, to the nearest float: directly Arrow makes 0.9500000000000001 of 0.95, which equals no literal.
        return Term(value=value.cast(pa.string()).cast(pa.float64()), type=pa.float64())
    return Term(value=value, type=type_, stored=value)


def condition(value: pc.Expression, true_in: pc.Expression = ANYWHERE, false_in: pc.Expression = ANYWHERE) -> Term:
    """Make a boolean term, which may be null."""
    return Term(value=value, type=pa.bool_(), true_in=true_in, false_in=false_in)


def unless_nan(value: pc.Expression) -> pc.Expression:
    """Replace NaN by null in a float64."""
    return pc.if_else(pc.is_nan(value), pa.scalar(None, pa.float64()), value)
