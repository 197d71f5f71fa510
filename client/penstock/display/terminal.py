"""Terminal output: control characters escaped, lines wrapped at the terminal's width, optional colours.

If terminals differ in a character's width, the wider one counts: a short line is harmless, but a line that the terminal
wraps breaks the table.
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
_MIN_LEFT_OUT = 24  # characters; a note about fewer omitted ones would be longer than they are
_EMOJI_VARIANT = "\ufe0f"  # makes some characters before it one column wider


@dataclass(frozen=True, slots=True)
class Terminal:
    """Terminal properties: the width of lines, and whether they may have colours."""

    columns: int
    has_colours: bool

    @classmethod
    def of(cls, stream: TextIO, environment: Mapping[str, str] = os.environ) -> Terminal:
        """Detect the terminal of a stream. A pipe gets a fixed width and no colours. See no-color.org.

        A notebook cell gets no colours either: it passes for a terminal, but does not dim text.
        """
        is_terminal = stream.isatty()
        unwanted = ("NO_COLOR", "JPY_PARENT_PID")  # Jupyter kernels set the latter
        wanted = not any(map(environment.get, unwanted)) and environment.get("TERM") != "dumb"
        columns = shutil.get_terminal_size((80 if is_terminal else _PIPE_COLUMNS, 24)).columns
        return cls(max(columns, _MIN_COLUMNS), is_terminal and wanted)

    def paint(self, text: str, style: str) -> str:
        """Style a text, if the terminal has colours."""
        return f"\x1b[{style}m{text}\x1b[0m" if style and text and self.has_colours else text

    def line(self, units: Iterable[Unit]) -> str:
        """Join units to one line."""
        runs = groupby(units, key=lambda unit: unit.style)
        return "".join(self.paint("".join(unit.text for unit in run), style) for style, run in runs)

    def paragraph(self, text: str, style: str = PLAIN, margin: int = 0) -> list[str]:
        """Wrap a text into lines that leave room for a left margin of `margin` columns; lines exclude the margin."""
        return [self.line(line) for line in wrap(units(text, style), self.columns - margin)]


class Unit(NamedTuple):
    """Unbreakable piece of a line and its style: mostly one printable character."""

    text: str
    style: str


def units(text: str, style: str) -> Iterator[Unit]:
    """Yield the printable characters of a text; escaped ones get another colour."""
    for character in text:
        spelled = spelled_out(character)
        yield Unit(spelled, style if spelled == character else CYAN)


def columns_of(text: str) -> int:
    """Return the maximum width of a printable text, in columns."""
    return len(text) if text.isascii() else sum(map(_columns, text))


@lru_cache(maxsize=4096)
def _columns(character: str) -> int:
    if character == _EMOJI_VARIANT:
        return 1
    if character in JOINERS or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def wrap(shown: Iterable[Unit], width: int) -> list[list[Unit]]:
    """Wrap units into lines of at most `width` columns, preferably after spaces and around wide characters."""
    lines: list[list[Unit]] = []
    line: list[Unit] = []
    used = breakable = 0  # columns of the line; number of units before its last possible break
    for unit in chain.from_iterable(_fitted(given, width) for given in shown):
        size = columns_of(unit.text)
        if size == 0 and line:  # a combining accent stays with its letter
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
    """Abridge a long text: return its beginning, the number of omitted characters, and its end."""
    if len(text) <= 2 * columns and columns_of(printable(text)) <= columns:
        return text, 0, ""
    head, tail = _fitting(text, columns * 2 // 3), _fitting(reversed(text), columns // 3)
    # Do not cut a token id: its digits would read as another id.
    head -= _cut_digits(text[:head][::-1], text[head : head + 1])
    tail -= _cut_digits(text[len(text) - tail :], text[len(text) - tail - 1 : len(text) - tail])
    left_out = len(text) - head - tail
    return (text, 0, "") if left_out < _MIN_LEFT_OUT else (text[:head], left_out, text[len(text) - tail :])


def _cut_digits(kept: str, beyond: str) -> int:
    """Count the leading digits of `kept` that belong to a token id cut at the border to `beyond`."""
    digits = len(kept) - len(kept.lstrip("0123456789")) if beyond.isdecimal() else 0
    return digits if digits <= _MAX_ID else 0


def _fitting(text: Iterable[str], columns: int) -> int:
    """Count the characters of a text that fit into `columns`."""
    ends = accumulate(columns_of(spelled_out(character)) for character in text)
    return sum(1 for _ in takewhile(lambda end: end <= columns, ends))
