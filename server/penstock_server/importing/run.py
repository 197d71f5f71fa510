"""Import from end to end: find the types of all files, then write their rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
from tqdm import tqdm

from penstock.text import listed
from penstock_server.importing.schema import IdsTooLarge, ImportRefused, check_names, conform, merge, storable
from penstock_server.importing.shards import Shape, Written, old_shards, row_groups, staged, write_shards
from penstock_server.importing.tables import ArrowReader, CsvReader, JsonReader, ParquetReader, Quoting, Reader
from penstock_server.importing.token_files import Documents, TokenReader

_TEXT_ENDINGS = {".csv": "csv", ".tsv": "csv", ".jsonl": "json", ".ndjson": "json", ".json": "json"}
_COMPRESSED = (".gz", ".zst")  # only text
_ENDINGS = {
    **_TEXT_ENDINGS,
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "arrow"),
    ".parquet": "parquet",
    **dict.fromkeys((".bin", ".npy", ".ds"), "tokens"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """Options of an import. `columns` None means all columns.

    Columns in `text` are text: in CSV whatever they look like, in JSON lines as JSON. `delimiter` and `quoting` are those of
    CSV; see `tables.CsvReader`. `documents` applies to files of token ids.
    """

    files: Sequence[Path]
    out_dir: Path
    columns: Sequence[str] | None = None
    text: Sequence[str] = ()
    delimiter: str | None = None
    quoting: Quoting = "doubled"
    documents: Documents = field(default_factory=Documents)
    shape: Shape = field(default_factory=Shape)
    overwrite: bool = False

    def run(self) -> Imported:
        """Write the shards. Show progress on stderr, if that is a terminal.

        Raises ImportRefused: the message gives the reason. `out_dir` is then unchanged.
        """
        old_shards(self.out_dir, overwrite=self.overwrite)
        formats = {path: _format(path) for path in self.files}
        readers = self._readers(formats)
        with tqdm(desc="find types", unit=" rows", unit_scale=True, disable=None) as bar:
            schemas: dict[Path, pa.Schema] = {}
            for reader in readers.values():
                schemas |= reader.schemas()
            check_names("--text", self.text, list(schemas.items()))
            schema = merge([(path, schemas[path]) for path in self.files], self.columns)
            files = [(path, readers[formats[path]]) for path in self.files]
            bar.set_description("write shards")
            try:
                return self._write(files, storable(schema, narrow=True), bar)
            except IdsTooLarge:  # rare, so no earlier pass looks for such numbers
                bar.reset()
                return self._write(files, storable(schema, narrow=False), bar)

    def _readers(self, formats: Mapping[Path, str]) -> dict[str, Reader]:
        """Return a reader for each format."""
        paths = defaultdict[str, list[Path]](list)
        for path, format_ in formats.items():
            paths[format_].append(path)
        make: Mapping[str, Callable[[list[Path]], Reader]] = {
            "csv": lambda paths: CsvReader(paths, self.delimiter, self.quoting, self.text),
            "json": lambda paths: JsonReader(paths, self.text),
            "arrow": ArrowReader,
            "parquet": ParquetReader,
            "tokens": lambda paths: TokenReader(paths, self.documents),
        }
        return {format_: make[format_](paths[format_]) for format_ in paths}

    def _write(self, files: Sequence[tuple[Path, Reader]], schema: pa.Schema, bar: tqdm[NoReturn]) -> Imported:
        """Write the rows in these types. Raises IdsTooLarge: a number needs a wider type."""

        def tables() -> Iterator[pa.Table]:
            for path, reader in files:
                for rows in reader.tables(path, schema.names):
                    yield conform(path, rows, schema)
                    bar.update(rows.num_rows)

        with staged(self.out_dir, overwrite=self.overwrite) as folder:
            written = write_shards(row_groups(tables(), self.shape), folder, schema, self.shape)
            if not written.num_rows:
                raise ImportRefused(f"{listed([*map(str, self.files)])}: there is no row to import. Nothing was written.")
        streams = [path for path, reader in files if isinstance(reader, TokenReader) and path in reader.streams]
        return Imported(schema=schema, streams=streams, written=written)


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """Result of an import. `streams` are the files of token ids without document borders."""

    schema: pa.Schema
    streams: Sequence[Path]
    written: Written


def _format(path: Path) -> str:
    """Return the format of a file by its ending. Raises ImportRefused: it is not a file, or has another ending."""
    if not path.is_file():
        raise ImportRefused(f"{path} does not exist, or is not a file. Name files, such as FOLDER/*.jsonl.")
    ending, format_ = path.suffix.lower(), _ENDINGS.get(path.suffix.lower())
    if ending in _COMPRESSED:
        format_ = _TEXT_ENDINGS.get(Path(path.stem).suffix.lower())
    if format_ is None:
        raise ImportRefused(
            f"{path}: its ending is not {', '.join(_ENDINGS)}; only text may end with {' or '.join(_COMPRESSED)}. Write plain "
            f'text as JSON lines, a document a line: {{"text": "..."}}. For other formats see docs/guides/import.md.'
        )
    return format_
