"""Where the rows of a CSV file end: a line break within quotes ends none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from penstock_server.importing.source import ImportRefused
from penstock_server.importing.stream import BYTE_ORDER_MARK, Stream

_BLOCK_BYTES = 1 << 20
_LARGEST_ROW_BYTES = 4 << 20  # a longer one is refused: memory must be bounded


class Quoting:
    """How fields are quoted, for files with this delimiter: as pyarrow reads them, to the byte.

    A quote at the start of a field opens it and must be closed; within, it is written twice. Any other quote is a character.
    `rows` matches all whole rows from where a row begins, `header` the first that is not blank, `fields` all that is not
    within a quote left open. Each looks at the byte before.
    """

    def __init__(self, delimiter: str) -> None:
        edge = b"[" + re.escape(delimiter.encode()) + rb"\r\n]"
        quotes = rb'(?:(?<=%b)"[^"]*+(?:""[^"]*+)*+"|(?<!%b)")' % (edge, edge)
        self.rows = re.compile(rb'(?:[^"]*+%b)*[^"]*[\r\n]' % quotes)
        self.header = re.compile(rb'[\r\n]*+(?:[^"\r\n]*+%b)*+[^"\r\n]*+[\r\n]' % quotes)
        self.fields = re.compile(rb'(?:[^"]*+%b)*+[^"]*+' % quotes)


def row_portions(path: Path, stream: Stream, quoting: Quoting) -> Iterator[bytes]:
    """A CSV file about a MiB at a time: the header alone, then whole rows with the header before them; nothing if it is blank.

    pyarrow must not cut the file itself: it takes a CR at the end of a block and the LF that follows for one line break, and
    drops the LF, also within quotes.

    Raises ImportRefused: a quote is never closed, or a row is too long to be held in memory.
    """
    # The byte before a row is a line break, also before the first; so many of them, so many lines have begun.
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
        if len(rest) > _LARGEST_ROW_BYTES:
            raise _refused(
                path,
                max(num_lines, 1),
                f"the row is longer than {_LARGEST_ROW_BYTES >> 20} MiB, the most that is read at a time",
                "Often a quote in it is never closed: close it, or split the row",
            )
    fields = quoting.fields.match(header + rest, len(header))
    if fields and fields.end() < len(fields.string):
        field = fields.string[fields.end() + 1 : -1].decode(errors="replace")
        raise _refused(
            path,
            num_lines + fields[0].count(b"\n"),
            f"a quote is opened and never closed, and takes all that follows into one field: {field[:80]!r}",
            "Close it, or write it twice where it is meant",
        )


def _refused(path: Path, line: int, what: str, advice: str) -> ImportRefused:
    return ImportRefused(f"{path}, line {line:,}: {what}. Nothing was written. {advice}.")
