"""Arrow and Parquet files. They store their types, so a survey reads rows only to find how large token ids are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.text import one_line
from penstock_server.arrow import take_rows
from penstock_server.importing.columns import may_be_wide, normal_schema, wide_columns
from penstock_server.importing.source import TABLE_BYTES, Advance, ImportRefused, Survey
from penstock_server.importing.stream import unreadable
from penstock_server.parquet import open_parquet

_FILE_MAGIC, _OLD_FEATHER_MAGIC = b"ARROW1", b"FEA1"
_MAX_ROWS = 65_536  # of a table, however small its rows
_CASTABLE_BYTES = 1 << 30  # 32-bit offsets reach up to twice that


class ArrowFile:
    """Memory-mapped Arrow IPC file (such as Feather) or stream. A compressed record batch is read as a whole."""

    def __init__(self, path: Path, columns: Sequence[str] | None) -> None:
        self.path = path
        self._columns = columns

    def survey(self, advance: Advance) -> Survey:
        """Return the columns of the schema. Raises ImportRefused: not an Arrow file, or a damaged one."""
        with refusing(self.path), pa.memory_map(os.fsencode(self.path)) as mapped:
            schema = _open(mapped).schema
        return survey_typed(self.path, schema, self._columns, lambda names: self._tables(names, advance))

    def tables(self, survey: Survey, advance: Advance) -> Iterator[pa.Table]:
        """Yield the rows of all record batches. Raises ImportRefused: the file is damaged, or holds text that is not UTF-8."""
        return self._tables(survey.schema.names, advance)

    def _tables(self, names: Sequence[str], advance: Advance) -> Iterator[pa.Table]:
        with refusing(self.path), pa.memory_map(os.fsencode(self.path)) as mapped:
            for batch, position in _batches(_open(mapped), mapped):
                yield from portions(batch.select(names))
                advance(position)


class ParquetFile:
    """Parquet file, read page by page: row groups may be of any size."""

    def __init__(self, path: Path, columns: Sequence[str] | None) -> None:
        self.path = path
        self._columns = columns

    def survey(self, advance: Advance) -> Survey:
        """Return the columns of the footer. Raises ImportRefused: not a Parquet file, or a damaged one."""
        with refusing(self.path), _opened(self.path) as opened, open_parquet(opened) as file:
            schema = file.schema_arrow
        return survey_typed(self.path, schema, self._columns, lambda names: self._tables(names, advance))

    def tables(self, survey: Survey, advance: Advance) -> Iterator[pa.Table]:
        """Yield the rows of all row groups. Raises ImportRefused: the file is damaged, or holds text that is not UTF-8."""
        return self._tables(survey.schema.names, advance)

    def _tables(self, names: Sequence[str], advance: Advance) -> Iterator[pa.Table]:
        if not names:
            return
        size = self.path.stat().st_size
        with (
            refusing(self.path),
            _opened(self.path) as opened,
            open_parquet(opened, buffer_size=1 << 20, pre_buffer=False) as file,
        ):
            groups = _row_groups(file.metadata)
            num_rows = sum(group.num_rows for group in groups)
            nbytes = sum(group.total_byte_size for group in groups)
            most_rows = max(1, min(_MAX_ROWS, num_rows * TABLE_BYTES // max(nbytes, 1)))
            done = 0
            for number, group in enumerate(groups):  # of some types pyarrow cannot read a batch across two groups
                before = done
                for batch in file.iter_batches(most_rows, [number], columns=list(names)):
                    yield from portions(batch.select(names))
                    done += batch.num_rows
                    advance(size * done // max(num_rows, done))
                if done - before != group.num_rows:
                    raise ValueError(
                        f"row group {number} is damaged: the footer states {group.num_rows:,} rows, but only "
                        f"{done - before:,} can be read"
                    )


def _row_groups(metadata: pq.FileMetaData) -> list[pq.RowGroupMetaData]:
    """Return the row groups of a footer, after checking that no row is missing.

    Some writers leave the file's own number of rows too small; all rows are in the row groups then, and are read.
    Raises ValueError: the row groups have fewer rows than the file, or than one of their columns.
    """
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    num_rows = sum(group.num_rows for group in groups)
    if num_rows < metadata.num_rows:
        raise ValueError(f"the footer is damaged: it states {metadata.num_rows:,} rows, but {num_rows:,} in the row groups")
    # A column of lists has any number of values a row; every other column has exactly one, null counted too.
    flat = [index for index in range(metadata.num_columns) if metadata.schema.column(index).max_repetition_level == 0]
    for number, group in enumerate(groups):
        for chunk in map(group.column, flat):
            if chunk.num_values > group.num_rows:
                raise ValueError(
                    f"row group {number} is damaged: the footer states {group.num_rows:,} rows, but {chunk.num_values:,} "
                    f"values in column {chunk.path_in_schema!r}"
                )
    return groups


def _open(mapped: pa.MemoryMappedFile) -> pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader:
    magic = mapped.read(len(_FILE_MAGIC))
    if magic.startswith(_OLD_FEATHER_MAGIC):
        raise ValueError("it is Feather of version 1, which is not read; version 2 is")
    mapped.seek(0)
    return pa.ipc.open_file(mapped) if magic == _FILE_MAGIC else pa.ipc.open_stream(mapped)


def _batches(
    reader: pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader, mapped: pa.MemoryMappedFile
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield the record batches, and the offset of each in the file."""
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number), mapped.size() * (number + 1) // reader.num_record_batches
    else:
        for batch in reader:
            yield batch, mapped.tell()
        if mapped.tell() < mapped.size():
            raise ValueError("bytes follow the end of its stream, as where two files were joined; import them one by one")


def portions(batch: pa.RecordBatch) -> Iterator[pa.Table]:
    """Yield a record batch in portions of some MiB."""
    rows = max(1, min(_MAX_ROWS, batch.num_rows * TABLE_BYTES // max(batch.nbytes, 1)))
    for start in range(0, batch.num_rows, rows):
        if batch.nbytes < _CASTABLE_BYTES:
            portion = batch.slice(start, rows)
        else:  # a slice keeps the offsets of the whole batch, and casts refuse offsets that are too large
            portion = take_rows(batch, np.arange(start, min(start + rows, batch.num_rows)))
        table = pa.Table.from_batches([portion])
        table.validate(full=True)
        yield table


def survey_typed(
    path: Path, schema: pa.Schema, columns: Sequence[str] | None, read: Callable[[list[str]], Iterable[pa.Table]]
) -> Survey:
    """Return the survey of a file of this schema. `read` yields the columns whose type does not bound the ids.

    Raises ImportRefused: a column cannot be imported.
    """
    with refusing(path):
        chosen = normal_schema(schema, columns)
        wide = frozenset[str]()
        open_ = set(may_be_wide(chosen))
        for table in read(sorted(open_)) if open_ else ():
            wide |= wide_columns(table)
            if wide == open_:
                break
    return Survey(names=tuple(schema.names), schema=chosen, wide=wide)


@contextmanager
def refusing(path: Path, advice: str = "Write the file again, or choose columns with --columns") -> Iterator[None]:
    """Turn errors of reading a file into ImportRefused, except MemoryError."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error
    except MemoryError:
        raise
    except (pa.ArrowException, ValueError) as error:
        raise ImportRefused(f"{path} cannot be imported: {one_line(error)}. Nothing was written. {advice}.") from error


def _opened(path: Path) -> pa.OSFile:
    """Open a file by its path as bytes: pyarrow takes text such as s3:x for a URI, and refuses paths that are not UTF-8."""
    return pa.OSFile(os.fsencode(path))
