"""Decoding: reads rows from shards, block by block, and maps read errors to problems."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from errno import ESTALE
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.printable import printable
from penstock.text import counted, one_line
from penstock_server.catalog.scan import FileStat, is_settled, list_folder
from penstock_server.catalog.shard import Shard, is_of, open_shard, stat_of
from penstock_server.catalog.snapshot import BlockAddress, Snapshot
from penstock_server.parquet import open_parquet
from penstock_server.problems import OutOfMemory, ShardUnavailable, ShardUnreadable, SnapshotGone
from penstock_server.recipes import encode
from penstock_server.recipes.encode import REASON, Selected, select
from penstock_server.recipes.filter.sql import FilterError
from penstock_server.recipes.split import Place, split_hashes
from penstock_server.recipes.transform import TransformError

_FORMAT = 6  # of the stored blocks: after a change, they are rebuilt


class BlockNames:
    """Cache names of one snapshot's blocks, and of the files derived from all of them."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._shared = json.dumps(
            [_FORMAT, snapshot.recipe.identity, snapshot.token_dtype, snapshot.token_bound], sort_keys=True
        )

    def of(self, index: int) -> str:
        """Returns the name of a block; `index` is in [0, num_blocks)."""
        address = self._snapshot.block(index)
        return name_in(self._of_group(address), address.number)

    def of_group(self, address: BlockAddress) -> list[str]:
        """Returns the names of all blocks in the row group of a block."""
        group = self._of_group(address)
        return [name_in(group, number) for number in range(len(self._snapshot.blocks_of_group(address.group)))]

    @cached_property
    def of_all(self) -> str:
        """Returns a name for the tokens and splits of all blocks, which depend on nothing else."""
        return _digest([*map(self.of_shard, range(len(self._snapshot.shards)))])

    def of_shard(self, shard: int) -> str:
        """Returns a name for the tokens and splits of one shard's blocks."""
        blocks = self._snapshot.blocks_of_shard(shard)
        sizes = self._snapshot.rows_per_block[blocks.start : blocks.stop].tolist()
        identity = _identity_of(self._snapshot.shards[shard])
        own_split = self._snapshot.split_of_shard(shard)
        of_others = [own_split] if own_split != "train" else []
        return _digest([identity, sizes, self._shared, self._snapshot.validation, *of_others])

    def _of_group(self, address: BlockAddress) -> str:
        return _digest([*_identity_of(address.shard), address.row_group, address.rows_per_block, self._shared])


def name_in(group: str, number: int) -> str:
    """Returns the name of a block from the name of its row group."""
    return f"{group}-{number}"


def group_of(name: str) -> str:
    """Returns the name of a block's row group."""
    return name.rpartition("-")[0]


def _digest(parts: list[Any]) -> str:
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _identity_of(shard: Shard) -> list[str | int]:
    # Includes path and mtime, since the shard's digest covers only samples of its bytes.
    return [str(shard.path.absolute()), shard.date.size_bytes, shard.date.mtime_ns, shard.digest]


_FOOTER_BYTES = 4 << 20  # of stored footers; parsed, they take some ten times as much memory
_MAX_FOOTERS = 64  # parsing a footer of a few row groups takes less time than decoding one of them


class ParsedFooters:
    """Footers of the most recently read shards: the last one, and others within a budget. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Path, FileStat], pq.FileMetaData] = OrderedDict()

    def of(self, path: Path, file: pa.OSFile, date: FileStat) -> pq.FileMetaData:
        """Returns the footer of an opened shard file with this stat. Raises OSError, ArrowException: it is unreadable."""
        key = path, date
        with self._lock:
            if found := self._known.get(key):
                self._known.move_to_end(key)
                return found
        found = pq.read_metadata(file)
        if is_settled(date, time.time()) and stat_of(file) == date:
            with self._lock:
                self._known[key] = found
                while len(self._known) > 1 and self._are_too_many():
                    self._known.popitem(last=False)
        return found

    def _are_too_many(self) -> bool:
        nbytes = sum(footer.serialized_size for footer in self._known.values())
        return nbytes > _FOOTER_BYTES or len(self._known) > _MAX_FOOTERS


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


log = logging.getLogger("penstock.blocks")


class RowGroupReader:
    """Reads the row groups of one snapshot, block by block. Its methods raise what `decode.reading` raises."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    def rows(
        self, address: BlockAddress, is_needed: Callable[[int], bool] = lambda _: True
    ) -> Generator[tuple[BlockAddress, Selected, bool], None, None]:
        """Reads the rows that the recipe keeps, block by block, from the start of a row group.

        Yields (block, rows, whether these are its last). A block whose rows have very many values comes in several parts.
        Calls `is_needed(number)` before each block, and skips the block if the result is false.
        """
        snapshot, recipe = self.snapshot, self.snapshot.recipe
        needs_block = False
        with reading(snapshot, address):
            # A transform may need all rows of a block.
            for at, first, rows in rows_of_group(snapshot, address, recipe.read_columns, in_portions=not recipe.transform):
                needs_block = needs_block if first else is_needed(at.number)
                if needs_block:
                    place = Place(at.place.shard, at.place.first_row + first)
                    yield at, Selected.of(rows, recipe, place, first), first + rows.num_rows == at.num_rows

    def encode(self, rows: Selected, address: BlockAddress) -> pa.RecordBatch:
        """Encodes rows of blocks with the same `token_bound`; errors name the row group of `address`."""
        with reading(self.snapshot, address):
            return encode.encode(rows, self.snapshot.recipe, self.snapshot.token_dtype, self.token_bound(address))

    def token_bound(self, address: BlockAddress) -> int:
        """Returns the exclusive upper bound of token ids in a block; larger ids make a row bad."""
        return self.snapshot.bound_in(address.shard)

    def blocks(
        self, address: BlockAddress, is_needed: Callable[[int], bool]
    ) -> Generator[tuple[int, pa.RecordBatch], None, None]:
        """Yields (number, tokens) of each block of a row group, from the group's start; `is_needed` as in `rows`."""
        parts = list[pa.RecordBatch]()
        for at, rows, is_last in self.rows(address, is_needed):
            parts.append(self.encode(rows, at))
            if is_last:
                batch = pa.concat_batches(parts) if len(parts) > 1 else parts[0]
                parts.clear()
                self.warn_of_bad_rows(at, batch)
                yield at.number, batch

    def warn_of_bad_rows(self, address: BlockAddress, batch: pa.RecordBatch) -> None:
        """Logs the number of unusable rows of an encoded block."""
        reasons = pc.drop_null(batch.column(REASON))
        if len(reasons):
            first = f"the first: {printable(reasons[0].as_py())}"
            policy = self.snapshot.recipe.on_bad_row
            then = "neighbours are served in their place" if policy == "replace" else "batches that hold one fail"
            rows_of = f"{address.shard.path}, row group {address.row_group}"
            log.warning("%s: %s cannot be used (%s); %s", rows_of, counted(len(reasons), "row"), first, then)
