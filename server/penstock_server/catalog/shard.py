"""Shard: one Parquet file, as its footer describes it. This module never reads a data page."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EINVAL, ELOOP, ENAMETOOLONG, ENOENT
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock_server.catalog.footer import Footer, read_footer
from penstock_server.catalog.scan import FileStat
from penstock_server.files import check_is_file, spelled
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.fields import FieldError, num_leaves
from penstock_server.recipes.filter.sql import FilterError
from penstock_server.recipes.recipe import Recipe

_SAMPLES, _SAMPLE_BYTES = 16, 4096


def numbers(values: Iterable[int]) -> array[int]:
    """Return an array of 64-bit integers."""
    return array("q", values)


@dataclass(frozen=True, slots=True)
class Shard:
    """One Parquet file as its footer describes it, and its FileStat at that time.

    `digest` is of the footer and of a few samples of the file: two files of token lists can have identical footers, and yet
    other tokens. Of the columns that the recipe reads,
    `bytes_per_group[g]` is the size in row group g, uncompressed, `null_rows[g]` the number of rows known to be null, and
    `token_range` the least and the largest token id of the file, None if the footer has no statistics. A dataset may have ten
    million row groups: each takes a few bytes of an array.
    """

    path: Path
    date: FileStat
    digest: str
    rows_per_group: array[int]
    bytes_per_group: array[int]
    null_rows: array[int]
    token_range: tuple[int, int] | None


def read_shard(path: Path, recipe: Recipe) -> Shard:
    """Read the footer's facts about the recipe's columns.

    Raises DatasetInvalid: the file is truncated, damaged or not Parquet, lacks a column, or is being written to.
    """
    with _opened(path) as file:
        date = FileStat.of(os.fstat(file.fileno()))
        footer = read_footer(path, file)
        _check_columns(path, footer.schema, recipe)
        digest = _file_digest(file, date.size_bytes)
        if FileStat.of(path.stat()) != date:  # the content may be a mix of two files
            raise being_written(path)
    groups = [footer.metadata.row_group(g) for g in range(footer.metadata.num_row_groups)]
    read = _chunks_read(footer, recipe)
    return Shard(
        path=path,
        date=date,
        digest=digest,
        rows_per_group=numbers(g.num_rows for g in groups),
        bytes_per_group=numbers(sum(g.column(c).total_uncompressed_size for c in read) for g in groups),
        null_rows=numbers(_null_rows(footer, g, recipe) for g in groups),
        token_range=_token_range(footer, groups, recipe),
    )


def read_schema(path: Path) -> pa.Schema:
    """Return the columns of a Parquet file. Raises DatasetInvalid: it is truncated, damaged or not Parquet."""
    with _opened(path) as file:
        return read_footer(path, file).schema


def being_written(what: Path | str) -> DatasetInvalid:
    """Return the error for a file, or several, that change while they are read."""
    return DatasetInvalid(f"{what} is being written to: it changed while it was read. Wait until it is whole.")


def open_file(path: Path) -> BinaryIO:
    """Open a file to read its footer; only this function does so. Raises OSError."""
    check_is_file(path.stat(), path)
    return path.open("rb")


def open_shard(shard: Shard) -> pa.OSFile:
    """Open a shard's file to decode it. A later replacement of the file does not affect the reader. Raises OSError."""
    check_is_file(shard.path.stat(), shard.path)
    return pa.OSFile(str(shard.path))


def stat_of(file: pa.OSFile) -> FileStat:
    """Return the current FileStat of an open file. Raises OSError."""
    return FileStat.of(os.fstat(file.fileno()))


def is_of(file: pa.OSFile, shard: Shard) -> bool:
    """Return whether an open file is the one whose footer was read: FileStat or digest match. Raises OSError."""
    date = stat_of(file)
    if date == shard.date:
        return True
    return date.size_bytes == shard.date.size_bytes and _file_digest(file, date.size_bytes) == shard.digest


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if spelled(path.name) != path.name:
        raise DatasetInvalid(f"{spelled(str(path))} has a name that is not UTF-8, and no answer could hold it. Rename it.")
    try:
        with open_file(path) as file:
            yield file
    except OSError as error:
        advice = "Mend its storage"
        if isinstance(error, PermissionError):
            advice = "Let the server's user read it"
        elif error.errno in (ENOENT, EINVAL, ELOOP, ENAMETOOLONG):  # broken symlink, pipe, invalid file name
            advice = "Write it again"
        what = f"{path} cannot be read: {error.strerror or error}"
        raise DatasetInvalid(f"{what}. {advice}, or move it out of the folder.") from error


def _check_columns(path: Path, schema: pa.Schema, recipe: Recipe) -> None:
    try:
        recipe.check(schema)
    except (FieldError, FilterError) as error:
        said = str(error).rstrip(".")
        raise DatasetInvalid(
            f"{path}: {said}. Give all shards of a dataset the same columns, mend penstock.toml, or move this one to a folder "
            f"of its own."
        ) from error


def _file_digest(file: BinaryIO | pa.OSFile, size: int) -> str:
    """Hash the end of a file, with the footer, and samples spread over the rest; all of a small file."""
    digest = blake2b(digest_size=16)
    file.seek(size - 8)
    footer_bytes = int.from_bytes(file.read(4), "little") + 8
    for start in np.linspace(0, max(size - _SAMPLE_BYTES, 0), _SAMPLES, dtype=np.int64).tolist():
        file.seek(start)
        digest.update(file.read(_SAMPLE_BYTES))
    file.seek(max(size - footer_bytes, 0))
    digest.update(file.read())
    return digest.hexdigest()


def _chunks_read(footer: Footer, recipe: Recipe) -> list[int]:
    """Return the indices of a row group's column chunks that the recipe reads."""
    read = recipe.read_columns
    # A column's name may contain a dot.
    return [c for c, path in enumerate(footer.paths) if read is None or path in read or path.split(".")[0] in read]


def _null_rows(footer: Footer, group: pq.RowGroupMetaData, recipe: Recipe) -> int:
    """Return the number of a group's served rows that are null by the footer."""
    # In nested columns the count of nulls includes empty lists, and the filter may drop null rows.
    if recipe.transform or recipe.filter or recipe.kind == "tokens":
        return 0
    columns = [group.column(c) for c, path in enumerate(footer.paths) if path in recipe.token_columns]
    found = [column.statistics for column in columns if column.physical_type == "BYTE_ARRAY"]
    return max((s.null_count for s in found if s and s.has_null_count), default=0)


def _token_range(footer: Footer, groups: list[pq.RowGroupMetaData], recipe: Recipe) -> tuple[int, int] | None:
    """Return the least and the largest id in the columns of token lists, (0, 0) without ids, None without statistics."""
    names = [source.text for _, source in recipe.fields]
    if recipe.kind != "tokens" or recipe.transform or not {*names} <= {*recipe.token_columns}:  # inside a struct
        return None
    chunks = [group.column(leaf) for leaf in [_leaf(footer, name) for name in names] for group in groups]
    found = [c.statistics for c in chunks if c.num_values]
    unknown = [s for s in found if s is None or (s.num_values and not s.has_min_max)]
    ranges = [(int(s.min), int(s.max)) for s in found if s and s.has_min_max]
    if unknown:
        return None
    return min((low for low, _ in ranges), default=0), max((high for _, high in ranges), default=0)


def _leaf(footer: Footer, name: str) -> int:
    """Return the index of the column chunk with the values of a column of lists."""
    # A column called "tokens.n" is not part of the lists in "tokens". Leaves are in the order of the columns.
    # A list that protobuf wrote is a leaf of exactly this name.
    leaves = [c for c, path in enumerate(footer.paths) if f"{path}.".startswith(f"{name}.")]
    before = [field for field in list(footer.schema)[: footer.schema.names.index(name)] if field.name.startswith(f"{name}.")]
    return leaves[sum(num_leaves(field.type) for field in before)]
