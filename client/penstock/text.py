"""Text of messages: formatting, and escapes of control characters for terminals and logs."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import lru_cache

_JOINERS = "\u200c\u200d"  # zero-width; without them Persian and many emoji are spelled wrong
_MARKS = {"\n": "↵", "\t": "⇥", "\x7f": "␡"}


def counted(number: int, noun: str, plural: str = "") -> str:
    """Format a number with its noun: "1 row", "2,000 rows"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Sequence[str], most: int = 20) -> str:
    """Join names with commas: the first `most` of them, then the number of the others."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def size(num_bytes: float) -> str:
    """Format a number of bytes as kB, MB, GB or TB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes / 1e3:,.1f} kB"


def short(number: float) -> str:
    """Format a number with three digits, such as 1.23M or 456k."""
    for letter, unit in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.3g}"


def rows_kept(num_rows: int, num_kept: int | None) -> str:
    """Format a dataset's rows and the number that its filter keeps; None: not known yet."""
    rows = counted(num_rows, "row")
    if num_kept is None:
        return f"{rows} before its filter"
    return rows if num_kept == num_rows else f"{num_kept:,} of {rows}"


def cut(text: str, most: int = 40) -> str:
    """Truncate a quoted text to `most` characters and "..."."""
    return text if len(text) <= most else text[:most] + "..."


def as_utf8(text: str) -> str:
    """Escape characters that UTF-8 cannot encode, as in some file names."""
    return text.encode("utf-8", "backslashreplace").decode()


def one_line(error: BaseException) -> str:
    """Format an error's message for use inside a sentence: one line, no full stop."""
    return " ".join(str(error).split()).rstrip(".")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for an unknown name, to follow a sentence; "" if no known name is close."""
    return "".join(f" Did you mean {close!r}?" for close in get_close_matches(name, list(known), n=1))


def printable(text: str) -> str:
    """Spell out what a terminal would obey or hide: ␛ for an escape, ↵ for a line feed, <U+202E> for an override."""
    return text if text.isprintable() else "".join(map(_printable_character, text))


def printable_lines(text: str) -> str:
    """Return the printable text with its line feeds."""
    return "\n".join(map(printable, text.split("\n")))


@lru_cache(maxsize=4096)
def _printable_character(character: str) -> str:
    if character in _MARKS:
        return _MARKS[character]
    if character < " ":
        return chr(0x2400 + ord(character))
    category = unicodedata.category(character)
    if (category[0] == "C" and character not in _JOINERS) or category in ("Zl", "Zp"):
        return f"<U+{ord(character):04X}>"
    return character
