"""Numbers as callers give them: numpy's and torch's, and members of enums, are as good as Python's, and are kept as those."""

from __future__ import annotations

import operator
from math import inf
from numbers import Real
from typing import Any, TypeGuard

from penstock.errors import SpecError


def plain(value: Any) -> Any:
    """Convert an integer type to int; return any other value unchanged, bools too, for the caller's check to refuse."""
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def is_whole(value: object) -> TypeGuard[int]:
    """Whether this is a whole number, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """The value of a parameter as Python's own number. Raises SpecError: it is no whole number within these bounds."""
    found = plain(value)
    if not is_whole(found) or found < low or (high is not None and found > high):
        bounds = f"from {low:,}" if high is None else f"from {low:,} to {high:,}"
        raise SpecError(f"{name} must be a whole number {bounds}, not {value!r}", (name,))
    return found


def check_amount(name: str, value: object) -> float:
    """The value of a parameter as Python's own number. Raises SpecError: it is no number from 0."""
    found = plain(value)
    is_number = isinstance(found, Real) and not isinstance(found, bool)
    if not is_number or not found >= 0:
        raise SpecError(f"{name} must be a number from 0, not {value!r}", (name,))
    try:
        return float(found)
    except OverflowError:
        return inf
