"""Panics of libraries in Rust: Python gets them as no Exception, so that whoever catches those lets them end a thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Panic(Exception):
    """A library met what it did not reckon with."""


@contextmanager
def panics_are_errors() -> Iterator[None]:
    """Raises Panic where a library panics."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # its type is in no module that could be imported
            raise
        raise Panic(f"the library panics: {error}") from error
