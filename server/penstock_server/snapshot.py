"""The snapshot: the immutable list of a dataset's shards, read from their footers alone, and the blocks in them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock_server.order import IntArray, find, starts_of
from penstock_server.problems import DatasetRefused
from penstock_server.recipe import Recipe, check_columns, read_recipe

_MAGIC = b"PAR1"
_FOOTER_THREADS = 16  # waiting for disks, not for cores
_LARGEST_BOUND = 2**32  # of token ids: they are served as uint32 at most
_SAMPLES, _SAMPLE_BYTES = 16, 4096
_BLOCK_BYTES, _BLOCK_ROWS = 8 << 20, 1 << 16


@dataclass(frozen=True, slots=True)
class Shard:
    """One Parquet file as its footer describes it.

    `digest` is of the footer and of a few samples of the file: two files of token lists can have one footer, byte for
    byte, and yet other tokens. Of the recipe's columns, `bytes_per_group[g]` is the size in row group g, uncompressed,
    `null_rows[g]` the number of rows known to be null, and `token_range` the least and the largest token id of the file,
    None where the writer left no statistics.
    """

    path: Path
    size_bytes: int
    mtime_ns: int
    digest: str
    rows_per_group: tuple[int, ...]
    bytes_per_group: tuple[int, ...]
    null_rows: tuple[int, ...]
    token_range: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class BlockAddress:
    """Where a block lies: rows [first_row, first_row + num_rows) of one row group of one shard.

    `group` is the number of the row group among all, `number` that of the block among the group's, each of which has
    `rows_per_block` rows but the last.
    """

    shard: Shard
    row_group: int
    first_row: int
    num_rows: int
    group: int
    number: int
    rows_per_block: int


class Snapshot:
    """A dataset's shards and recipe, named by a fingerprint of both; never changed once made.

    fingerprint      16 hex digits over the shards (name, size, digest) and the recipe
    rows_per_block   shape [num_blocks], in the order of shards, row groups and rows
    blocks_per_group shape [num_groups]: a row group is one block, a very large one several
    vocab_size       every token id is below it; None where neither the recipe nor the footers know
    token_bound      ids that are not below it make a bad row
    token_dtype      the smallest of uint16 and uint32 that holds every token id
    """

    def __init__(self, folder: Path, shards: Sequence[Shard], recipe: Recipe) -> None:
        self.folder = folder
        self.shards = tuple(shards)
        self.recipe = recipe
        rows = np.array([n for s in shards for n in s.rows_per_group], np.int64)
        nbytes = np.array([n for s in shards for n in s.bytes_per_group], np.int64)
        self._first_group = starts_of(np.array([len(s.rows_per_group) for s in shards], np.int64))
        self._block_size, self.blocks_per_group = _split(rows, nbytes)
        self._first_block = starts_of(self.blocks_per_group)
        group = np.repeat(np.arange(len(rows)), self.blocks_per_group)
        first_row = (np.arange(len(group)) - self._first_block[group]) * self._block_size[group]
        self.rows_per_block: IntArray = np.minimum(self._block_size[group], rows[group] - first_row)
        self._first_row = starts_of(self.rows_per_block)
        self.num_rows = int(self._first_row[-1])
        self.vocab_size = recipe.vocab_size or _vocab_size(self.shards)
        self.token_bound = min(self.vocab_size or _LARGEST_BOUND, _LARGEST_BOUND)
        self.token_dtype = "uint16" if self.token_bound <= 2**16 else "uint32"
        content = {
            "version": 1,
            "shards": [[s.path.name, s.size_bytes, s.digest] for s in self.shards],
            "recipe": recipe.identity,
        }
        self.fingerprint = blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()

    @property
    def num_blocks(self) -> int:
        """Blocks of all shards."""
        return len(self.rows_per_block)

    def locate(self, row: int) -> tuple[int, int]:
        """The (block, row in the block) of row `row`, in [0, num_rows), of all shards."""
        index = int(find(self._first_row, np.array([row]))[0])
        return index, row - int(self._first_row[index])

    def block(self, index: int) -> BlockAddress:
        """Where block `index`, in [0, num_blocks), lies."""
        group = int(np.searchsorted(self._first_block, index, side="right")) - 1
        shard = int(np.searchsorted(self._first_group, group, side="right")) - 1
        number, size = index - int(self._first_block[group]), int(self._block_size[group])
        return BlockAddress(
            shard=self.shards[shard],
            row_group=group - int(self._first_group[shard]),
            first_row=number * size,
            num_rows=int(self.rows_per_block[index]),
            group=group,
            number=number,
            rows_per_block=size,
        )

    def blocks_of_group(self, group: int) -> range:
        """The blocks that a row group is split into."""
        return range(int(self._first_block[group]), int(self._first_block[group + 1]))


def open_snapshot(folder: Path, default_tokenizer: Path | None) -> Snapshot:
    """Reads the footers of all shards in a folder, many at a time, and its recipe.

    Raises DatasetRefused: a shard is truncated or no Parquet, shards disagree, the recipe is wrong, there is no row, or
    rows are already known to be unusable. The message lists every shard that is wrong, up to ten.
    """
    paths = shard_paths(folder)
    recipe = read_recipe(folder, _first_schema(paths), default_tokenizer)
    with ThreadPoolExecutor(_FOOTER_THREADS) as threads:
        read = list(threads.map(lambda path: _try_read(path, recipe), paths))
    failures = [str(result) for result in read if isinstance(result, DatasetRefused)]
    if failures:
        more = [f"... and {len(failures) - 10} more"] if len(failures) > 10 else []
        raise DatasetRefused("\n".join(failures[:10] + more))
    snapshot = Snapshot(folder, [result for result in read if isinstance(result, Shard)], recipe)
    _check_rows(snapshot)
    return snapshot


def shard_paths(folder: Path) -> list[Path]:
    """The Parquet files directly in a folder, by name; those that begin with a dot or an underscore are not data."""
    # A dangling link is listed, to be refused: left out, it would be a silently shorter epoch.
    return sorted(p for p in folder.glob("*.parquet") if p.name[0] not in "._" and not p.is_dir())


def shard_changed(shard: Shard) -> bool:
    """Whether the file is no longer the one whose footer was read. A new date on the same content is no change.

    Raises OSError: that cannot be known now.
    """
    try:
        stat = shard.path.stat()
    except FileNotFoundError:
        return True
    if (stat.st_size, stat.st_mtime_ns) == (shard.size_bytes, shard.mtime_ns):
        return False
    return stat.st_size != shard.size_bytes or _file_digest(shard.path, stat.st_size) != shard.digest


def _try_read(path: Path, recipe: Recipe) -> Shard | DatasetRefused:
    try:
        return _read_shard(path, recipe)
    except DatasetRefused as refusal:
        return refusal


def _first_schema(paths: Sequence[Path]) -> pa.Schema:
    # A broken first shard must not hide what is wrong with the others: any readable one will do.
    failures = []
    for path in paths:
        try:
            _check_footer(path)
            return _metadata(path).schema.to_arrow_schema()
        except DatasetRefused as refusal:
            failures.append(str(refusal))
    raise DatasetRefused("\n".join(failures[:10]))


def _read_shard(path: Path, recipe: Recipe) -> Shard:
    _check_footer(path)
    stat = path.stat()
    metadata = _metadata(path)
    check_columns(recipe.kind, recipe.columns, metadata.schema.to_arrow_schema(), path)
    groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
    return Shard(
        path=path,
        size_bytes=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        digest=_file_digest(path, stat.st_size),
        rows_per_group=tuple(g.num_rows for g in groups),
        bytes_per_group=tuple(_bytes(g, recipe) for g in groups),
        null_rows=tuple(_null_rows(g, recipe) for g in groups),
        token_range=_token_range(metadata, recipe) if recipe.kind == "tokens" else None,
    )


def _check_footer(path: Path) -> None:
    """Raises DatasetRefused: the file has no Parquet footer, with what it is instead."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size < 12:
                raise _refused(path, f"is {size} bytes long, too short for Parquet")
            file.seek(size - 8)
            length, magic = struct.unpack("<I4s", file.read(8))
            if magic == b"PARE":
                raise _refused(path, "is encrypted, which is not supported")
            file.seek(0)
            if magic != _MAGIC:
                begins = file.read(4) == _MAGIC
                raise _refused(path, "is truncated: its end is missing" if begins else "is not a Parquet file")
            if length > size - 12:
                raise _refused(path, f"is truncated: its footer claims {length:,} bytes of a file of {size:,}")
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror or error}") from error


def _metadata(path: Path) -> pq.FileMetaData:
    try:
        metadata = pq.read_metadata(path)
        metadata.schema.to_arrow_schema()
        return metadata
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")  # some span lines
        raise _refused(path, f"has a damaged footer: {reason}") from error


def _refused(path: Path, what: str) -> DatasetRefused:
    return DatasetRefused(f"{path} {what}. Write it again, or move it out of the folder.")


def _file_digest(path: Path, size: int) -> str:
    """Of the end of a file, where the footer is, and of samples spread over the rest; of all of a small file."""
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        file.seek(size - 8)
        footer_bytes = struct.unpack("<I", file.read(4))[0] + 8
        for start in np.linspace(0, max(size - _SAMPLE_BYTES, 0), _SAMPLES, dtype=np.int64).tolist():
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(size - footer_bytes, 0))
        digest.update(file.read())
    return digest.hexdigest()


def _split(rows: IntArray, nbytes: IntArray) -> tuple[IntArray, IntArray]:
    """The rows of a block in each row group, and the blocks that makes; a block is a bounded number of bytes and of rows."""
    # Bytes alone would not do: a column of few different values is small in the file, however many rows it has.
    wanted = np.maximum(-(-nbytes // _BLOCK_BYTES), -(-rows // _BLOCK_ROWS)).clip(1)
    size = np.maximum(-(-rows // wanted), 1)
    return size, np.maximum(-(-rows // size), 1)


def _bytes(group: pq.RowGroupMetaData, recipe: Recipe) -> int:
    columns = [group.column(c) for c in range(group.num_columns)]
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] in recipe.columns)


def _null_rows(group: pq.RowGroupMetaData, recipe: Recipe) -> int:
    """Rows of a group that the footer knows to be null. In nested columns a null may as well be an empty list."""
    if recipe.kind == "tokens":
        return 0
    columns = [group.column(c) for c in range(group.num_columns)]
    found = [c.statistics for c in columns if c.path_in_schema in recipe.columns]
    return max((s.null_count for s in found if s and s.has_null_count), default=0)


def _token_range(metadata: pq.FileMetaData, recipe: Recipe) -> tuple[int, int] | None:
    """The least and the largest id of a column of token lists, (0, 0) if it has none, None without statistics."""
    [name] = recipe.columns
    leaves = [metadata.schema.column(c) for c in range(metadata.num_columns)]
    # A flat column called "tokens.n" is no part of the lists in "tokens".
    [leaf] = [c for c, leaf in enumerate(leaves) if leaf.path.startswith(f"{name}.") and leaf.max_repetition_level == 1][:1]
    chunks = [metadata.row_group(g).column(leaf) for g in range(metadata.num_row_groups)]
    found = [c.statistics for c in chunks if c.num_values]
    unknown = [s for s in found if s is None or (s.num_values and not s.has_min_max)]
    ranges = [(int(s.min), int(s.max)) for s in found if s and s.has_min_max]
    if unknown:
        return None
    return min((low for low, _ in ranges), default=0), max((high for _, high in ranges), default=0)


def _vocab_size(shards: Sequence[Shard]) -> int | None:
    known = [s.token_range for s in shards if s.token_range is not None]
    return max(high for _, high in known) + 1 if len(known) == len(shards) else None


def _check_rows(snapshot: Snapshot) -> None:
    """Refuses what the footers alone show to be unusable."""
    recipe = snapshot.recipe
    if snapshot.num_rows == 0:
        raise DatasetRefused(f"{snapshot.folder} holds {len(snapshot.shards)} shards and not one row.")
    for shard in snapshot.shards:
        low, high = shard.token_range or (0, 0)
        if (low < 0 or high >= snapshot.token_bound) and recipe.on_bad_row == "fail":
            raise DatasetRefused(
                f"{shard.path}: column {recipe.columns[0]!r} holds token ids from {low:,} to {high:,}, but ids must be "
                f"from 0 to {snapshot.token_bound - 1:,}. Mend the shard, or set the right vocab_size in penstock.toml."
            )
        for group, nulls in enumerate(shard.null_rows):
            if nulls and recipe.on_bad_row == "fail":
                raise DatasetRefused(
                    f"{shard.path}, row group {group}: {nulls:,} rows are null in {' or '.join(recipe.columns)}. Remove "
                    f'them, or set on_bad_row = "substitute" in penstock.toml to serve a neighbour in their place.'
                )
