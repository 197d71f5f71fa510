"""Wording: what messages have in common."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """The number and what it counts: "1 row", "2,000 rows"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
