"""Import from end to end: find the types of all files, then write their rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NoReturn

import pyarrow as pa
from tqdm import tqdm

from penstock.text import listed
from penstock_server.importing.inputs import Input, Inputs
from penstock_server.importing.litdata import litdata_chunks
from penstock_server.importing.mds import mds_shards
from penstock_server.importing.row_files import INDEX_NAME, OpenColumns, read_index
from penstock_server.importing.schema import IdsTooLarge, ImportRefused, check_names, conform, merge, plain
from penstock_server.importing.shards import Shape, Written, check_output, output, row_groups, write_shards
from penstock_server.importing.tables import (
    ColumnarReader,
    CsvReader,
    JsonReader,
    Quoting,
    Reader,
    open_arrow,
    open_parquet,
    refusing,
)
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
    """Options of an import. Texts in `files` and `out_dir` are URLs. `columns` None means all columns.

    Columns in `text` are text: in CSV whatever they look like, in JSON lines as JSON. `delimiter` and `quoting` are those of
    CSV; see `tables.CsvReader`. `documents` applies to files of token ids.
    """

    files: Sequence[Path | str]
    out_dir: Path | str
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
        check_output(self.out_dir, overwrite=self.overwrite)
        with closing(Inputs()) as inputs:
            return self._run([path for place in self.files for path in inputs.find(place)])

    def _run(self, places: Sequence[Input]) -> Written:
        files = list[Input]()  # those in a folder instead of the folder
        row_files: dict[Input, OpenColumns] = {}
        paths = defaultdict[str, list[Input]](list)
        for path in places:
            format_, group = _format(path), [path]
            if format_ == "row files":
                found = self._row_files(path)
                row_files |= found
                group = [path for path, _ in found]
            files += group
            paths[format_] += group
        schemas: dict[Input, pa.Schema] = {}
        readers: dict[Input, Reader] = {}
        with tqdm(desc="find types", unit=" rows", unit_scale=True, disable=None) as bar:
            for format_, group in paths.items():
                reader = self._reader(format_, group, row_files)
                schemas |= reader.schemas()
                readers |= dict.fromkeys(group, reader)
            check_names("--text", self.text, schemas.values())
            bar.set_description("write shards")
            try:
                written = self._write(files, readers, self._merged(files, schemas, narrow=True), bar)
            except IdsTooLarge:  # rare, so no earlier pass looks for such numbers
                bar.reset()
                written = self._write(files, readers, self._merged(files, schemas, narrow=False), bar)
        tokens = [path for path in paths["tokens"] if isinstance(path, Path)]
        return replace(written, streams=[path for path in tokens if is_stream(path, self.documents)])

    def _merged(self, files: Sequence[Input], schemas: Mapping[Input, pa.Schema], *, narrow: bool) -> pa.Schema:
        return merge([(path, plain(schemas[path], narrow=narrow)) for path in files], self.columns)

    def _row_files(self, folder: Input) -> Sequence[tuple[Input, OpenColumns]]:
        with refusing(folder):
            index = read_index(folder)
            if "chunks" in index:
                return litdata_chunks(folder, index, self.columns)
            return mds_shards(folder, index, self.columns, self.text, self.documents.type)

    def _reader(self, format_: str, paths: Sequence[Input], row_files: Mapping[Input, OpenColumns]) -> Reader:
        if format_ == "csv":
            return CsvReader(paths, self.delimiter, self.quoting, self.text)
        if format_ == "json":
            return JsonReader(paths, self.text)
        if format_ == "tokens":
            return ColumnarReader(paths, partial(open_tokens, documents=self.documents))
        if format_ == "row files":
            return ColumnarReader(paths, lambda path: row_files[path]())
        return ColumnarReader(paths, open_arrow if format_ == "arrow" else open_parquet)

    def _write(
        self, files: Sequence[Input], readers: Mapping[Input, Reader], schema: pa.Schema, bar: tqdm[NoReturn]
    ) -> Written:
        """Write the rows in these types. Raises IdsTooLarge: a number needs a wider type."""

        def tables() -> Iterator[pa.Table]:
            for path in files:
                for rows in readers[path].tables(path, schema.names):
                    yield conform(path, rows, schema)
                    bar.update(rows.num_rows)

        with output(self.out_dir, overwrite=self.overwrite) as (folder, finish):
            written = write_shards(row_groups(tables(), self.shape), folder, schema, self.shape, finish)
            if not written.num_rows:
                raise ImportRefused(f"{listed([*map(str, self.files)])}: there is no row to import. Nothing was written.")
        return written


def _format(path: Input) -> str:
    """Return the format of a file by its ending, of a folder by its index.json.

    Raises ImportRefused: it has another ending, or is neither a file nor a folder with an index.json.
    """
    if (path / INDEX_NAME).is_file():
        return "row files"
    if not path.is_file():
        raise ImportRefused(
            f"{path} does not exist, or is not a file. Name files, such as FOLDER/*.jsonl, or folders with the {INDEX_NAME} of "
            f"MosaicML Streaming or LitData."
        )
    ending, format_ = path.suffix.lower(), _ENDINGS.get(path.suffix.lower())
    if ending in _COMPRESSED:
        format_ = _TEXT_ENDINGS.get(PurePosixPath(path.name).with_suffix("").suffix.lower())
    if format_ is None:
        raise ImportRefused(
            f"{path}: its ending is not {', '.join(_ENDINGS)}; only text may end with {' or '.join(_COMPRESSED)}. Write plain "
            f'text as JSON lines, a document a line: {{"text": "..."}}. For other formats see docs/guides/import.md.'
        )
    if format_ == "tokens" and not isinstance(path, Path):
        raise ImportRefused(f"{path}: token ids are read from this machine only. Copy the file, and the files beside it.")
    return format_
