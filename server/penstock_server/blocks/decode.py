"""Decoding: reads rows from shards, block by block, and maps read errors to problems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from errno import ESTALE

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.text import one_line
from penstock_server.blocks.parsed_footers import ParsedFooters
from penstock_server.parquet import open_parquet
from penstock_server.problems import OutOfMemory, ShardUnavailable, ShardUnreadable, SnapshotGone
from penstock_server.recipes.encode import select
from penstock_server.recipes.filter.sql import FilterError
from penstock_server.recipes.split_hashes import split_hashes
from penstock_server.recipes.transform import TransformError
from penstock_server.snapshots.folders import list_folder
from penstock_server.snapshots.shard import FileStat, Shard, is_of, open_shard, stat_of
from penstock_server.snapshots.snapshot import BlockAddress, Snapshot

_BUFFER_BYTES = 1 << 20
_PORTION_VALUES = 1 << 23  # of a column; encoding takes some twenty bytes per value

_footers = ParsedFooters()  # shared by all datasets of this process


def rows_of_group(
    snapshot: Snapshot, address: BlockAddress, columns: list[str] | None, *, in_portions: bool = False
) -> Iterator[tuple[BlockAddress, int, pa.RecordBatch]]:
    """Yields (block, first row in the block, rows) for the blocks of a row group, from its start; `columns` None is all.

    With `in_portions`, a block whose rows have very many values comes in several portions. Padding takes no room in a file, but
    as much memory as other values.

    Raises SnapshotGone: the shard is no longer the file whose footer was read. Raises OSError, ArrowException, ValueError.
    """
    # Page by page: a row group may have gigabytes, too many for memory.
    with _opened(snapshot, address.shard) as (source, opened), _parquet(address.shard, source, opened) as file:
        most_rows = address.rows_per_block
        if in_portions:
            most_rows = min(most_rows, _rows_of_a_portion(file.metadata.row_group(address.row_group), columns))
        batches = file.iter_batches(most_rows, [address.row_group], columns, use_threads=False)
        left: pa.RecordBatch | None = None
        for index in snapshot.blocks_of_group(address.group):
            at = snapshot.block(index)
            for first in range(0, max(1, at.num_rows), most_rows):
                wanted = min(most_rows, at.num_rows - first)
                rows, left = left or next(batches, None) or pa.RecordBatch.from_pylist([], schema=file.schema_arrow), None
                if rows.num_rows < wanted:
                    rows = completed(rows, batches, wanted)
                if rows.num_rows > wanted:  # batches need not end with a block
                    rows, left = rows.slice(0, wanted), rows.slice(wanted)
                if rows.num_rows != wanted:
                    raise ValueError(f"block {at.number} has {first + rows.num_rows} rows, not {at.num_rows}")
                rows.validate()
                _check_unwritten(source, opened)
                yield at, first, rows


def first_rows(snapshot: Snapshot, num_rows: int) -> pa.RecordBatch:
    """Returns the first `num_rows` rows of the first row group, after the filter. Raises what `reading` raises."""
    recipe, address = snapshot.recipe, snapshot.block(0)
    with (
        reading(snapshot, address),
        _opened(snapshot, address.shard) as (source, opened),
        _parquet(address.shard, source, opened) as file,
    ):
        batches = file.iter_batches(num_rows, [address.row_group], recipe.read_columns, use_threads=False)
        rows = next(batches, None) or pa.RecordBatch.from_pylist([], schema=file.schema_arrow)
        rows.validate()
        return select(rows, recipe, address.place)[0]


def _rows_of_a_portion(group: pq.RowGroupMetaData, columns: list[str] | None) -> int:
    chunks = [group.column(number) for number in range(group.num_columns)]
    read = [chunk.num_values for chunk in chunks if columns is None or _is_of(chunk.path_in_schema, columns)]
    num_rows: int = _PORTION_VALUES * group.num_rows // max([1, *read])
    return max(1, num_rows)


def _is_of(path: str, columns: list[str]) -> bool:
    """Returns whether a path of values belongs to one of these columns; a column's name may have dots."""
    return any(path == column or path.startswith(f"{column}.") for column in columns)


def completed(rows: pa.RecordBatch, more: Iterator[pa.RecordBatch], num_rows: int) -> pa.RecordBatch:
    """Adds rows from `more` up to `num_rows`, since pyarrow ends a batch early at 2 GiB of text. Casts texts to large types.

    Raises ValueError: the texts are nested in lists or structs, which hold at most 2 GiB.
    """
    parts = [rows]
    while sum(part.num_rows for part in parts) < num_rows and (part := next(more, None)):
        parts.append(part)
    large = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
    schema = pa.schema([field.with_type(large.get(field.type, field.type)) for field in rows.schema])
    try:
        return pa.concat_batches([part.cast(schema) for part in parts])
    except pa.ArrowInvalid as error:
        raise ValueError(f"{num_rows:,} of its rows hold more than 2 GiB; write row groups of fewer rows") from error


def hashes_of_shard(snapshot: Snapshot, shard: int) -> Iterator[tuple[BlockAddress, npt.NDArray[np.uint32]]]:
    """Yields the split hashes of the rows that the recipe keeps, for each block of a shard.

    Reads only the columns that the filter and the split need. Raises what `reading` raises.
    """
    recipe = snapshot.recipe
    addresses = [snapshot.block(index) for index in snapshot.blocks_of_shard(shard)]
    columns = recipe.selecting_columns
    if not columns:
        nothing = pa.RecordBatch.from_pylist([])
        for at in addresses:
            yield at, split_hashes(nothing, recipe, at.place, np.arange(at.num_rows))
        return
    for first in (at for at in addresses if at.number == 0):
        with reading(snapshot, first):
            for at, _, rows in rows_of_group(snapshot, first, columns):
                _, _, hashes = select(rows, recipe, at.place)
                yield at, hashes


@contextmanager
def reading(snapshot: Snapshot, address: BlockAddress) -> Iterator[None]:
    """Converts read errors to problems that name the row group.

    Raises ShardUnreadable: it cannot be decoded.  Raises ShardUnavailable: the storage fails.
    Raises OutOfMemory: the memory is too small.
    """
    try:
        yield
    except MemoryError as error:  # first: pyarrow's MemoryError is also an ArrowException
        what = f"for {_place(address)} of {snapshot.name}"
        advice = "write smaller rows. Or the shard is damaged: such a one may ask for any amount"
        raise OutOfMemory(what, error, advice) from error
    except OSError as error:
        if error.errno is None:  # pyarrow also raises this for a damaged file
            raise _unreadable(snapshot, address, error) from error
        raise ShardUnavailable(
            f"{snapshot.name}: {address.shard.path} cannot be read now: {error.strerror}. The client tries "
            f"again; if it stays so, mend the storage or its permissions."
        ) from error
    except (pa.ArrowException, ValueError) as error:
        raise _unreadable(snapshot, address, error) from error


@contextmanager
def _opened(snapshot: Snapshot, shard: Shard) -> Iterator[tuple[pa.OSFile, FileStat]]:
    """Opens a shard's file once; yields it and its stat. With two opens, the checked file and the read file could differ.

    Raises SnapshotGone: the shard is no longer the file whose footer was read. Raises OSError.
    """
    try:
        file = open_shard(shard)
    except FileNotFoundError:
        if not list_folder(shard.path.parent).shards:  # unmounted storage looks like an empty or missing folder
            raise
        raise SnapshotGone(
            f"snapshot {snapshot.fingerprint} is gone: {shard.path.name} was removed since the server read it. Put it back, or "
            f"begin a new run without it."
        ) from None
    with file:
        date = stat_of(file)
        if not is_of(file, shard):
            raise SnapshotGone(
                f"snapshot {snapshot.fingerprint} is gone: {shard.path.name} changed since the server read it. Put the old "
                f"file back, or begin a new run once the server has taken the new one in."
            )
        yield file, date


def _parquet(shard: Shard, source: pa.OSFile, opened: FileStat) -> pq.ParquetFile:
    """Opens a shard to be read page by page, with the footer parsed before."""
    footer = _footers.of(shard.path, source, opened)
    return open_parquet(source, metadata=footer, buffer_size=_BUFFER_BYTES, pre_buffer=False)


def _check_unwritten(file: pa.OSFile, opened: FileStat) -> None:
    if stat_of(file) != opened:  # rewritten in place: the rows just read may mix both contents
        raise OSError(ESTALE, "it is being written to")


def _unreadable(snapshot: Snapshot, address: BlockAddress, error: Exception) -> ShardUnreadable:
    reason = one_line(error)
    name, row_group = snapshot.name, _place(address)
    if isinstance(error, (FilterError, TransformError)):
        what = "filter" if isinstance(error, FilterError) else "transform"
        return ShardUnreadable(
            f"{name}: {reason.rstrip('.')}, on {row_group}. Batches that need it fail. Mend the {what}, or the data: with "
            f"another {what} the dataset is another snapshot, and a run begins anew."
        )
    return ShardUnreadable(
        f"{name}: {row_group} cannot be read: {reason}. Batches that need it fail until the shard is mended; move it out of "
        f"the folder to train without it."
    )


def _place(address: BlockAddress) -> str:
    return f"row group {address.row_group} of {address.shard.path.name}"
