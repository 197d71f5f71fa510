"""Wording: what messages have in common."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path


def counted(number: int, noun: str, plural: str = "") -> str:
    """The number and what it counts: "1 row", "2,000 rows"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def rows_kept(num_rows: int, num_kept: int | None) -> str:
    """The rows of a dataset and how many of them its filter keeps; None where that is not known yet."""
    rows = counted(num_rows, "row")
    if num_kept is None:
        return f"{rows} before its filter"
    return rows if num_kept == num_rows else f"{num_kept:,} of {rows}"


def without_passwords(text: str) -> str:
    """A text in which addresses do not tell who asks, as in http://me:secret@host: it is for logs and terminals."""
    return re.sub(r"(\w://)[^/\s]*@", r"\1", text)


def print_anything() -> None:
    """From now on stdout and stderr take anything: a terminal without Chinese, or none at all, is no reason to fail."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115  # a stdout that is closed is None
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextmanager
def readers_may_leave() -> Iterator[None]:
    """What reads stdout, such as head, may have seen enough: the block then ends, and that is no error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        give_stdout_up()


def give_stdout_up() -> None:
    """From now on what is printed goes nowhere: Python would write the rest of it at its exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question to put after a sentence on a name that is none of the known ones; "" if none of them is close."""
    close = _closest(name, known)
    return f" Did you mean {close!r}?" if close else ""


def perhaps(name: str, known: Iterable[str]) -> str:
    """The same question in brackets, to stand inside a sentence."""
    close = _closest(name, known)
    return f" (did you mean {close!r}?)" if close else ""


def _closest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(get_close_matches(name, list(known), n=1)), None)
