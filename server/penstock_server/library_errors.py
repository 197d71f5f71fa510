"""Errors of what is not ours: libraries and functions of people, which may raise anything.

Those in Rust panic, too, which Python gets as no Exception, so that whoever catches those lets a panic end a thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class LibraryError(Exception):
    """A library failed; `cause` is what it raised."""

    def __init__(self, cause: BaseException, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@contextmanager
def library_errors() -> Iterator[None]:
    """Raises LibraryError for whatever is raised inside, panics and exits among it, but not for a lack of memory or Ctrl-C."""
    try:
        yield
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        raise LibraryError(error, str(error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # its type is in no module that could be imported
            raise
        raise LibraryError(error, f"the library panics: {error}") from error
