"""Wording: what messages have in common."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def counted(number: int, noun: str, plural: str = "") -> str:
    """The number and what it counts: "1 row", "2,000 rows"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Sequence[str], most: int = 20) -> str:
    """Names one after another; of more than `most` the first, and how many there are beside them."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def size(num_bytes: float) -> str:
    """Bytes as people say them."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes / 1e3:,.1f} kB"


def rows_kept(num_rows: int, num_kept: int | None) -> str:
    """The rows of a dataset and how many of them its filter keeps; None where that is not known yet."""
    rows = counted(num_rows, "row")
    if num_kept is None:
        return f"{rows} before its filter"
    return rows if num_kept == num_rows else f"{num_kept:,} of {rows}"


def cut(text: str, most: int = 40) -> str:
    """A text to quote in a sentence: of one that is longer than `most` its beginning."""
    return text if len(text) <= most else text[:most] + "..."


def as_utf8(text: str) -> str:
    """A text in which what UTF-8 cannot hold is spelled out, such as the names of some files."""
    return text.encode("utf-8", "backslashreplace").decode()


def one_line(error: BaseException) -> str:
    """What an error says, to stand inside a sentence: in one line, without a full stop."""
    return " ".join(str(error).split()).rstrip(".")


def without_passwords(text: str) -> str:
    """A text in which addresses do not tell who asks, as in http://me:secret@host: it is for logs and terminals."""
    return re.sub(r"(\w://)[^/\s]*@", r"\1", text)


def without_login(addresses: object) -> str:
    """What was given for an address, or for several, as Python spells it, but for a name and a password before the host."""
    return re.sub(r"""(['"]\s*(?:\w+://)?)[^'"]*@""", r"\1", repr(addresses))


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
