"""Import from end to end: a pass that surveys all files, one schema, a pass that writes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from itertools import accumulate
from pathlib import Path
from stat import S_ISDIR, S_ISREG

import pyarrow as pa
from tqdm import tqdm

from penstock.text import listed
from penstock_server.importing.columnar import ArrowFile, ParquetFile
from penstock_server.importing.columns import check_names, completed, conform, one_schema
from penstock_server.importing.delimited import Delimited
from penstock_server.importing.jsonl import JsonLines
from penstock_server.importing.rows import Kind
from penstock_server.importing.shards import Shape, Written, old_shards, row_groups, staged, write_shards
from penstock_server.importing.source import Advance, ImportRefused, Source, Survey
from penstock_server.importing.stream import CODECS, unreadable
from penstock_server.importing.token_files import TokenFile
from penstock_server.importing.token_formats import Documents

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON = (".jsonl", ".ndjson", ".json")
_ARROW = (".arrow", ".feather", ".ipc")
_PARQUET = (".parquet",)
_TOKENS = (".bin", ".npy", ".ds")
_FOREIGN = {  # files of other loaders, by a part of their names
    ".mds": "a shard of MosaicML's MDS",
    ".tar": "an archive (unpack it, unless it is a shard of WebDataset)",
    ".tfrecord": "TensorFlow's TFRecord",
    ".array_record": "Grain's ArrayRecord",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """Options of an import. `columns` None means all columns.

    Columns in `text` are text: in CSV whatever they look like, in JSON lines the JSON as written. `delimiter` None means the
    delimiter of the file's ending; `quoting` is as in `rows`. `documents` applies to files of token ids.
    """

    files: Sequence[Path]
    out_dir: Path
    columns: Sequence[str] | None = None
    text: Sequence[str] = ()
    delimiter: str | None = None
    quoting: Kind = "doubled"
    documents: Documents = field(default_factory=Documents)
    shape: Shape = field(default_factory=Shape)
    overwrite: bool = False

    def run(self) -> Imported:
        """Write the shards. Show progress on stderr, if that is a terminal.

        Raises ImportRefused: the message gives the reason. `out_dir` is then unchanged.
        """
        old_shards(self.out_dir, overwrite=self.overwrite)
        sources = self._sources()
        with _progress("1/2 survey", sources) as advances:
            surveys = [source.survey(advance) for source, advance in zip(sources, advances, strict=True)]
        found = list(zip(self.files, surveys, strict=True))
        check_names("--text", self.text, found)
        schema, left_out = one_schema(found, self.columns)
        with staged(self.out_dir, overwrite=self.overwrite) as folder, _progress("2/2 shards", sources) as advances:
            tables = (
                table
                for source, survey, advance in zip(sources, surveys, advances, strict=True)
                for table in _tables(source, survey, schema, advance)
            )
            written = write_shards(row_groups(tables, self.shape), folder, schema, self.shape)
            if not written.num_rows:
                raise ImportRefused(f"{listed([*map(str, self.files)])}: there is not one row to import. Nothing was written.")
        rounded = [(path, name, number) for path, survey in found for name, number in survey.rounded.items()]
        lacking = {
            field.name: [path for path, survey in found if survey.names and field.name not in survey.names] for field in schema
        }
        streams = [path for path, survey in found if survey.is_stream]
        return Imported(schema=schema, lacking=lacking, left_out=left_out, rounded=rounded, streams=streams, written=written)

    def _sources(self) -> list[Source]:
        found = [self._source(path) for path in self.files]
        if problems := [source for source in found if isinstance(source, str)]:
            raise ImportRefused("\n".join(problems))
        sources = [source for source in found if not isinstance(source, str)]
        self._check_options(sources)
        return sources

    def _check_options(self, sources: Sequence[Source]) -> None:
        """Check that each option applies to some file. Raises ImportRefused: an option has no effect on these files."""
        for name in self.text:
            if self.columns is not None and name not in self.columns:
                raise ImportRefused(f"--text names {name!r}, which --columns leaves out. Name it in both, or in neither.")
        ids = self.documents
        of_csv, of_texts, of_ids = (Delimited,), (Delimited, JsonLines), (TokenFile,)
        for option, is_given, kinds, what in (
            ("--delimiter", self.delimiter is not None, of_csv, "CSV"),
            ("--quoting", self.quoting != "doubled", of_csv, "CSV"),
            ("--text", bool(self.text), of_texts, "CSV and JSON lines"),
            ("--ids", ids.type is not None, of_ids, "files of token ids"),
            ("--document-start", ids.start is not None, of_ids, "files of token ids"),
            ("--document-end", ids.end is not None, of_ids, "files of token ids"),
        ):
            if is_given and not any(isinstance(source, kinds) for source in sources):
                raise ImportRefused(
                    f"{option} is for {what}, and by its ending no file here is such. Leave it out, or rename the file."
                )

    def _source(self, path: Path) -> Source | str:
        """Return the source that reads a file by its ending, or the reason why the file cannot be imported."""
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return f"{path} does not exist."
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}."
        if S_ISDIR(mode):
            told = next(filter(None, map(_foreign, sorted(path.glob("*.mds*")))), "")  # beside .json of their metadata
            return told or f"{path} is a folder. Name its files, such as {path}/*{_ending_in(path)}."
        if not S_ISREG(mode):
            return f"{path} is no regular file, and files are read twice."
        ending, compressed = _endings_of(path)
        if ending in _JSON:
            return JsonLines(path, self.columns, self.text)
        if ending in _DELIMITERS:
            return Delimited(path, self.columns, _DELIMITERS[ending], self.delimiter, self.text, self.quoting)
        if ending in _ARROW and not compressed:
            return ArrowFile(path, self.columns)
        if ending in _PARQUET and not compressed:
            return ParquetFile(path, self.columns)
        if ending in _TOKENS and not compressed:
            return TokenFile(path, self.columns, self.documents)
        if ending == ".idx":
            ids = path.with_suffix(".bin" if path.suffix == ".idx" else ".BIN")
            return f"{path} is an index. Name the file of ids beside it, {ids}."
        return _foreign(path) or (
            f"{path}: its ending is not one that is read: {', '.join([*_DELIMITERS, *_JSON])} (also "
            f"with {' or '.join(CODECS)}), {', '.join(_ARROW + _PARQUET + _TOKENS)}. Rename the file if it holds one of these; "
            f'write plain text as JSON lines, a document a line: {{"text": "..."}}.'
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """Result of an import.

    lacking   for each column the files without it; their rows have null there
    left_out  columns of objects without fields, which Parquet cannot hold
    rounded   columns of float64, each with its file and a whole number in it that float64 does not hold
    streams   files of token ids without document borders
    """

    schema: pa.Schema
    lacking: Mapping[str, Sequence[Path]]
    left_out: Sequence[str]
    rounded: Sequence[tuple[Path, str, Decimal]]
    streams: Sequence[Path]
    written: Written


def _tables(source: Source, survey: Survey, schema: pa.Schema, advance: Advance) -> Iterator[pa.Table]:
    for table in source.tables(replace(survey, schema=completed(survey.schema, schema)), advance):
        try:
            yield conform(table, schema)
        except ValueError as error:
            raise ImportRefused(
                f"{source.path}: {error}. Nothing was written. Mend the file, or leave the column out with --columns."
            ) from error


def _endings_of(path: Path) -> tuple[str, str]:
    """Return the ending of a file's format, and that of its compression, "" without compression."""
    last = path.suffix.lower()
    return (Path(path.stem).suffix.lower(), last) if last in CODECS else (last, "")


def _ending_in(folder: Path) -> str:
    """Return the most common ending among a folder's importable files. Next to others, .json files are metadata."""
    found = Counter[str]()
    with suppress(OSError):
        endings = [_endings_of(path) for path in folder.iterdir() if path.is_file()]
        found.update("".join(own) for own in endings if own[0] in (*_DELIMITERS, *_JSON, *_ARROW, *_PARQUET, *_TOKENS))
    return max(found, key=lambda ending: (ending != ".json", found[ending]), default=_JSON[0])


def _foreign(path: Path) -> str:
    """Return the message about a file of another loader; "" if the name is not one of another loader."""
    for part, kind in _FOREIGN.items():
        if re.search(rf"\{part}s?(?![a-z])", path.name.lower()):  # -00000-of-00008 or a compression ending may follow
            return (
                f"{path} is {kind}, which is not read here. Write its rows as Parquet from Python, some thousand at a time: "
                f"docs/guides/import.md shows how."
            )
    return ""


@contextmanager
def _progress(doing: str, sources: Sequence[Source]) -> Iterator[list[Advance]]:
    """Show a progress bar; yields a callback per source. Raises ImportRefused: a file cannot be read."""
    sizes = [_size(source.path) for source in sources]
    with tqdm(total=sum(sizes), desc=doing, unit="B", unit_scale=True, disable=None) as bar:

        def advance(start: int, position: int) -> None:
            bar.update(start + position - bar.n)

        yield [partial(advance, end - size) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        bar.update(sum(sizes) - bar.n)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error
