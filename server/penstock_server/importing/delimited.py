"""CSV and TSV. Fields have no types, so a column has numbers only if every field is one; otherwise it is text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from penstock_server.importing.rows import Kind, Quoting, row_portions
from penstock_server.importing.source import Advance, ImportRefused, Survey
from penstock_server.importing.stream import opened, portions
from penstock_server.recipes.infer import ANSWERS

_ALWAYS_TEXT = ("text", "prompt", *ANSWERS, "chosen", "rejected")  # columns that the server takes for text without a recipe
_DELIMITERS = (";", "\t", "|", ",")  # the likely real delimiters of a header with a single column
_RAGGED = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+): (.*)", re.DOTALL)
# Numbers that survive a round trip, but for digits far after the point: 007, and a twenty-digit whole number, stay text.
# float64 holds 15 digits of any number between 1e-307 and 1e308, whole numbers below 9.007e15, and their halves below 4.5e15.
_FLOATS = (
    r"0(\.0+)?([eE][-+]?[0-9]{1,3})?",
    r"0\.0{0,99}[1-9][0-9]*([eE][-+]?0?[0-9]{1,2})?",
    r"[1-9][0-9]{0,14}(\.[0-9]+)?([eE][-+]?0?[0-9]{1,2})?",
    r"[1-9](\.[0-9]+)?[eE][-+]?[12][0-9]{2}",
    r"([1-3][0-9]|4[0-4])[0-9]{14}\.[0-9]+",
    r"[4-8][0-9]{15}\.0+",
)
_NUMBERS = {
    pa.int64(): r"^(0|-?[1-9][0-9]{0,17})$",
    pa.float64(): rf"^-?({'|'.join(_FLOATS)})$",
}


class Delimited:
    """File of delimited values under a header. `delimiter` defaults to that of the file's ending.

    An empty field is null; columns in `text` are never numbers. `quoting` is as in `rows`.
    """

    def __init__(
        self,
        path: Path,
        columns: Sequence[str] | None,
        usual: str,
        delimiter: str | None,
        text: Sequence[str],
        quoting: Kind,
    ) -> None:
        self.path = path
        self._columns = columns
        self._delimiter = delimiter or usual
        self._is_told = delimiter is not None
        self._text = {*_ALWAYS_TEXT, *text}
        self._quoting = Quoting(quoting, self._delimiter)

    def survey(self, advance: Advance) -> Survey:
        """Return the columns: int64 or float64 if all fields are such numbers, null if all are empty, otherwise string.

        Raises ImportRefused: a row has more or fewer fields than the header, is not UTF-8, or violates the quoting.
        """
        header = self._header()
        chosen = [name for name in header if self._columns is None or name in self._columns]
        fitting = {name: [] if name in self._text else list(_NUMBERS) for name in chosen}
        filled = set(self._text)
        # Read all columns: text that is not UTF-8 is an error in a column that is not imported, too.
        for table in self._read(dict.fromkeys(header, pa.string()), advance):
            for name in chosen:
                column = table.column(name)
                if column.null_count < len(column):
                    filled.add(name)
                fitting[name] = [type_ for type_ in fitting[name] if _all_match(column, _NUMBERS[type_])]
        types = [[*fitting[name], pa.string()][0] if name in filled else pa.null() for name in chosen]
        return Survey(names=tuple(header), schema=pa.schema(list(zip(chosen, types, strict=True))))

    def tables(self, survey: Survey, advance: Advance) -> Iterator[pa.Table]:
        """Yield the rows, in the types of the survey. Raises ImportRefused: as `survey`."""
        return self._read(dict(zip(survey.schema.names, survey.schema.types, strict=True)), advance)

    def _header(self) -> list[str]:
        """Return the names in the first row; an empty list without a row."""
        with opened(self.path) as stream:
            header = next(row_portions(self.path, stream, self._quoting), None)
        if header is None:
            return []
        try:
            names: list[str] = self._parsed(header, {}, 0).column_names
        except UnicodeDecodeError as error:
            raise self._refusal(error, 0) from error
        for name in names:
            if names.count(name) > 1:
                raise self._refused("header", f"{names.count(name)} columns are called {name!r}", "Rename all but one")
        others = [other for other in _DELIMITERS if other in names[0]]
        if len(names) == 1 and others and not self._is_told:
            raise self._refused(
                "header",
                f"it would be one column, {names[0][:80]!r}",
                f"Say what is between the columns: --delimiter {others[0]!r}, or --delimiter "
                f"{self._delimiter!r} if it really is one column",
            )
        return names

    def _read(self, types: Mapping[str, pa.DataType], advance: Advance) -> Iterator[pa.Table]:
        """Yield the rows with columns of these types."""
        if not types:
            return
        num_rows = 0
        with opened(self.path) as stream:
            for portion in row_portions(self.path, stream, self._quoting):
                table = self._parsed(portion, types, num_rows)
                yield table
                num_rows += table.num_rows
                advance(stream.position)

    def _parsed(self, portion: bytes, types: Mapping[str, pa.DataType], num_rows: int) -> pa.Table:
        """Parse the rows of a portion; `num_rows` rows of the file are before it."""
        try:
            return pcsv.read_csv(
                pa.BufferReader(portion),
                # With threads pyarrow reports no row numbers.
                read_options=pcsv.ReadOptions(use_threads=False, block_size=len(portion)),
                # No handler of wrong rows: a pyarrow thread that releases it while Python exits would abort the process.
                parse_options=pcsv.ParseOptions(
                    delimiter=self._delimiter,
                    quote_char=self._quoting.kind != "none" and '"',
                    escape_char=self._quoting.kind == "backslash" and "\\",
                    newlines_in_values=True,
                ),
                convert_options=pcsv.ConvertOptions(
                    column_types=types, include_columns=list(types), null_values=[""], strings_can_be_null=True
                ),
            )
        except pa.ArrowInvalid as error:
            raise self._refusal(error, num_rows) from error

    def _refusal(self, error: Exception, num_rows: int) -> ImportRefused:
        if ragged := _RAGGED.search(str(error)):
            row, expected, found, text = ragged.groups()
            begin, cut = _first_line_of(text.removesuffix(" ...")), text.endswith(" ...")
            begin = begin[:80] if cut else begin  # a cut further on may split a character
            return self._refused(
                self._first_line(lambda line: line.startswith(begin) if cut else line.rstrip(b"\r") == begin)
                or f"row {num_rows + int(row):,}",
                f"the header has {expected} fields and this row {found}: {text[:80]!r}",
                "Put quotes around a field with a delimiter or a line break in it, and close every quote; or remove the row",
            )
        not_utf8 = self._first_line(_is_no_utf8)
        if not_utf8:
            return self._refused(
                not_utf8,
                "it is not UTF-8",
                "Convert the file (iconv -f ITS_ENCODING -t UTF-8 FILE > NEW_FILE), or mend the line",
            )
        return self._refused(f"after row {num_rows + 1:,}", str(error), "Mend the file")

    def _refused(self, place: str, what: str, advice: str) -> ImportRefused:
        return ImportRefused(f"{self.path}, {place}: {what}. Nothing was written. {advice}.")

    def _first_line(self, is_it: Callable[[bytes], bool]) -> str | None:
        """Return the place of the first line that satisfies `is_it`."""
        with opened(self.path) as stream:
            for portion in portions(self.path, stream):
                for number, line in enumerate(portion.data.split(b"\n"), portion.first_line):
                    if is_it(line):
                        return f"line {number:,}"
        return None


def _is_no_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return True
    return False


def _first_line_of(text: str) -> bytes:
    return text.encode().split(b"\n")[0].rstrip(b"\r")


def _all_match(column: pa.ChunkedArray, pattern: str) -> bool:
    return pc.all(pc.match_substring_regex(column, pattern)).as_py() is not False
