"""Whole numbers as callers give them: numpy's and torch's are as good as Python's."""

from __future__ import annotations

import operator
from typing import Any


def plain(value: Any) -> Any:
    """A whole number as Python's own; anything else as it is, True and False among it, for whoever checks it to refuse."""
    if isinstance(value, int):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value
