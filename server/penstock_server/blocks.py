"""Blocks: the unit of decoding and caching. Each is decoded and tokenized once, kept as a file, and memory-mapped.

    Snapshot --read a row group--> rows --encode--> tokens --write, rename--> cache folder --mmap--> Block

A cached block is an uncompressed Arrow IPC stream and, behind it, the xxh3-64 of its bytes. Its name is a hash of all that
its tokens depend on, so a changed shard or recipe finds no old block, and servers may share a folder.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from penstock_server import encode
from penstock_server.order import IntArray
from penstock_server.problems import BadRow, ShardUnreadable, SnapshotGone
from penstock_server.snapshot import BlockAddress, Snapshot, shard_changed

log = logging.getLogger("penstock.blocks")

_FORMAT = 1  # of the cached files: a change here rebuilds them
_DIGEST_BYTES = 8
_OPEN_BLOCKS = 512  # memory maps held open, a file descriptor each


@dataclass(frozen=True, slots=True)
class TokenLists:
    """One list of tokens a row, end to end: row i is values[offsets[i]:offsets[i + 1]]."""

    values: npt.NDArray[np.unsignedinteger[Any]]
    offsets: IntArray


@dataclass(frozen=True)
class Block:
    """The tokens of one block's rows, as views of a memory map.

    `features` are "tokens", or "prompt" and "response". `bad` are the rows that cannot be used, with the reasons; they
    have no tokens.
    """

    num_rows: int
    features: dict[str, TokenLists]
    bad: dict[int, str]

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> Block:
        """The block that an encoded record batch holds."""
        reasons = batch.column(encode.REASON)
        bad_rows = np.flatnonzero(reasons.is_valid().to_numpy(zero_copy_only=False))
        lists = {name: batch.column(name) for name in batch.schema.names if name != encode.REASON}
        return cls(
            num_rows=batch.num_rows,
            features={
                name: TokenLists(column.values.to_numpy(zero_copy_only=True), column.offsets.to_numpy())
                for name, column in lists.items()
            },
            bad={int(row): reasons[int(row)].as_py() for row in bad_rows},
        )

    @cached_property
    def substitutes(self) -> IntArray:
        """For each row the row to serve in its place: itself, or the next good one, round the block's end if need be."""
        good = np.setdiff1d(np.arange(self.num_rows), np.fromiter(self.bad, np.int64, len(self.bad)))
        return good[np.searchsorted(good, np.arange(self.num_rows)) % len(good)]


class BlockCache:
    """A folder of encoded blocks, and the ones that are mapped into memory now.

    Loads are single flight: however many ask for a block, it is decoded once. Threads decode side by side; pyarrow and
    `tokenizers` release the GIL.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="penstock-blocks")
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Block] = OrderedDict()
        self._loading: dict[str, Future[Block]] = {}

    def get(self, wanted: Iterable[tuple[str, Callable[[], pa.RecordBatch]]]) -> list[Block]:
        """The blocks of these keys; one that is not in the folder is made by its function and stored.

        Raises whatever the function raises; the next call tries again.
        """
        asked = [self._request(key, build) for key, build in wanted]
        return [block if isinstance(block, Block) else block.result() for block in asked]

    def _request(self, key: str, build: Callable[[], pa.RecordBatch]) -> Block | Future[Block]:
        with self._lock:
            if block := self._open.get(key):
                self._open.move_to_end(key)
                return block
            if key not in self._loading:
                self._loading[key] = self._threads.submit(self._load, key, build)
            return self._loading[key]

    def _load(self, key: str, build: Callable[[], pa.RecordBatch]) -> Block:
        try:
            path = self._folder / f"{key}.arrow"
            block = _map(path) or self._build(path, build)
            with self._lock:
                self._open[key] = block
                while len(self._open) > _OPEN_BLOCKS:
                    self._open.popitem(last=False)
            return block
        finally:
            with self._lock:
                del self._loading[key]

    def _build(self, path: Path, build: Callable[[], pa.RecordBatch]) -> Block:
        batch = build()
        try:
            _store(batch, path)
        except OSError as error:
            log.warning("the block cache cannot store %s: %s; serving this block from memory", path, error)
            return Block.of(batch)
        return _map(path) or Block.of(batch)


class Blocks:
    """The blocks of one snapshot, by their index in it."""

    def __init__(self, snapshot: Snapshot, cache: BlockCache) -> None:
        self._snapshot = snapshot
        self._cache = cache
        self._identity = json.dumps(
            [_FORMAT, snapshot.recipe.identity, snapshot.token_dtype, snapshot.token_bound], sort_keys=True
        )

    def get(self, indices: Iterable[int]) -> list[Block]:
        """The blocks at these indices, each in [0, num_blocks).

        Raises ShardUnreadable: a shard cannot be decoded.
        Raises SnapshotGone: a shard is no longer the one whose footer was read.
        """
        addresses = [self._snapshot.block(index) for index in indices]
        return self._cache.get((self._key(address), partial(self._read, address)) for address in addresses)

    def usable_rows(self, block: Block, index: int, rows: IntArray) -> IntArray:
        """The rows to serve for these rows of block `index`: themselves, or neighbours where the recipe substitutes.

        Raises BadRow: a row cannot be used and the recipe does not substitute, or the block has no usable row at all.
        """
        bad = [row for row in rows.tolist() if row in block.bad] if block.bad else []
        if not bad:
            return rows
        address, name = self._snapshot.block(index), self._snapshot.folder.name
        first = f"{name}: row {bad[0]} of row group {address.row_group} in {address.shard.path.name} {block.bad[bad[0]]}"
        if len(block.bad) == block.num_rows:
            raise BadRow(f"{first}, and so is every row of that group, {block.num_rows:,} in all. Mend the shard.")
        if self._snapshot.recipe.on_bad_row == "fail":
            raise BadRow(
                f"{first}; {len(block.bad):,} of the {block.num_rows:,} rows in that group cannot be used. Mend the shard, or "
                f'set on_bad_row = "substitute" in {self._snapshot.folder / "penstock.toml"} to serve a neighbour in '
                f"place of each: that changes no other batch, so a run can go on where it stopped."
            )
        return block.substitutes[rows]

    def _key(self, address: BlockAddress) -> str:
        # By path and date too: two shards of equal layout can have equal footers and yet other tokens.
        shard = address.shard
        parts = [str(shard.path.absolute()), shard.size_bytes, shard.mtime_ns, shard.footer_hash, address.row_group]
        return blake2b(json.dumps([*parts, self._identity]).encode(), digest_size=16).hexdigest()

    def _read(self, address: BlockAddress) -> pa.RecordBatch:
        shard, snapshot = address.shard, self._snapshot
        if shard_changed(shard):
            raise SnapshotGone(
                f"snapshot {snapshot.fingerprint} is gone: {shard.path.name} changed since the server read it. Put the old "
                f"file back, or restart the server and begin a new run."
            )
        try:
            with pq.ParquetFile(shard.path) as file:
                rows = file.read_row_group(address.row_group, columns=list(snapshot.recipe.columns))
            if rows.num_rows != address.num_rows:
                raise pa.ArrowInvalid(f"{rows.num_rows} rows came, {address.num_rows} were expected")
            rows.validate()
            batch = encode.encode(rows, snapshot.recipe, snapshot.token_dtype, snapshot.token_bound)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ShardUnreadable(
                f"{snapshot.folder.name}: row group {address.row_group} of {shard.path.name} cannot be read: {error}. Batches "
                f"that need it fail until the shard is mended; move it out of the folder to train without it."
            ) from error
        num_bad = address.num_rows - batch.column(encode.REASON).null_count
        if num_bad:
            log.warning("%s, row group %d: %d rows cannot be used", shard.path, address.row_group, num_bad)
        return batch


def _store(batch: pa.RecordBatch, path: Path) -> None:
    """Writes a block so that a crash leaves the whole file or none. Raises OSError: the disk is full or read-only."""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, batch.schema) as writer:
        writer.write_batch(batch)
    content = memoryview(stream.getvalue())
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".tmp", delete=False) as file:
        try:
            file.write(content)
            file.write(_digest(content))
            file.close()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _map(path: Path) -> Block | None:
    """The block in a cache file, or None: there is no such file, or it was damaged and is now gone."""
    try:
        content = pa.memory_map(str(path)).read_buffer()
        # Before anything is parsed: a flipped byte in a length would have the parser read elsewhere.
        if _digest(memoryview(content)[:-_DIGEST_BYTES]) != bytes(content[-_DIGEST_BYTES:]):
            raise pa.ArrowInvalid("its digest does not match")
        return Block.of(pa.ipc.open_stream(content).read_next_batch())
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError, ValueError) as error:
        log.warning("the cached block %s is damaged (%s) and will be made again", path.name, error)
        path.unlink(missing_ok=True)
        return None


def _digest(content: memoryview) -> bytes:
    return xxhash.xxh3_64_digest(content)
