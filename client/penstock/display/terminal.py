"""What a terminal is given: nothing that it would obey, wrapped at its width, coloured where that is wanted.

Columns are counted too high rather than too low where terminals differ: a line that is short harms nothing, one that the
terminal wraps breaks the table.
"""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, groupby, takewhile
from typing import NamedTuple, TextIO

from penstock.printable import JOINERS, printable, spelled_out

PLAIN, BOLD, DIM, RED, GREEN, YELLOW, CYAN = "", "1", "2", "31", "32", "33", "36"

_PIPE_COLUMNS = 100
_MIN_COLUMNS = 40
_MAX_ID = 10  # digits
_MIN_LEFT_OUT = 24  # to say that fewer are left out would take more room than they do
_EMOJI_VARIANT = "\ufe0f"  # makes some characters before it one column wider


@dataclass(frozen=True, slots=True)
class Terminal:
    """How wide lines may be, and whether they may have colours."""

    columns: int
    has_colours: bool

    @classmethod
    def of(cls, stream: TextIO, environment: Mapping[str, str] = os.environ) -> Terminal:
        """The terminal behind a stream; a pipe has none, and gets a fixed width and no colours. See no-color.org.

        Nor has a cell of a notebook colours: it passes for a terminal, but would show what is dimmed like all else.
        """
        is_terminal = stream.isatty()
        unwanted = ("NO_COLOR", "JPY_PARENT_PID")  # the latter is there in what a kernel of Jupyter runs
        wanted = not any(map(environment.get, unwanted)) and environment.get("TERM") != "dumb"
        columns = shutil.get_terminal_size((80 if is_terminal else _PIPE_COLUMNS, 24)).columns
        return cls(max(columns, _MIN_COLUMNS), is_terminal and wanted)

    def paint(self, text: str, style: str) -> str:
        """The text in a style, if there are colours."""
        return f"\x1b[{style}m{text}\x1b[0m" if style and text and self.has_colours else text

    def line(self, units: Iterable[Unit]) -> str:
        """Units as one line."""
        runs = groupby(units, key=lambda unit: unit.style)
        return "".join(self.paint("".join(unit.text for unit in run), style) for style, run in runs)

    def paragraph(self, text: str, style: str = PLAIN, margin: int = 0) -> list[str]:
        """The lines of a text, wrapped where a left margin of so many columns is left; the margin is not in them."""
        return [self.line(line) for line in wrap(units(text, style), self.columns - margin)]


class Unit(NamedTuple):
    """What is not broken while it fits a line: mostly a character as it is shown, and its style."""

    text: str
    style: str


def units(text: str, style: str) -> Iterator[Unit]:
    """The characters of a text as they are shown; those that are spelled out stand back a little."""
    for character in text:
        spelled = spelled_out(character)
        yield Unit(spelled, style if spelled == character else CYAN)


def columns_of(text: str) -> int:
    """The columns that a printable text takes, at most."""
    return len(text) if text.isascii() else sum(map(_columns, text))


@lru_cache(maxsize=4096)
def _columns(character: str) -> int:
    if character == _EMOJI_VARIANT:
        return 1
    if character in JOINERS or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def wrap(shown: Iterable[Unit], width: int) -> list[list[Unit]]:
    """Lines of at most `width` columns, broken after spaces and around wide characters where that is possible."""
    lines: list[list[Unit]] = []
    line: list[Unit] = []
    used = breakable = 0  # columns in the line; how many of its units may be kept when it is broken
    for unit in chain.from_iterable(_fitted(given, width) for given in shown):
        size = columns_of(unit.text)
        if size == 0 and line:  # an accent stays with its letter
            line[-1] = line[-1]._replace(text=line[-1].text + unit.text)
            continue
        if unit.text == " " and used == width:
            lines.append(line)
            line, used, breakable = [], 0, 0
            continue
        while used + size > width and line:
            cut = len(line) if size == 2 else breakable or len(line)
            lines.append(line[: cut - 1] if line[cut - 1].text == " " else line[:cut])
            line, breakable = line[cut:], 0
            used = sum(columns_of(kept.text) for kept in line)
        line.append(unit)
        used += size
        if unit.text in (" ", "↵") or size == 2:
            breakable = len(line)
    return [*lines, line] if line else lines


def _fitted(unit: Unit, width: int) -> Iterator[Unit]:
    if columns_of(unit.text) <= width:
        yield unit
    else:
        yield from (Unit(character, unit.style) for character in unit.text)


def abridge(text: str, columns: int) -> tuple[str, int, str]:
    """The beginning and the end of a text that is too long, and how many characters between them are left out."""
    if len(text) <= 2 * columns and columns_of(printable(text)) <= columns:
        return text, 0, ""
    head, tail = _fitting(text, columns * 2 // 3), _fitting(reversed(text), columns // 3)
    # Half of a token id is another one.
    head -= _cut_digits(text[:head][::-1], text[head : head + 1])
    tail -= _cut_digits(text[len(text) - tail :], text[len(text) - tail - 1 : len(text) - tail])
    left_out = len(text) - head - tail
    return (text, 0, "") if left_out < _MIN_LEFT_OUT else (text[:head], left_out, text[len(text) - tail :])


def _cut_digits(kept: str, beyond: str) -> int:
    """How many digits `kept` begins with of a token id that the cut between it and `beyond` goes through."""
    digits = len(kept) - len(kept.lstrip("0123456789")) if beyond.isdecimal() else 0
    return digits if digits <= _MAX_ID else 0


def _fitting(text: Iterable[str], columns: int) -> int:
    """How many characters of a text fit into so many columns."""
    ends = accumulate(columns_of(spelled_out(character)) for character in text)
    return sum(1 for _ in takewhile(lambda end: end <= columns, ends))
