"""Shard: one Parquet file, as its footer describes it. No data page is read here.

A footer is checked before use, so that a damaged one cannot crash the process.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.text import one_line
from penstock_server.arrow import open_parquet
from penstock_server.files import open_regular
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.fields import RecipeError
from penstock_server.recipes.recipe import Recipe
from penstock_server.sources.remote import Changed, RemotePath
from penstock_server.sources.remote_file import RemoteFile
from penstock_server.sources.stats import FileStat

File: TypeAlias = BinaryIO | pa.OSFile | RemoteFile  # an open shard
_SAMPLES, _SAMPLE_BYTES = 16, 4096
_MAX_FOOTER_BYTES = 64 << 20  # parsed, they take some ten times as much memory
_MIN_DECODED_BYTES, _MAX_GROWTH = 1 << 30, 1024
_VALUE_BYTES = {"INT64": 8, "DOUBLE": 8, "INT96": 12}  # others take 4 bytes; texts take at least an offset


def numbers(values: Iterable[int]) -> array[int]:
    """Return an array of 64-bit integers."""
    return array("q", values)


@dataclass(frozen=True, slots=True)
class Shard:
    """One Parquet file as its footer describes it, and its FileStat at that time.

    The arrays have one number per row group, a few bytes each: a dataset may have ten million row groups.

    digest           hash of the footer and of samples of the file: files of other tokens can have identical footers
    bytes_per_group  uncompressed bytes of the columns that the recipe reads
    null_rows        rows known to be null
    token_range      the least and the largest token id of the file; None if the footer has no statistics
    """

    path: Path | RemotePath
    stat: FileStat
    digest: str
    rows_per_group: array[int]
    bytes_per_group: array[int]
    null_rows: array[int]
    token_range: tuple[int, int] | None


def read_shard(path: Path | RemotePath, stat: FileStat, recipe: Recipe) -> Shard:
    """Read the footer's facts about the recipe's columns; `stat` is the version that was listed.

    Raises DatasetInvalid: the file is not valid, or being written to.
    """
    with _opened(path, stat) as file:
        file_stat = stat_of(file)
        footer = _read_footer(path, file)
        try:
            recipe.check(footer.schema)
        except RecipeError as error:
            raise DatasetInvalid(
                f"{path}: {str(error).rstrip('.')}. Give all shards of a dataset the same columns, correct penstock.toml, or "
                f"move this shard to another folder."
            ) from error
        digest = _file_digest(file, file_stat.size_bytes)
        if isinstance(path, Path) and FileStat.of(path.stat()) != file_stat:  # the content may be a mix of two files
            raise being_written(path)
    groups = [footer.metadata.row_group(g) for g in range(footer.metadata.num_row_groups)]
    columns = recipe.read_columns
    # A column's name may contain a dot.
    read = [c for c, path in enumerate(footer.paths) if columns is None or path in columns or path.split(".")[0] in columns]
    _check_sizes(path, groups, read)
    return Shard(
        path=path,
        stat=file_stat,
        digest=digest,
        rows_per_group=numbers(g.num_rows for g in groups),
        bytes_per_group=numbers(sum(g.column(c).total_uncompressed_size for c in read) for g in groups),
        null_rows=numbers(_null_rows(footer, g, recipe) for g in groups),
        token_range=_token_range(footer, groups, recipe),
    )


def _check_sizes(path: Path | RemotePath, groups: list[pq.RowGroupMetaData], read: list[int]) -> None:
    """Check the sizes that a footer declares for the columns to read. Raises DatasetInvalid: they are absurd."""
    stored = decoded = 0
    for number, group in enumerate(groups):
        for chunk in map(group.column, read):
            if chunk.num_values < group.num_rows:
                raise DatasetInvalid(
                    f"{path} is damaged: row group {number} has {group.num_rows:,} rows, but {chunk.num_values:,} values of "
                    f"column {chunk.path_in_schema}. Write it again, or move it out of the folder."
                )
            stored += chunk.total_compressed_size
            decoded += max(chunk.total_uncompressed_size, chunk.num_values * _VALUE_BYTES.get(chunk.physical_type, 4))
    if decoded > max(_MIN_DECODED_BYTES, _MAX_GROWTH * stored):
        raise DatasetInvalid(
            f"{path}: {stored:,} bytes of it would become {decoded:,} bytes of values in memory. Beyond {_MIN_DECODED_BYTES:,} "
            f"bytes, values may take {_MAX_GROWTH:,} times what is stored. Remove padding, or move it out of the folder."
        )


def read_schema(path: Path | RemotePath, stat: FileStat) -> pa.Schema:
    """Return the columns of a Parquet file. Raises DatasetInvalid: it is truncated, damaged or not Parquet."""
    with _opened(path, stat) as file:
        return _read_footer(path, file).schema


def being_written(what: Path | str) -> DatasetInvalid:
    """Return the error for a file, or several, that change while they are read."""
    return DatasetInvalid(f"{what} is being written to: it changed while it was read. Wait until it is complete.")


def stat_of(file: File) -> FileStat:
    """Return the current FileStat of an open file; an object is read in one version only. Raises OSError."""
    return file.stat if isinstance(file, RemoteFile) else FileStat.of(os.fstat(file.fileno()))


def is_of(file: File, shard: Shard) -> bool:
    """Return whether an open file is the one whose footer was read: FileStat or digest match. Raises OSError."""
    file_stat = stat_of(file)
    if file_stat == shard.stat:
        return True
    return file_stat.size_bytes == shard.stat.size_bytes and _file_digest(file, file_stat.size_bytes) == shard.digest


@contextmanager
def _opened(path: Path | RemotePath, stat: FileStat) -> Iterator[File]:
    try:
        with open_regular(path) if isinstance(path, Path) else RemoteFile(path, stat) as file:
            if isinstance(file, RemoteFile):
                file.fetch_tail()
            yield file
    except Changed:
        raise being_written(f"{path}") from None
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror or error}"
        raise DatasetInvalid(f"{what}. Fix its permissions or its storage, or move it out of the folder.") from error


class _Footer(NamedTuple):
    """Metadata, columns, and the path of each column chunk of a row group, in order."""

    metadata: pq.FileMetaData
    schema: pa.Schema
    paths: list[str]


def _read_footer(path: Path | RemotePath, file: File) -> _Footer:
    """Read and check the footer of an open file. Raises DatasetInvalid. Raises OSError: its storage fails."""
    _check_footer_size(path, file)
    try:
        # Metadata and its schema refer to each other until garbage collection: without this, thousands of shards would keep
        # thousands of footers in memory.
        opened = open_parquet(file)
        columns = pq.ParquetSchema(opened.metadata)
        paths = [columns.column(c).path for c in range(opened.metadata.num_columns)]
        _check_chunks(opened.metadata, columns, file.seek(0, os.SEEK_END))
        return _Footer(opened.metadata, opened.schema_arrow, paths)
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno:  # pyarrow's error for a damaged footer has no errno
            raise
        raise DatasetInvalid(
            f"{path} is truncated, damaged, or not a supported Parquet file: {one_line(error)}. Write it again, or move it out "
            f"of the folder."
        ) from error


def _check_footer_size(path: Path | RemotePath, file: File) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8))
    nbytes = int.from_bytes(file.read(4), "little")
    file.seek(0)
    if _MAX_FOOTER_BYTES < nbytes < size:  # a truncated file ends with any number
        raise DatasetInvalid(
            f"{path} has a footer of {nbytes:,} bytes; the limit is {_MAX_FOOTER_BYTES:,}. Write fewer and larger row groups."
        )


def _check_chunks(footer: pq.FileMetaData, columns: pq.ParquetSchema, size: int) -> None:
    """Check the column chunks of a footer. Raises OSError: access to a column's metadata would crash the process.

    pyarrow does not catch errors on such an access. But before it reads rows it checks all columns and catches errors; here
    that read stops before the first row.
    """
    opened = open_parquet(_Unread(size), metadata=footer, pre_buffer=True)
    try:
        next(opened.iter_batches(1, row_groups=range(footer.num_row_groups), use_threads=False), None)
    except _NoRows as error:
        error.__traceback__ = None  # the traceback refers to `opened`, which would keep the footer
    except pa.ArrowException:
        pass
    types = [columns.column(c).physical_type for c in range(footer.num_columns)]
    for group in map(footer.row_group, range(footer.num_row_groups)):
        if [group.column(c).physical_type for c in range(group.num_columns)] != types:  # types in its statistics
            raise OSError("the types of its columns contradict each other")


class _NoRows(Exception):
    """Signal that pyarrow has begun to read rows."""


class _Unread(RawIOBase):
    """File without content: only its size is known."""

    def __init__(self, size: int) -> None:
        self._size = size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, _whence: int = os.SEEK_SET) -> int:
        return offset

    def tell(self) -> int:
        return self._size

    def read(self, _size: int = -1) -> bytes:
        raise _NoRows


def _file_digest(file: File, size: int) -> str:
    """Hash the end of a file, with the footer, and samples spread over the rest; of an object, the footer and its version."""
    digest = blake2b(digest_size=16)
    file.seek(size - 8)
    footer_bytes = int.from_bytes(file.read(4), "little") + 8
    if isinstance(file, RemoteFile):
        digest.update(file.path.source.content(file.stat).encode())
    else:
        _add_samples(digest, file, size)
    file.seek(max(size - footer_bytes, 0))
    digest.update(file.read())
    return digest.hexdigest()


def _add_samples(digest: blake2b, file: File, size: int) -> None:
    for start in np.linspace(0, max(size - _SAMPLE_BYTES, 0), _SAMPLES, dtype=np.int64).tolist():
        file.seek(start)
        digest.update(file.read(_SAMPLE_BYTES))


def _null_rows(footer: _Footer, group: pq.RowGroupMetaData, recipe: Recipe) -> int:
    """Return the number of a group's served rows that are null by the footer."""
    # In nested columns the count of nulls includes empty lists, and the filter may drop null rows.
    if recipe.transform or recipe.filter or recipe.kind == "tokens":
        return 0
    columns = [group.column(c) for c, path in enumerate(footer.paths) if path in recipe.token_columns]
    found = [column.statistics for column in columns if column.physical_type == "BYTE_ARRAY"]
    return max((s.null_count for s in found if s and s.has_null_count), default=0)


def _token_range(footer: _Footer, groups: list[pq.RowGroupMetaData], recipe: Recipe) -> tuple[int, int] | None:
    """Return the least and the largest id in the columns of token lists, (0, 0) without ids, None without statistics."""
    names = [source.text for _, source in recipe.fields]
    if recipe.kind != "tokens" or recipe.transform or not {*names} <= {*recipe.token_columns}:  # inside a struct
        return None
    chunks = [group.column(leaf) for leaf in [_leaf(footer, name) for name in names] for group in groups]
    found = [c.statistics for c in chunks if c.num_values]
    if any(s is None or (s.num_values and not s.has_min_max) for s in found):
        return None
    ranges = [(int(s.min), int(s.max)) for s in found if s.has_min_max]
    return min((low for low, _ in ranges), default=0), max((high for _, high in ranges), default=0)


def _leaf(footer: _Footer, name: str) -> int:
    """Return the index of the column chunk with the values of a column of lists."""
    # By the leaves of the columns before it, not by its path: a column may be called "tokens.n".
    return sum(_num_leaves(field.type) for field in list(footer.schema)[: footer.schema.names.index(name)])


def _num_leaves(type_: pa.DataType) -> int:
    return sum(_num_leaves(type_.field(i).type) for i in range(type_.num_fields)) if type_.num_fields else 1
