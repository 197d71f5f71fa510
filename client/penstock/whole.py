"""Numbers as callers give them: numpy's and torch's whole ones are as good as Python's."""

from __future__ import annotations

import operator
from typing import Any

from penstock.errors import SpecError


def plain(value: Any) -> Any:
    """A whole number as Python's own; anything else as it is, True and False among it, for whoever checks it to refuse."""
    if isinstance(value, int):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def check_whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """The value of a parameter as Python's own number. Raises SpecError: it is no whole number within these bounds."""
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, int) or found < low or (high is not None and found > high):
        bounds = f"from {low:,}" if high is None else f"from {low:,} to {high:,}"
        raise SpecError(f"{name} must be a whole number {bounds}, not {value!r}", (name,))
    return found


def check_amount(name: str, value: object) -> None:
    """Raises SpecError: the value of a parameter is no number from 0."""
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, int | float) or not found >= 0:
        raise SpecError(f"{name} must be a number from 0, not {value!r}", (name,))
