"""JSON lines: an object per line. The survey infers types portion by portion, so it finds a late change of type."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.json as pj

from penstock_server.importing.columns import ColumnsDiffer, merge, normal_schema, wide_columns
from penstock_server.importing.members import rewrite
from penstock_server.importing.rounding import find_inexact, float_columns
from penstock_server.importing.source import Advance, ImportRefused, Survey
from penstock_server.importing.stream import BYTE_ORDER_MARK, Portion, opened, portions

T = TypeVar("T")
_PARSE_ERROR = re.compile(r"JSON parse error: (.*?)\.? in row \d+", re.DOTALL)
_EMPTY = "JSON parse error: The document is empty"
_NO_OBJECT = re.compile(rb"\n[ \t\r]*[^{\s]")
_COLUMN = re.compile(r"Column\(/?(.*?)\)(?: changed from (\w+) to (\w+))?")
_MEND_COLUMN = "Mend it, or keep all of the column{} as it is written, as text, with --text, or leave it out with --columns"
_TWICE = " was specified twice"
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?')  # also unclosed: otherwise each quote in it would be retried
_NO_BRACKETS = bytes(set(range(256)) - set(b"{[]}"))
_DEEPEST = 100  # nesting depth of objects and lists; beyond some thousands pyarrow's parser crashes


class _TooDeep(ValueError):
    """A line nests objects and lists too deeply for pyarrow's parser."""


class JsonLines:
    """File of JSON lines. `columns` selects the columns, None all; those in `text` keep their JSON, as text."""

    def __init__(self, path: Path, columns: Sequence[str] | None, text: Sequence[str]) -> None:
        self.path = path
        self._columns = columns
        self._text = text

    def survey(self, advance: Advance) -> Survey:
        """Return the columns and types of all lines. A text is string, also if it looks like a date.

        Raises ImportRefused: a line is not a JSON object, or its types are incompatible with the lines before it.
        """
        self._check_start()
        schema, names, wide, inexact = pa.schema([]), dict[str, None](), frozenset[str](), dict[str, Decimal]()
        for portion in self._portions(advance):
            if not names and self._columns is not None:
                names |= _first_keys(portion.data)
            types, table = self._parsed(portion, partial(self._infer, known=schema))
            schema = merge(schema, types)
            names |= dict.fromkeys(schema.names)
            wide |= wide_columns(table)
            inexact |= find_inexact(portion.data, table, inexact)
        rounded = {path: inexact[path] for path in sorted(inexact.keys() & float_columns(schema))}
        return Survey(names=tuple(names), schema=schema, wide=wide, rounded=rounded)

    def tables(self, survey: Survey, advance: Advance) -> Iterator[pa.Table]:
        """Yield the lines as rows, in the types of the survey. Raises ImportRefused: as `survey`."""
        told = _told(survey.schema)
        for portion in self._portions(advance):
            yield self._parsed(portion, partial(self._read, schema=told))

    def _portions(self, advance: Advance) -> Iterator[Portion]:
        with opened(self.path) as stream:
            for portion in portions(self.path, stream):
                yield portion
                advance(stream.position)

    def _infer(self, data: bytes, known: pa.Schema) -> tuple[pa.Schema, pa.Table]:
        """Return the types of some lines, merged with `known`, and the lines as rows."""
        _check_depth(data)
        data = self._chosen(data)
        table = _parse(data)
        types = normal_schema(table.schema, None, dates=False)
        merge(known, types)
        try:
            table.validate()
        except pa.ArrowInvalid:  # pyarrow infers right types, but fails on a column whose first list begins with null
            table = _parse(data, _told(types))
        return types, table

    def _read(self, data: bytes, schema: pa.Schema) -> pa.Table:
        return _parse(self._chosen(data), schema)

    def _chosen(self, data: bytes) -> bytes:
        """Drop the keys that are not imported, so that they cannot fail, and keep the JSON of text columns as text."""
        return data if self._columns is None and not self._text else rewrite(data, self._columns, self._text)

    def _check_start(self) -> None:
        with opened(self.path) as stream:
            if stream.bytes.read(1 << 10).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"[":
                raise ImportRefused(
                    f"{self.path} is one JSON array, and penstock reads an object a line. Make it lines: "
                    f"jq -c '.[]' FILE > NEW_FILE.jsonl"
                )

    def _parsed(self, portion: Portion, parse: Callable[[bytes], T]) -> T:
        try:
            return parse(portion.data)
        except ValueError as error:  # errors of pyarrow and of decoding are ValueErrors
            line, cause = _first_failure(portion, parse, error)
            raise ImportRefused(f"{self.path}, line {line:,}: {_reason(cause)}") from error


def _parse(data: bytes, schema: pa.Schema | None = None) -> pa.Table:
    """Parse lines to rows, with the columns of `schema`, None for all. Raises ValueError: a line is not an object."""
    data.decode()  # pyarrow accepts invalid UTF-8; and it takes null for a row, or crashes on it
    data = data.removeprefix(BYTE_ORDER_MARK)
    begin = data.lstrip()[:1]
    if begin not in (b"", b"{") or _NO_OBJECT.search(data):
        raise ValueError("it is not an object")
    if not begin:
        return (schema or pa.schema([])).empty_table()
    table = pj.read_json(
        pa.BufferReader(data),
        read_options=pj.ReadOptions(use_threads=False, block_size=len(data)),
        parse_options=pj.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"
        ),
    )
    # An object over several lines would be cut at the end of a portion.
    if table.num_rows != sum(1 for line in data.split(b"\n") if line.strip()):
        raise ValueError("it is not exactly one object")
    return table


def _told(schema: pa.Schema) -> pa.Schema:
    """Return the schema in a form that pyarrow accepts, without columns that have no value."""
    return pa.schema([(field.name, _without_null(field.type)) for field in schema if not pa.types.is_null(field.type)])


def _without_null(type_: pa.DataType) -> pa.DataType:
    """Return the type with string in place of null: pyarrow makes wrong lists of null."""
    if pa.types.is_list(type_):
        return pa.list_(_without_null(type_.value_type))
    if pa.types.is_struct(type_):
        return pa.struct([(field.name, _without_null(field.type)) for field in type_])
    return pa.string() if pa.types.is_null(type_) else type_


def _check_depth(data: bytes) -> None:
    """Check the nesting depth, ignoring brackets in strings. Raises _TooDeep: a line has too many brackets open."""
    for line in data.split(b"\n"):
        if line.count(b"{") + line.count(b"[") > _DEEPEST:
            brackets = _STRING.sub(b"", line).translate(None, _NO_BRACKETS)
            if max(accumulate(1 if bracket in b"{[" else -1 for bracket in brackets), default=0) > _DEEPEST:
                raise _TooDeep(f"objects and lists stand more than {_DEEPEST} deep within each other")


def _first_keys(data: bytes) -> dict[str, None]:
    try:
        row = json.loads(next((line for line in data.split(b"\n") if line.strip()), b"{}"))
    except (ValueError, RecursionError):
        return {}  # parsing refuses it
    return dict.fromkeys(row) if isinstance(row, dict) else {}


def _first_failure(portion: Portion, parse: Callable[[bytes], object], error: ValueError) -> tuple[int, ValueError]:
    """Return the number of the first line that makes parsing a portion fail, and its error."""
    lines = portion.data.split(b"\n")

    def failure(data: bytes) -> ValueError | None:
        try:
            parse(data)
        except ValueError as error:
            return error
        return None

    def upto(count: int) -> bytes:
        return b"\n".join(lines[:count])

    count = 1 + bisect_left(range(1, len(lines)), True, key=lambda count: failure(upto(count)) is not None)
    return portion.first_line + count - 1, failure(lines[count - 1]) or failure(upto(count)) or error


def _reason(error: ValueError) -> str:
    """Describe what is wrong, the consequences and the remedy."""
    what, advice = str(error), "Each line must be one whole JSON object: mend it"
    if isinstance(error, UnicodeDecodeError):
        what = f"byte {error.start + 1:,} is not UTF-8"
        advice = "Convert the file (iconv -f ITS_ENCODING -t UTF-8 FILE > NEW_FILE), or mend the line"
    elif isinstance(error, _TooDeep):
        advice = "Write them as text, or remove the line"
    elif isinstance(error, ColumnsDiffer):
        advice = _MEND_COLUMN.format("")
    elif what.startswith(_EMPTY):  # such as the end of an array's line after the comma
        what = "it is not exactly one object"
    elif found := _PARSE_ERROR.search(what):
        what, advice = _told_by_pyarrow(found[1], advice)
    return f"{what}. Nothing was written. {advice}."


def _told_by_pyarrow(told: str, usual: str) -> tuple[str, str]:
    """Translate a message of pyarrow's parser to a cause and a remedy; `usual` is the default remedy."""
    column = _COLUMN.search(told)
    if not column:
        return told[:1].lower() + told[1:], usual
    path, before, here = column.groups()
    name, rest = path.replace("/[]", "[]").replace("/", "."), told[column.end() :]
    if here:
        is_inside = "[]" in name or "." in name
        of = " that it is in" if is_inside else ""
        return f"column {name!r} is {here} here, and {before} in what was read before", _MEND_COLUMN.format(of)
    if rest == _TWICE:
        return f"column {name!r} is given twice", "Remove one of the two"
    return f"column {name!r}{rest}", usual
