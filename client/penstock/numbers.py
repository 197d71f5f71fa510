"""Checks of numbers from callers; those of numpy, torch and enums are converted to Python's."""

from __future__ import annotations

import operator
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
    """Whether a value is an int; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return the value of a parameter as an int. Raises SpecError: it is not an integer within these bounds."""
    number = plain(value)
    if not is_whole(number) or number < low or (high is not None and number > high):
        bounds = f"from {low:,}" if high is None else f"from {low:,} to {high:,}"
        raise SpecError(f"{name} must be a whole number {bounds}, not {value!r}", (name,))
    return number


def check_amount(name: str, value: object) -> float:
    """Return the value of a parameter as a float. Raises SpecError: it is not a number >= 0."""
    number = plain(value)
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    if not is_number or not number >= 0:
        raise SpecError(f"{name} must be >= 0, not {value!r}", (name,))
    return float(number)
