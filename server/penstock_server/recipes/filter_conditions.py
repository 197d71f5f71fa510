"""Conditions of a filter: comparisons, AND, OR and NOT, with the bounds that a file's statistics can rule out."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock_server.recipes.filter_casts import EQUALS_NULL, alike
from penstock_server.recipes.filter_terms import ANYWHERE, Mismatch, Term, condition, literal

Comparison = Callable[[Any, Any], pc.Expression]

_OPPOSITES: dict[Comparison, Comparison] = {
    operator.eq: operator.ne,
    operator.ne: operator.eq,
    operator.lt: operator.ge,
    operator.ge: operator.lt,
    operator.gt: operator.le,
    operator.le: operator.gt,
}


def truth(term: Term) -> Term:
    """Return a term that is true, false or null. Raises Mismatch: it is something else."""
    if pa.types.is_null(term.type):
        return literal(pa.scalar(None, pa.bool_()))
    if not pa.types.is_boolean(term.type):
        raise Mismatch(f"is {term.noun} and no condition. Compare it with something")
    return term


def all_of(a: Term, b: Term) -> Term:
    """Combine two conditions by AND: true if both are true, false if one is false."""
    return condition(pc.and_kleene(a.value, b.value), a.true_in & b.true_in, a.false_in | b.false_in)


def any_of(a: Term, b: Term) -> Term:
    """Combine two conditions by OR: true if one is true, false if both are false."""
    return condition(pc.or_kleene(a.value, b.value), a.true_in | b.true_in, a.false_in & b.false_in)


def opposite(term: Term) -> Term:
    """Negate a condition: true becomes false, and false true."""
    term = truth(term)
    return condition(~term.value, term.false_in, term.true_in)


def compared(by: Comparison, a: Term, b: Term) -> Term:
    """Compare two numbers, texts, booleans or times by = <> < <= > >=. Raises Mismatch: their types differ."""
    a, b = alike(a, b)
    value = by(a.value, b.value)
    if (a.stored is None or b.literal is None) and (a.literal is None or b.stored is None):
        return condition(value)
    stored = [term.value if term.stored is None else term.stored for term in (a, b)]
    return condition(value, by(*stored), _OPPOSITES[by](*stored))


def among(term: Term, *items: Term) -> Term:
    """Test whether a term is one of some literals. Raises Mismatch: their types differ, or one is null."""
    found: list[pc.Expression] = []
    true_in: list[pc.Expression] = []
    by_type: dict[pa.DataType, tuple[Term, list[pa.Scalar]]] = {}
    for item in items:
        if item.literal is None:
            raise Mismatch("has more than literals between its parentheses. Write it with = and or")
        if pa.types.is_null(item.type):  # in SQL no row is not in (1, null)
            raise Mismatch(EQUALS_NULL)
        subject, like = alike(term, item)
        by_type.setdefault(subject.type, (subject, []))[1].append(like.literal)
    for type_, (subject, scalars) in by_type.items():
        value, values = subject.value, pa.array(scalars, type_)
        least, largest = pc.min_max(values).values()
        if type_ == pa.float64():
            value, values = pc.add(value, 0.0), pc.add(values, 0.0)  # 0 and -0 are equal, but differ in a set
        found.append(pc.if_else(pc.is_valid(value), pc.is_in(value, values), pa.scalar(None, pa.bool_())))
        stored = subject.stored
        true_in.append(ANYWHERE if stored is None else (stored >= least) & (stored <= largest))
    return condition(reduce(pc.or_kleene, found), reduce(operator.or_, true_in))


def is_null(term: Term) -> Term:
    """Test for null: the result is true or false, never null."""
    value = pc.is_null(term.value)
    # Arrow does not compare the statistics of extension types, such as UUIDs.
    if term.stored is None or pa.types.is_nested(term.type) or isinstance(term.type, pa.BaseExtensionType):
        return condition(value)
    # NaN is null here, but not in the file.
    return condition(value, ANYWHERE if term.type == pa.float64() else pc.is_null(term.stored), pc.is_valid(term.stored))
