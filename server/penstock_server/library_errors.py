"""Errors of libraries and user functions, which may raise anything.

Rust libraries may also panic. A panic is a BaseException: `except Exception` would let it end a thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class LibraryError(Exception):
    """A failure of a library; `cause` is its exception."""

    def __init__(self, cause: BaseException, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@contextmanager
def library_errors() -> Iterator[None]:
    """Convert exceptions, panics and exits inside to LibraryError, but not MemoryError or Ctrl-C."""
    try:
        yield
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        raise LibraryError(error, str(error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the type cannot be imported from any module
            raise
        raise LibraryError(error, f"the library panics: {error}") from error
