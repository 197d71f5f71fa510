"""Row ends in a CSV file: a line break within quotes does not end a row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from penstock_server.importing.source import ImportRefused
from penstock_server.importing.stream import BYTE_ORDER_MARK, Stream

Kind = Literal["doubled", "backslash", "none"]

_BLOCK_BYTES = 1 << 20
_MAX_ROW_BYTES = 4 << 20  # a longer one is refused: memory must be bounded


class Quoting:
    """Quoting of fields, for files with this delimiter: as pyarrow reads them, to the byte.

    doubled    a quote at the start of a field opens it and must be closed; a quote within is written twice
    backslash  likewise, or as a backslash and a quote; a backslash also escapes a backslash, delimiter or line break
    none       quotes are characters like any other

    A quote within an unquoted field is a character. From the start of a row, `rows` matches all whole rows, `header` the first
    row that is not blank, `fields` everything up to a quote or backslash that is wrong, or whose field has not ended. Each
    looks at the byte before. `quoted` matches a quoted field without its last quote.
    """

    def __init__(self, kind: Kind, delimiter: str) -> None:
        edges = re.escape(delimiter.encode()) + rb"\r\n"
        self.kind = kind
        escaped = rb'\\["\\%b]' % edges
        special = {"doubled": b'"', "backslash": rb'"\\', "none": b""}[kind]
        plain = rb"[^%b]" % special if special else rb"[\s\S]"
        inner = rb'""|' + escaped if kind == "backslash" else b'""'
        quoted = rb'"%b*+(?:(?:%b)%b*+)*+' % (plain, inner, plain)
        # Only blanks may follow in the field: pyarrow accepts other text, but it shows that quotes mean something else here.
        marked = rb'(?<=[%b])%b" *(?=[%b])|(?<![%b])"' % (edges, quoted, edges, edges)
        if kind == "backslash":
            marked += rb'|%b"*+' % escaped
        marked = rb"(?:%b)" % marked if special else rb"(?!)"
        self.rows = re.compile(rb"(?:%b*+%b)*%b*[\r\n]" % (plain, marked, plain))
        self.header = re.compile(rb"[\r\n]*+(?:[^%b\r\n]*+%b)*+[^%b\r\n]*+[\r\n]" % (special, marked, special))
        self.fields = re.compile(rb"(?:%b*+%b)*+%b*+" % (plain, marked, plain))
        self.quoted = re.compile(quoted)


def row_portions(path: Path, stream: Stream, quoting: Quoting) -> Iterator[bytes]:
    """Yield a CSV file about a MiB at a time: the header alone, then whole rows after the header; nothing if it is blank.

    pyarrow must not cut the file itself: it takes a CR at the end of a block and the LF that follows for one line break, and
    drops the LF, also within quotes.

    Raises ImportRefused: the fields violate the quoting, or a row is too long for memory.
    """
    # The byte before each row, also the first, is a line break: the number of line breaks is the number of started lines.
    header, num_lines, at_end = b"", 0, False
    rest = b"\n" + stream.bytes.read(len(BYTE_ORDER_MARK)).removeprefix(BYTE_ORDER_MARK)
    while not at_end:
        block = stream.bytes.read(_BLOCK_BYTES)
        at_end = not block
        rest += block or b"\n"
        if not header and (first := quoting.header.match(rest)):
            header, rest = first[0], rest[first.end() :]
            num_lines = header.count(b"\n")
            yield header
        if header and (rows := quoting.rows.match(header + rest, len(header))):
            yield rows.string[: rows.end()]
            num_lines += rows[0].count(b"\n")
            rest = rows.string[rows.end() :]
        if at_end or len(rest) > _MAX_ROW_BYTES:
            _check(path, num_lines, quoting, header + rest, len(header), at_end)


def _check(path: Path, line: int, quoting: Quoting, data: bytes, begin: int, at_end: bool) -> None:
    """Check the row of `data` at `begin`. Raises ImportRefused: its quoting is wrong, or it is too long."""
    fields = quoting.fields.match(data, begin)
    opening = fields.end() if fields else begin
    quoted = quoting.quoted.match(data, opening)
    end = quoted.end() if quoted else opening
    here, line_there = data[end : end + 1], line + data.count(b"\n", begin, end)
    around = data[max(opening, end - 40) : end + 40].decode(errors="replace")
    if here == b'"' and data[end + 1 :].strip(b" "):
        raise _refused(
            path,
            line_there,
            f"text follows the quote that closes a field: {around!r}",
            "Within quotes write a quote twice, or say how the file is written: --quoting none if quotes are characters like "
            "any other, --quoting backslash if a quote stands behind a backslash",
        )
    if here == b"\\" and data[end + 1 :]:
        raise _refused(
            path,
            line_there,
            f"a backslash stands before something else than a quote, backslash, delimiter or line break: {around!r}",
            "Write it twice, or leave out --quoting backslash",
        )
    if at_end and opening < len(data):
        field = data[opening + 1 : -1].decode(errors="replace")
        raise _refused(
            path,
            line + data.count(b"\n", begin, opening),
            f"a quote is opened and never closed, and takes all that follows into one field: {field[:80]!r}",
            "Close it, or write it twice where it is meant, or say --quoting none if quotes are characters like any other",
        )
    if at_end and data[begin:].strip(b"\r\n"):
        raise _refused(path, line_there - 1, "the file ends in a backslash", "Write what it stands before, or leave it out")
    if not at_end:
        raise _refused(
            path,
            max(line, 1),
            f"the row is longer than {_MAX_ROW_BYTES >> 20} MiB, the most that is read at a time",
            "Often a quote in it is never closed: close it, or split the row",
        )


def _refused(path: Path, line: int, what: str, advice: str) -> ImportRefused:
    return ImportRefused(f"{path}, line {line:,}: {what}. Nothing was written. {advice}.")
