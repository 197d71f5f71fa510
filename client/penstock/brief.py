"""Short tracebacks: a complete message needs no frames of this package, which fill pages of a notebook."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from penstock.errors import PenstockError

P = ParamSpec("P")
T = TypeVar("T")


def hide_internal_traceback(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that a PenstockError shows its message and the call, without inner frames."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except PenstockError as error:
            raise error.with_traceback(None) from error.__cause__

    return call
