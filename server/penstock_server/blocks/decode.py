"""Decoding: reads the rows of a snapshot's shards, block by block, and turns read errors into problems."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from errno import ESTALE
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.text import counted, one_line, printable
from penstock_server.arrow import open_parquet
from penstock_server.blocks.pages import pages, start_of
from penstock_server.catalog.scan import list_shards
from penstock_server.catalog.shard import File, Shard, is_of, stat_of
from penstock_server.catalog.snapshot import BlockAddress, Snapshot
from penstock_server.files import open_regular
from penstock_server.lru import LruCache
from penstock_server.monitoring.stages import StageClock
from penstock_server.problems import OutOfMemory, ShardUnavailable, ShardUnreadable, SnapshotGone
from penstock_server.recipes import encode
from penstock_server.recipes.encode import REASON, Selected
from penstock_server.recipes.fields import is_text
from penstock_server.recipes.filter import FilterError
from penstock_server.recipes.split import Place, split_hashes
from penstock_server.recipes.transform import TransformError
from penstock_server.sources.remote import Changed, RemotePath
from penstock_server.sources.remote_file import RemoteFile
from penstock_server.sources.stats import FileStat

log = logging.getLogger("penstock.blocks")

_FORMAT = 7  # of the stored blocks: after a change, they are rebuilt
_BUFFER_BYTES = 1 << 20
_BLOCK_ROWS = 1 << 16
_READ_BYTES, _MAX_PORTION_BYTES = 64 << 20, 1 << 30
_PORTION_VALUES = 1 << 23  # of a column; encoding takes some twenty bytes per value
_FOOTER_BYTES = 4 << 20  # of remembered footers; parsed, they take some ten times as much memory
_REMEMBERED_NAMES = 1 << 15  # computing the name of a block takes longer than copying a row


class BlockNames:
    """Cache names of one snapshot's blocks: hashes of all inputs of their tokens, so a changed shard gets new blocks."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._shared = json.dumps(
            [_FORMAT, snapshot.recipe.identity, snapshot.token_dtype, snapshot.token_bound], sort_keys=True
        )
        self.of = lru_cache(_REMEMBERED_NAMES)(self._of)

    def _of(self, index: int) -> str:
        """Returns the name of a block; `index` is in [0, num_blocks)."""
        address = self._snapshot.block(index)
        return f"{self.of_group(address)}-{address.number}"

    def of_group(self, address: BlockAddress) -> str:
        """Returns the name of a block's row group."""
        return _digest([*_identity_of(address.shard), address.row_group, address.rows_per_block, self._shared])

    def of_unit(self, address: BlockAddress) -> str:
        """Returns a name for the tokens and splits of the blocks of one row group."""
        return _digest([self.of_group(address), self._snapshot.validation])

    def of_shard(self, shard: int) -> str:
        """Returns a name for the tokens and splits of one shard's blocks."""
        blocks = self._snapshot.blocks_of_shard(shard)
        sizes = self._snapshot.rows_per_block[blocks.start : blocks.stop].tolist()
        identity = _identity_of(self._snapshot.shards[shard])
        split = self._snapshot.shard_splits[shard]
        other_split = [split] if split != "train" else []
        return _digest([identity, sizes, self._shared, self._snapshot.validation, *other_split])

    @cached_property
    def of_all(self) -> str:
        """A name for the tokens and splits of all blocks."""
        return _digest([*map(self.of_shard, range(len(self._snapshot.shards)))])


def _digest(parts: list[Any]) -> str:
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _identity_of(shard: Shard) -> list[str | int]:
    # The name of the file decides splits by a hash, and rows have their place in it. Its folder and mtime change no token.
    return [shard.path.name, shard.stat.size_bytes, shard.digest]


class ParsedFooters:
    """Footers of the most recently read shards: parsing one of 20,000 row groups takes longer than reading a row group."""

    def __init__(self) -> None:
        self._parsed = LruCache[pq.FileMetaData](_FOOTER_BYTES, lambda footer: footer.serialized_size, fewest=1)

    def of(self, path: Path | RemotePath, file: File, file_stat: FileStat) -> pq.FileMetaData:
        """Returns the footer of an opened shard file with this stat. Raises OSError, ArrowException: it is unreadable."""
        return self._parsed.get((path, file_stat), lambda: _read_footer(file))


def _opened_file(path: Path | RemotePath, stat: FileStat) -> pa.OSFile | RemoteFile:
    if not isinstance(path, Path):
        return RemoteFile(path, stat)
    with open_regular(path):  # to open a pipe, OSFile would wait forever
        return pa.OSFile(str(path))


def _read_footer(file: File) -> pq.FileMetaData:
    if isinstance(file, RemoteFile):
        file.fetch_tail()
    return pq.read_metadata(file)


class RowGroupReader:
    """Reads the row groups of one snapshot, block by block.

    Its methods raise:
        ShardUnreadable: a row group cannot be decoded.
        ShardUnavailable: the storage fails.
        SnapshotGone: a shard is no longer the file whose footer was read.
        OutOfMemory: a row group does not fit into memory.
    """

    def __init__(self, snapshot: Snapshot, footers: ParsedFooters) -> None:
        self.snapshot = snapshot
        self.names = BlockNames(snapshot)
        self._footers = footers

    def blocks(self, address: BlockAddress) -> Generator[tuple[BlockAddress, Iterator[Selected]], None, None]:
        """Yields the blocks of a row group, from its start, each with the rows that the recipe keeps.

        The rows of a block come in several parts if they have very many values. Read them before the next block, or skip them.
        """
        recipe = self.snapshot.recipe
        with self._reading(address):
            # A transform may need all rows of a block.
            portions = self._rows(address, recipe.read_columns, in_portions=not recipe.transform)
            for at, of_block in groupby(portions, key=itemgetter(0)):
                yield at, self._selected(at, of_block)

    def block(self, address: BlockAddress) -> Selected:
        """Returns the rows of one block that the recipe keeps."""
        return next(Selected.joined([*parts]) for at, parts in self.blocks(address) if at.number == address.number)

    def encode(self, rows: Selected, address: BlockAddress) -> pa.RecordBatch:
        """Encodes rows; errors name the row group of `address`."""
        with self._reading(address):
            bound = self.snapshot.bound_in(address.shard)
            return encode.encode(rows, self.snapshot.recipe, self.snapshot.token_dtype, bound)

    def encode_block(self, parts: Iterable[Selected], address: BlockAddress, clock: StageClock) -> pa.RecordBatch:
        """Encodes the rows of a whole block, which are decoded meanwhile, and logs its bad rows."""
        batches, stage = list[pa.RecordBatch](), "tokenize" if self.snapshot.recipe.tokenizer else "decode"
        for part in parts:
            clock.enter(stage)
            batches.append(self.encode(part, address))
            clock.enter("decode")
        batch = pa.concat_batches(batches) if len(batches) > 1 else batches[0]
        self.warn_of_bad_rows(batch, address)
        return batch

    def warn_of_bad_rows(self, batch: pa.RecordBatch, address: BlockAddress) -> None:
        """Logs the number of unusable rows of an encoded block."""
        reasons = pc.drop_null(batch.column(REASON))
        if len(reasons):
            replaces = self.snapshot.recipe.on_bad_row == "replace"
            log.warning(
                "%s, row group %s: %s cannot be used (the first: %s); %s",
                address.shard.path,
                address.row_group,
                counted(len(reasons), "row"),
                printable(reasons[0].as_py()),
                "neighbours are served in their place" if replaces else "batches that hold one fail",
            )

    def split_hashes(self, shard: int) -> Iterator[tuple[BlockAddress, npt.NDArray[np.uint32]]]:
        """Yields the split hashes of the rows that the recipe keeps, for each block of a shard; reads only what they need."""
        recipe, nothing = self.snapshot.recipe, pa.RecordBatch.from_pylist([])
        for address in map(self.snapshot.block, self.snapshot.blocks_of_shard(shard)):
            if not recipe.selecting_columns:
                yield address, split_hashes(nothing, recipe, address.place, np.arange(address.num_rows))
            elif address.number == 0:
                with self._reading(address):
                    for at, _, rows in self._rows(address, recipe.selecting_columns):
                        yield at, Selected.of(rows, recipe, at.place).hashes

    def _selected(self, at: BlockAddress, portions: Iterator[tuple[BlockAddress, int, pa.RecordBatch]]) -> Iterator[Selected]:
        with self._reading(at):
            for _, first, rows in portions:
                place = Place(at.place.shard, at.place.first_row + first)
                yield Selected.of(rows, self.snapshot.recipe, place, first).transformed(self.snapshot.recipe)

    def _rows(
        self, address: BlockAddress, columns: list[str] | None, *, in_portions: bool = False
    ) -> Iterator[tuple[BlockAddress, int, pa.RecordBatch]]:
        """Yields (block, first row in the block, rows) for the blocks of a row group, from its start; `columns` None is all.

        With `in_portions`, a block whose rows have very many values comes in several portions. Padding takes no room in a
        file, but as much memory as other values.
        """
        # Page by page: a row group may have gigabytes, too many for memory.
        with self._opened(address.shard) as (source, opened, file):
            most_rows, group = address.rows_per_block, file.metadata.row_group(address.row_group)
            if isinstance(source, RemoteFile):
                source.fetch_all(_chunks(group, columns))
            if in_portions:
                most_rows = min(most_rows, _rows_of_a_portion(group, columns))
            read_rows = min(most_rows, _rows_of_a_read(source, group, columns))
            batches = file.iter_batches(read_rows, [address.row_group], columns, use_threads=False)
            left: pa.RecordBatch | None = None
            for index in self.snapshot.blocks_of_group(address.group):
                at = self.snapshot.block(index)
                for first in range(0, max(1, at.num_rows), most_rows):
                    wanted = min(most_rows, at.num_rows - first)
                    pieces, missing, nbytes = list[pa.RecordBatch](), wanted, 0
                    while missing and (more := left or next(batches, None)):
                        pieces.append(more.slice(0, missing))
                        left = more.slice(missing)  # batches need not end with a block
                        missing -= pieces[-1].num_rows
                        nbytes += sum(map(_expanded_bytes, pieces[-1].columns))
                        if nbytes > _MAX_PORTION_BYTES:
                            num_rows = wanted - missing
                            raise ValueError(
                                f"{counted(num_rows, 'row')} of it take {nbytes:,} bytes of memory, more than "
                                f"{_MAX_PORTION_BYTES:,}; {group.num_rows:,} rows are stored in "
                                f"{sum(_column_bytes(group)):,} bytes. Write shorter rows, or smaller row groups"
                            )
                    rows = pa.concat_batches(pieces) if pieces else pa.RecordBatch.from_pylist([], schema=file.schema_arrow)
                    if rows.num_rows != wanted:
                        raise ValueError(f"block {at.number} has {first + rows.num_rows} rows, not {at.num_rows}")
                    rows.validate()
                    if stat_of(source) != opened:  # rewritten in place: the rows just read may mix both contents
                        raise OSError(ESTALE, "it is being written to")
                    yield at, first, rows

    @contextmanager
    def _opened(self, shard: Shard) -> Iterator[tuple[File, FileStat, pq.ParquetFile]]:
        """Opens a shard, only once, since it may be replaced; yields it, its stat, and a reader of its pages."""
        path = shard.path
        try:
            with _opened_file(path, shard.stat) as file:
                file_stat = stat_of(file)
                if not is_of(file, shard):
                    raise Changed
                footer = self._footers.of(path, file, file_stat)
                options = {"buffer_size": _BUFFER_BYTES, "pre_buffer": False, "page_checksum_verification": True}
                with open_parquet(file, metadata=footer, **options) as pages:
                    yield file, file_stat, pages
        except FileNotFoundError:
            if not list_shards(path.parent):  # unmounted storage looks like an empty or missing folder
                raise
            raise self._gone(shard, "was removed since the server read it. Put it back") from None
        except Changed:
            raise self._gone(shard, "changed since the server read it. Put the old file back") from None

    def _gone(self, shard: Shard, what: str) -> SnapshotGone:
        return SnapshotGone(
            f"snapshot {self.snapshot.fingerprint} is gone: {shard.path.name} {what}, or begin a new run with the current data."
        )

    @contextmanager
    def _reading(self, address: BlockAddress) -> Iterator[None]:
        """Converts read errors to problems that name the row group."""
        name = self.snapshot.name
        row_group = f"row group {address.row_group} of {address.shard.path.name}"
        try:
            yield
        except MemoryError as error:  # first: pyarrow's MemoryError is also an ArrowException
            advice = "write smaller row groups; a damaged shard may also need any amount"
            raise OutOfMemory(f"for {row_group} of {name}", error, advice) from error
        except (FilterError, TransformError) as error:
            what = "filter" if isinstance(error, FilterError) else "transform"
            raise ShardUnreadable(
                f"{name}: {one_line(error).rstrip('.')}, on {row_group}. Batches that need it fail. Correct the data or the "
                f"{what}; another {what} is another snapshot, and a run begins anew."
            ) from error
        except (pa.ArrowException, ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # pyarrow raises it without a number for damage
                raise ShardUnavailable(
                    f"{name}: {address.shard.path} cannot be read now: {error.strerror}. Retry; if it persists, check the "
                    f"storage and its permissions."
                ) from error
            raise ShardUnreadable(
                f"{name}: {row_group} cannot be read: {one_line(error)}. Batches that need it fail. Repair the shard, or move "
                f"it out of the folder to train without it."
            ) from error


def _chunks(group: pq.RowGroupMetaData, columns: list[str] | None) -> Iterator[tuple[int, int]]:
    """Yield the range of bytes of each column chunk to read."""
    for chunk in map(group.column, range(group.num_columns)):
        if columns is None or _is_of(chunk.path_in_schema, columns):
            start = start_of(chunk)
            yield start, start + chunk.total_compressed_size


def _rows_of_a_portion(group: pq.RowGroupMetaData, columns: list[str] | None) -> int:
    chunks = [group.column(number) for number in range(group.num_columns)]
    read = [chunk.num_values for chunk in chunks if columns is None or _is_of(chunk.path_in_schema, columns)]
    num_rows: int = _PORTION_VALUES * group.num_rows // max([1, *read])
    return max(1, num_rows)


def _rows_of_a_read(file: File, group: pq.RowGroupMetaData, columns: list[str] | None) -> int:
    """Return the number of rows to read at a time: each may hold the longest value of a column's dictionary.

    Raises ValueError: a page grows too much.
    """
    num_rows = _BLOCK_ROWS
    for chunk in map(group.column, range(group.num_columns)):
        if columns is None or _is_of(chunk.path_in_schema, columns):
            longest = max((page.nbytes for page in pages(file, chunk) if page.is_dictionary), default=0)
            if chunk.physical_type == "BYTE_ARRAY" and longest:
                num_rows = min(num_rows, _READ_BYTES * group.num_rows // (longest * max(1, chunk.num_values)))
    return max(1, num_rows)


def _expanded_bytes(array: pa.Array) -> int:
    """Return the bytes of an array without its dictionary: a few bytes may repeat a value of any length."""
    if pa.types.is_dictionary(array.type) and is_text(array.type):
        return pc.sum(pc.binary_length(array.dictionary).cast(pa.int64()).take(array.indices)).as_py() or 0
    return int(array.nbytes)


def _column_bytes(group: pq.RowGroupMetaData) -> Iterator[int]:
    yield from (group.column(number).total_compressed_size for number in range(group.num_columns))


def _is_of(path: str, columns: list[str]) -> bool:
    """Returns whether a path of values belongs to one of these columns; a column's name may have dots."""
    return any(path == column or path.startswith(f"{column}.") for column in columns)
