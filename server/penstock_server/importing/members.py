"""Members of JSON objects, as they are written: some are left out, and some become text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator

from penstock_server.importing.stream import BYTE_ORDER_MARK

_DECODER = json.JSONDecoder()
_MARK = re.compile(r"[ \t\r]*([{}:,])[ \t\r]*")


def rewrite(lines: bytes, columns: Collection[str] | None, text: Collection[str]) -> bytes:
    """Return the lines with only the keys in `columns`, None for all.

    A value of a key in `text` becomes a string with its JSON; a string and null stay as they are.
    Raises ValueError: a line is not JSON.
    """

    def rewritten(line: bytes) -> bytes:
        if not line.lstrip(b" \t\r").startswith(b"{"):
            return line  # blank, or not an object: the parser reports it
        members = _members(line.decode())
        kept = (
            (key, json.dumps(value) if key in text and value[0] != '"' and value != "null" else value)
            for key, value in members
            if columns is None or key in columns
        )
        return b"{%s}" % ",".join(f"{json.dumps(key)}:{value}" for key, value in kept).encode()

    return b"\n".join(map(rewritten, lines.removeprefix(BYTE_ORDER_MARK).split(b"\n")))


def _members(line: str) -> Iterator[tuple[str, str]]:
    """Yield the keys of an object and the JSON of their values. Raises ValueError: it is not exactly one object."""
    mark, at = _mark(line, 0, "{")
    if line.startswith("}", at):
        mark, at = _mark(line, at, "}")
    while mark != "}":
        key, end = _DECODER.raw_decode(line, at)
        if not isinstance(key, str):
            raise ValueError(f"a key is no string, but {line[at:end][:80]}")
        _, begin = _mark(line, end, ":")
        _, end = _DECODER.raw_decode(line, begin)
        yield key, line[begin:end]
        mark, at = _mark(line, end, ",}")
    if at < len(line):
        raise ValueError("it is not exactly one object")


def _mark(line: str, at: int, expected: str) -> tuple[str, int]:
    """Return the mark at `at`, and the offset of the text after it. Raises ValueError: the mark is not one of `expected`."""
    found = _MARK.match(line, at)
    if not found or found[1] not in expected:
        raise ValueError(f"{' or '.join(map(repr, expected))} is missing at character {at + 1:,}")
    return found[1], found.end()
