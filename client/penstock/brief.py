"""Errors told briefly: a message that says all needs no frames of this package beside it, of which a notebook shows pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from penstock.errors import PenstockError

P = ParamSpec("P")
T = TypeVar("T")


def hide_internal_traceback(function: Callable[P, T]) -> Callable[P, T]:
    """The function, whose caller sees of a PenstockError what it says and where it was called."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except PenstockError as error:
            raise error.with_traceback(None) from error.__cause__

    return call
