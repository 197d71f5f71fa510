"""Footer of a Parquet file, checked, so that a damaged one cannot crash the process."""

from __future__ import annotations

import os
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.text import one_line
from penstock_server.parquet import open_parquet
from penstock_server.problems import DatasetInvalid

_MAGIC = b"PAR1"


class Footer(NamedTuple):
    """Footer, its columns, and the path of each column chunk of a row group, in order."""

    metadata: pq.FileMetaData
    schema: pa.Schema
    paths: list[str]


def read_footer(path: Path, file: BinaryIO) -> Footer:
    """Read and check the footer of an open file.

    Raises DatasetInvalid: it is truncated, damaged, encrypted or not Parquet. Raises OSError: its storage fails.
    """
    _check_footer(path, file)
    try:
        # Metadata and its schema refer to each other until garbage collection: without this, thousands of shards would keep
        # thousands of footers in memory.
        opened = open_parquet(file)
        columns = pq.ParquetSchema(opened.metadata)
        paths = [columns.column(c).path for c in range(opened.metadata.num_columns)]
        _check_chunks(opened.metadata, columns, file.seek(0, os.SEEK_END))
        return Footer(opened.metadata, opened.schema_arrow, paths)
    except MemoryError:
        raise
    except pa.ArrowNotImplementedError as error:
        raise DatasetInvalid(
            f"{path} has a column of a type that is not supported: {one_line(error)}. Write it as another type, or without it."
        ) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno:  # pyarrow's error for a damaged footer has no errno
            raise
        what = "is encrypted, which is not supported" if "decrypt" in str(error) else f"has a damaged footer: {one_line(error)}"
        raise refused(path, what) from error


def refused(path: Path, what: str) -> DatasetInvalid:
    """Return the error for a shard that cannot be read."""
    return DatasetInvalid(f"{path} {what}. Write it again, or move it out of the folder.")


def _check_footer(path: Path, file: BinaryIO) -> None:
    """Check that a file ends in a Parquet footer. Raises DatasetInvalid: it does not; the message names the likely format."""
    size = file.seek(0, os.SEEK_END)
    if size < 12:
        raise refused(path, f"is {size} bytes long, too short for Parquet")
    file.seek(size - 8)
    tail = file.read(8)
    length, magic = int.from_bytes(tail[:4], "little"), tail[4:]
    if magic == b"PARE":
        raise refused(path, "is encrypted, which is not supported")
    file.seek(0)
    if magic != _MAGIC:
        begins = file.read(4) == _MAGIC
        raise refused(path, "is truncated: its end is missing" if begins else "is not a Parquet file")
    if length > size - 12:
        raise refused(path, f"is truncated: its footer claims {length:,} bytes of a file of {size:,}")


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
