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
    """Raises LibraryError for whatever is raised inside, panics among it; a lack of memory and Ctrl-C stay what they are."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise LibraryError(error, str(error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # its type is in no module that could be imported
            raise
        raise LibraryError(error, f"the library panics: {error}") from error
