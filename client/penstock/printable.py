"""Printable: texts of others as terminals and logs may have them. Nothing that they would obey is left."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

JOINERS = "\u200c\u200d"  # zero-width; without them Persian and many emoji are spelled wrong
_MARKS = {"\n": "↵", "\t": "⇥", "\x7f": "␡"}


def printable(text: str) -> str:
    """The text with what a terminal would obey, or not show, spelled out: ␛ for an escape, ↵ for a new line, <U+202E>."""
    return text if text.isprintable() else "".join(map(spelled_out, text))


def printable_lines(text: str) -> str:
    """The text, printable but for the ends of its lines."""
    return "\n".join(map(printable, text.split("\n")))


@lru_cache(maxsize=4096)
def spelled_out(character: str) -> str:
    """One character; see printable."""
    if character in _MARKS:
        return _MARKS[character]
    if character < " ":
        return chr(0x2400 + ord(character))
    category = unicodedata.category(character)
    if (category[0] == "C" and character not in JOINERS) or category in ("Zl", "Zp"):
        return f"<U+{ord(character):04X}>"
    return character
