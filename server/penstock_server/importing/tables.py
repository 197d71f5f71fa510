"""Readers of CSV, JSON lines, Arrow and Parquet. Each reports the types of its files, then yields their rows in portions.

CSV is read by Python's csv module: DuckDB's reader keeps compressed files in memory, and loses rows where a quoted line break
meets the end of a buffer. JSON is read by DuckDB, Arrow and Parquet by pyarrow.
"""

from __future__ import annotations

import codecs
import csv
import glob
import io
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.text import one_line
from penstock_server import arrow
from penstock_server.importing.inputs import Input, on_disk, open_file, open_text
from penstock_server.importing.schema import ImportRefused
from penstock_server.recipes.infer import ANSWERS

Quoting = Literal["doubled", "backslash", "none"]

_TABLE_BYTES = 4 << 20  # approximate size of a portion
_MAX_ROWS = 65_536  # rows of a portion
_MAX_ROW_BYTES = 16 << 20  # of CSV and JSON; memory must be bounded


class Reader(Protocol):
    """Reader of all files of one format, or of one format family."""

    def schemas(self) -> Mapping[Input, pa.Schema]:
        """Return the columns and types of each file. Raises ImportRefused."""

    def tables(self, path: Input, names: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows of a file in portions, with these columns if the file has them. Raises ImportRefused."""


@contextmanager
def refusing(path: Input) -> Iterator[None]:
    """Turn errors of reading a file into ImportRefused."""
    try:
        yield
    except OSError as error:
        # To strerror, pyarrow adds the path and more.
        reason = os.strerror(error.errno) if error.errno and isinstance(path, Path) else error.strerror or one_line(error)
        raise ImportRefused(
            f"{error.filename or path} cannot be read: {reason}. Check the path, or copy the file again."
        ) from error
    except (pa.ArrowException, ValueError) as error:
        raise ImportRefused(
            f"{path} cannot be imported: {one_line(error)}. Nothing was written. Write the file again, or change the options."
        ) from error


def _lines(path: Input) -> Iterator[str]:
    """Yield the lines of a text file, which may be compressed. Raises ImportRefused: a line is not UTF-8."""
    with open_text(path) as stream:
        for number, line in enumerate(io.BufferedReader(stream), 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ImportRefused(
                    f"{path}, line {number:,} is not UTF-8. Nothing was written. Convert the file: iconv -f ITS_ENCODING "
                    f"-t UTF-8 {path.name} > NEW_FILE"
                ) from error


# CSV ---------------------------------------------------------------------------------------------------------------------

_QUOTING: Mapping[Quoting, dict[str, Any]] = {
    "doubled": {},
    "backslash": {"escapechar": "\\"},
    "none": {"quoting": csv.QUOTE_NONE},
}
_DELIMITERS = (";", "\t", "|", ",")
_ALWAYS_TEXT = ("text", "prompt", *ANSWERS, "chosen", "rejected")  # columns that the server reads as text without a recipe
# Numbers that survive conversion, except for digits far after the decimal point: 007 and numbers of 20 digits stay text.
_NUMBERS = {
    pa.null(): r"[^\x00-\x{10FFFF}]",  # no text at all
    pa.int64(): r"^(0|-?[1-9][0-9]{0,17})$",
    pa.float64(): r"^-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,100})?([eE][-+]?[0-9]{1,2})?$",
}


class CsvReader:
    """Files of delimited values with a header. An empty field is null, an empty line no row.

    A column is int64 or float64 if every field of every file is such a number, otherwise string. `delimiter` None means a tab
    in .tsv and a comma in .csv. `quoting`: quotes within quotes are doubled, escaped by a backslash, or plain characters.
    """

    def __init__(self, paths: Sequence[Input], delimiter: str | None, quoting: Quoting, text: Sequence[str]) -> None:
        self._paths, self._delimiter, self._quoting = paths, delimiter, quoting
        self._text = {*_ALWAYS_TEXT, *text}
        csv.field_size_limit(_MAX_ROW_BYTES)

    def schemas(self) -> Mapping[Input, pa.Schema]:
        """Read all files, and return the columns of each."""
        headers: dict[Input, list[str]] = {}
        fitting: dict[str, list[pa.DataType]] = {}
        for path in self._paths:
            headers[path] = []
            for table in self._texts(path):
                headers[path] = table.column_names
                for name, column in zip(table.column_names, table.columns, strict=True):
                    known = fitting.setdefault(name, [pa.null()] if name in self._text else [*_NUMBERS])
                    fitting[name] = [type_ for type_ in known if _all_match(column, _NUMBERS[type_])]
        types = {name: [*known, pa.string()][0] for name, known in fitting.items()}
        return {path: pa.schema([(name, types[name]) for name in header]) for path, header in headers.items()}

    def tables(self, path: Input, names: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows of a file, with all fields as text."""
        for table in self._texts(path):
            yield table.select([name for name in table.column_names if name in names])

    def _texts(self, path: Input) -> Iterator[pa.Table]:
        delimiter = self._delimiter or ("\t" if ".tsv" in path.name.lower() else ",")
        line = 1
        with refusing(path), open_text(path) as raw:
            try:
                stream = io.TextIOWrapper(raw, "utf-8-sig", newline="")
                rows = csv.reader(stream, delimiter=delimiter, strict=True, **_QUOTING[self._quoting])
                header = next(filter(None, rows), [])
                others = [other for other in _DELIMITERS if other in "".join(header)]
                if len(header) == 1 and others and self._delimiter is None:
                    raise ImportRefused(
                        f"{path}, header: it has one column, {header[0][:80]!r}. Name the delimiter: --delimiter "
                        f"{others[0]!r}, or --delimiter {delimiter!r} if the file has one column."
                    )
                portion, num_chars = list[list[str]](), 0
                line = rows.line_num + 1
                for row in rows:
                    if row and len(row) != len(header):
                        raise csv.Error(f"the header has {len(header)} fields, and this row {len(row)}: {row[0][:80]!r}")
                    portion += [row] if row else []
                    num_chars += sum(map(len, row))
                    if num_chars > _TABLE_BYTES or len(portion) == _MAX_ROWS:
                        yield _text_table(header, portion)
                        portion, num_chars = [], 0
                    line = rows.line_num + 1
                yield _text_table(header, portion)
            except csv.Error as error:
                raise ImportRefused(
                    f"{path}, line {line:,}: {error}. Nothing was written. Close every quote, and quote fields with a "
                    f"delimiter or line break; or change --quoting or --delimiter."
                ) from error
            except UnicodeDecodeError:
                deque(_lines(path), maxlen=0)  # names the line
                raise


def _text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [()] * len(header)
    return pa.table([pa.array([field or None for field in column], pa.string()) for column in columns], list(header))


def _all_match(column: pa.ChunkedArray, pattern: str) -> bool:
    return pc.all(pc.match_substring_regex(column, pattern)).as_py() is not False


# JSON lines --------------------------------------------------------------------------------------------------------------

_MAX_LEAVES, _MAX_DEPTH = 1_000, 20  # an object with more fields, or nested deeper, is stored as JSON
_JSON_TYPES = {
    "NULL": ("VARCHAR", pa.null()),
    "BOOLEAN": ("BOOLEAN", pa.bool_()),
    "UBIGINT": ("UBIGINT", pa.uint64()),
    "BIGINT": ("BIGINT", pa.int64()),
    "HUGEINT": ("BIGINT", pa.int64()),  # positive and negative integers
    "DOUBLE": ("DOUBLE", pa.float64()),
    "VARCHAR": ("VARCHAR", pa.string()),
    "JSON": ("JSON", pa.json_()),
}


class JsonReader:
    """Files with one JSON object a line. A column has the same type in all files.

    Values of different kinds make the column JSON. Columns in `text` keep their JSON as text; a string keeps its characters.
    """

    def __init__(self, paths: Sequence[Input], text: Sequence[str]) -> None:
        self._paths, self._text = paths, text
        self._columns: dict[str, str] = {}  # DuckDB's type of each
        self._database = duckdb.connect(config={"threads": 2})
        self._database.execute("SET enable_progress_bar = false")  # it would be printed on stdout

    def schemas(self) -> Mapping[Input, pa.Schema]:
        """Read all files, and return their columns."""
        # Grouped first: json_group_structure keeps memory for every row. Ordered, so that fields keep the order of the lines.
        add_kinds = (
            f"INSERT INTO kinds SELECT any_value(json) FROM (SELECT json, row_number() OVER () AS line FROM "
            f"read_ndjson_objects($1, maximum_object_size={_MAX_ROW_BYTES})) GROUP BY json_structure(json) ORDER BY min(line)"
        )
        try:
            self._database.execute("CREATE TEMP TABLE kinds (json JSON)")
            # Files of this machine are read together. An object is copied here, so there is one at a time.
            for _, group in groupby(self._paths, lambda path: None if isinstance(path, Path) else path):
                with ExitStack() as copies:
                    names = [_name(copies.enter_context(_copied(path))) for path in group]
                    self._database.execute(add_kinds, [names])
            query = "SELECT json_group_structure(json) FROM (SELECT json FROM kinds ORDER BY rowid)"
            structure = json.loads(self._database.execute(query).fetchall()[0][0] or "{}")
            if not isinstance(structure, dict):
                self._check_objects()
                structure = {}  # every object is empty
        except (duckdb.Error, RecursionError) as error:
            self._check_objects()
            raise ImportRefused(f"{_first_line(error)}. Nothing was written.") from error
        columns = {name: ("JSON", pa.string()) if name in self._text else _column(structure[name]) for name in structure}
        self._columns = {name: type_ for name, (type_, _) in columns.items()}
        schema = pa.schema([(name, type_) for name, (_, type_) in columns.items()])
        return dict.fromkeys(self._paths, schema)

    def tables(self, path: Input, names: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows of a file, in the types of `schemas`."""
        chosen = [name for name in names if name in self._columns] or names[:1]  # without a column DuckDB reads no rows
        values = ", ".join(_quoted(name) + (f" ->> '$' AS {_quoted(name)}" if name in self._text else "") for name in chosen)
        options: dict[str, Any] = {"format": "newline_delimited", "records": "true", "maximum_object_size": _MAX_ROW_BYTES}
        with _copied(path) as copy:
            try:
                rows = self._database.read_json(
                    _name(copy), columns={name: self._columns.get(name, "JSON") for name in chosen}, **options
                )
                num_rows = 0
                for batch in rows.project(values).to_arrow_reader(256):
                    yield pa.Table.from_batches([batch])
                    num_rows += batch.num_rows
            except duckdb.Error as error:
                raise ImportRefused(f"{path} cannot be imported: {_first_line(error)}. Nothing was written.") from error
            # Not of compressed files: another pass over one takes 12 to 20 % of the import, and over others 3 to 6 %.
            if path.suffix.lower() not in (".gz", ".zst") and num_rows != (num_lines := _num_lines(copy)):
                raise ImportRefused(
                    f"{path} has {num_lines:,} lines that are not blank, but {num_rows:,} rows were read. Nothing was written. "
                    f"If the file changed meanwhile, import it again; otherwise split it into smaller files."
                )

    def _check_objects(self) -> None:
        """Raise ImportRefused if a line is not a JSON object, with its number."""
        for path in self._paths:
            with refusing(path):
                for number, line in enumerate(_lines(path), 1):
                    try:
                        if line.strip() and not isinstance(json.loads(line), dict):
                            raise ValueError("it is not an object")
                    except (ValueError, RecursionError) as error:
                        raise ImportRefused(
                            f"{path}, line {number:,}: {one_line(error)}. Nothing was written. Each line must be one JSON "
                            f"object: correct the line."
                        ) from error


@contextmanager
def _copied(path: Input) -> Iterator[Path]:
    """Yield a file of this machine, which DuckDB needs; see `on_disk`. Raises ImportRefused: it cannot be copied."""
    with ExitStack() as copies:
        with refusing(path):
            copy = copies.enter_context(on_disk(path))
        yield copy


def _num_lines(path: Path) -> int:
    """Count the lines that are not blank."""
    with refusing(path), path.open("rb", buffering=1 << 20) as file:
        if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            file.seek(0)
        return sum(map(bool, map(bytes.strip, file)))


def _column(structure: Any, depth: int = 0) -> tuple[str, pa.DataType]:
    """Return the types of a JSON column, in DuckDB and in Arrow, from DuckDB's description of its structure."""
    if isinstance(structure, str):
        return _JSON_TYPES[structure]
    if depth == _MAX_DEPTH or (not depth and _num_leaves(structure) > _MAX_LEAVES):
        return _JSON_TYPES["JSON"]
    if isinstance(structure, list):
        item, type_ = _column(structure[0], depth + 1)
        return f"{item}[]", pa.list_(type_)
    if len({name.lower() for name in structure}) < len(structure):
        return _JSON_TYPES["JSON"]  # DuckDB does not distinguish such names
    fields = {name: _column(field, depth + 1) for name, field in structure.items()}
    sql = ", ".join(f"{_quoted(name)} {type_}" for name, (type_, _) in fields.items())
    return f"STRUCT({sql})", pa.struct([(name, type_) for name, (_, type_) in fields.items()])


def _num_leaves(structure: Any) -> int:
    if isinstance(structure, str):
        return 1
    return sum(map(_num_leaves, structure.values() if isinstance(structure, dict) else structure))


def _first_line(error: BaseException) -> str:
    """Return what DuckDB reports, without its advice about SQL."""
    return str(error).split("\n")[0].removeprefix("Invalid Input Error: ")


def _name(path: Path) -> str:
    return glob.escape(str(path))  # otherwise DuckDB reads x1.json for x[1].json


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


# Arrow and Parquet -------------------------------------------------------------------------------------------------------


class Columns(NamedTuple):
    """An open file: its schema, and a function that yields record batches with at least these of its columns."""

    schema: pa.Schema
    batches: Callable[[Sequence[str]], Iterator[pa.RecordBatch]]


class ColumnarReader:
    """Files that state their types; `open_file` opens one."""

    def __init__(self, paths: Sequence[Input], open_file: Callable[[Input], AbstractContextManager[Columns]]) -> None:
        self._paths, self._open_file = paths, open_file

    def schemas(self) -> Mapping[Input, pa.Schema]:
        """Return the schema of each file."""
        schemas = {}
        for path in self._paths:
            with refusing(path), self._open_file(path) as file:
                schemas[path] = file.schema
        return schemas

    def tables(self, path: Input, names: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows of a file."""
        with refusing(path), self._open_file(path) as file:
            chosen = [name for name in file.schema.names if name in names]
            for batch in file.batches(chosen):
                yield from _portions(batch.select(chosen))


@contextmanager
def open_arrow(path: Input) -> Iterator[Columns]:
    """Open an Arrow IPC file, such as Feather, or a stream."""
    with open_file(path) as file:
        yield arrow_columns(file)


def arrow_columns(file: pa.NativeFile) -> Columns:
    """Return the columns of an Arrow IPC file or stream."""
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)

    def batches(_: Sequence[str]) -> Iterator[pa.RecordBatch]:
        yield from map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        if not is_file and file.tell() < file.size():
            raise ValueError("bytes follow the end of its stream, as if two files were joined; import each one")

    return Columns(reader.schema, batches)


@contextmanager
def open_parquet(path: Input) -> Iterator[Columns]:
    """Open a Parquet file, to be read page by page: row groups may have any size."""
    # As a file: pyarrow takes a path such as s3:x for a URI. Reads of an object fetch a buffer of a column each.
    with (
        pa.OSFile(str(path)) if isinstance(path, Path) else path.opened() as opened,
        arrow.open_parquet(opened, buffer_size=1 << 20, pre_buffer=False) as file,
    ):

        def batches(names: Sequence[str]) -> Iterator[pa.RecordBatch]:
            num_rows = 0
            # Group by group: pyarrow cannot read a batch of nested columns across two.
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                batch_rows = _rows_of(_TABLE_BYTES, group.num_rows, group.total_byte_size)
                for batch in file.iter_batches(batch_rows, [number], columns=names):
                    yield batch
                    num_rows += batch.num_rows
            if num_rows < file.metadata.num_rows:  # pyarrow reads fewer rows without an error
                raise ValueError(f"its footer has {file.metadata.num_rows:,} rows, but only {num_rows:,} can be read")

        yield Columns(file.schema_arrow, batches)


def _portions(batch: pa.RecordBatch) -> Iterator[pa.Table]:
    """Yield a record batch in copied portions of some MiB.

    Copied, since casts refuse the offsets of a slice far into a large batch.
    """
    batch.validate(full=True)  # otherwise wrong offsets crash the process, and text may not be UTF-8
    rows = _rows_of(_TABLE_BYTES, batch.num_rows, batch.nbytes)
    for start in range(0, batch.num_rows, rows):
        portion = arrow.take_rows(batch, np.arange(start, min(start + rows, batch.num_rows)))
        yield pa.Table.from_batches([portion])


def _rows_of(max_bytes: int, num_rows: int, num_bytes: int) -> int:
    return max(1, min(_MAX_ROWS, num_rows * max_bytes // max(num_bytes, 1)))
