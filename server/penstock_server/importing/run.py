"""Import from end to end: find the types of all files, then write their rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
from tqdm import tqdm

from penstock.text import listed
from penstock_server.importing.schema import IdsTooLarge, ImportRefused, check_names, conform, merge, plain
from penstock_server.importing.shards import Shape, Written, old_shards, row_groups, staged, write_shards
from penstock_server.importing.tables import ColumnarReader, CsvReader, JsonReader, Quoting, Reader, open_arrow, open_parquet
from penstock_server.importing.token_files import Documents, is_stream, open_tokens

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

    def run(self) -> Written:
        """Write the shards. Show progress on stderr, if that is a terminal.

        Raises ImportRefused: the message gives the reason. `out_dir` is then unchanged.
        """
        old_shards(self.out_dir, overwrite=self.overwrite)
        paths = defaultdict[str, list[Path]](list)
        for path in self.files:
            paths[_format(path)].append(path)
        schemas: dict[Path, pa.Schema] = {}
        readers: dict[Path, Reader] = {}
        with tqdm(desc="find types", unit=" rows", unit_scale=True, disable=None) as bar:
            for format_, group in paths.items():
                reader = self._reader(format_, group)
                schemas |= reader.schemas()
                readers |= dict.fromkeys(group, reader)
            check_names("--text", self.text, schemas.values())
            bar.set_description("write shards")
            try:
                written = self._write(readers, self._merged(schemas, narrow=True), bar)
            except IdsTooLarge:  # rare, so no earlier pass looks for such numbers
                bar.reset()
                written = self._write(readers, self._merged(schemas, narrow=False), bar)
        return replace(written, streams=[path for path in paths["tokens"] if is_stream(path, self.documents)])

    def _merged(self, schemas: Mapping[Path, pa.Schema], *, narrow: bool) -> pa.Schema:
        return merge([(path, plain(schemas[path], narrow=narrow)) for path in self.files], self.columns)

    def _reader(self, format_: str, paths: Sequence[Path]) -> Reader:
        if format_ == "csv":
            return CsvReader(paths, self.delimiter, self.quoting, self.text)
        if format_ == "json":
            return JsonReader(paths, self.text)
        if format_ == "tokens":
            return ColumnarReader(paths, partial(open_tokens, documents=self.documents))
        return ColumnarReader(paths, open_arrow if format_ == "arrow" else open_parquet)

    def _write(self, readers: Mapping[Path, Reader], schema: pa.Schema, bar: tqdm[NoReturn]) -> Written:
        """Write the rows in these types. Raises IdsTooLarge: a number needs a wider type."""

        def tables() -> Iterator[pa.Table]:
            for path in self.files:
                for rows in readers[path].tables(path, schema.names):
                    yield conform(path, rows, schema)
                    bar.update(rows.num_rows)

        with staged(self.out_dir, overwrite=self.overwrite) as folder:
            written = write_shards(row_groups(tables(), self.shape), folder, schema, self.shape)
            if not written.num_rows:
                raise ImportRefused(f"{listed([*map(str, self.files)])}: there is no row to import. Nothing was written.")
        return written


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
