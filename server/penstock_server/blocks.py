"""Blocks: the unit of caching, a row group or a part of a very large one. Each is tokenized once, stored and mapped.

    Snapshot --read a row group--> rows --encode--> tokens --Arrow IPC--> cache folder --mmap--> Block

A block's name in the cache is a hash of all that its tokens depend on, so a changed shard or recipe finds no old block.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from penstock_server import encode
from penstock_server.cache import CacheFolder
from penstock_server.order import IntArray
from penstock_server.packing import Piece
from penstock_server.problems import BadRow, ShardUnavailable, ShardUnreadable, SnapshotGone
from penstock_server.snapshot import BlockAddress, Snapshot, shard_changed

log = logging.getLogger("penstock.blocks")

_FORMAT = 1  # of the cached blocks: a change here rebuilds them
_OPEN_BLOCKS = 4096  # maps held; a process may hold some 65,000, and what is evicted keeps its disk until it is let go


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
    def stream(self) -> IntArray:
        """Where each row starts in the block's stream of tokens, shape [num_rows + 1]: its features one behind the other."""
        starts: IntArray = np.sum([tokens.offsets for tokens in self.features.values()], axis=0, dtype=np.int64)
        return starts

    def pieces(self, row: int) -> list[Piece]:
        """The tokens of a row, a piece a feature."""
        found = []
        for name, tokens in self.features.items():
            start, stop = tokens.offsets[row : row + 2].tolist()
            found.append(Piece(name, tokens.values, start, stop - start))
        return found

    @cached_property
    def substitutes(self) -> IntArray:
        """For each row the row to serve in its place: itself, or the next good one, round the block's end if need be."""
        good = np.setdiff1d(np.arange(self.num_rows), np.fromiter(self.bad, np.int64, len(self.bad)))
        return good[np.searchsorted(good, np.arange(self.num_rows)) % len(good)]


# Gives (number, encoded rows) of each block of a row group for which its argument says that it is needed.
Decoder = Callable[[Callable[[int], bool]], Iterator[tuple[int, pa.RecordBatch]]]


class BlockStore:
    """The blocks of all datasets: in the cache folder, and the ones that are mapped into memory now.

    Loads are single flight: however many ask for a block, it is decoded once. Threads decode side by side; pyarrow and
    `tokenizers` release the GIL.
    """

    def __init__(self, cache: CacheFolder) -> None:
        self.cache = cache
        self._threads = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="penstock-blocks")
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Block] = OrderedDict()
        self._loading: dict[str, Future[Block]] = {}
        self._groups: dict[str, tuple[threading.Lock, int]] = {}  # being decoded, and how many load from each

    def request(self, group: Sequence[str], number: int, decode: Decoder) -> Future[Block]:
        """The block `number` of a row group whose blocks have these keys, soon.

        What is not in the cache is made by `decode`, and its neighbours with it: the group has to be decoded from its
        start. The future raises whatever `decode` raises; the next request tries again.
        """
        key = group[number]
        with self._lock:
            if block := self._open.get(key):
                self._open.move_to_end(key)
                ready: Future[Block] = Future()
                ready.set_result(block)
                return ready
            if key not in self._loading:
                self._loading[key] = self._threads.submit(self._load, group, number, decode)
            return self._loading[key]

    def close(self) -> None:
        """Drops the loads that have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _load(self, group: Sequence[str], number: int, decode: Decoder) -> Block:
        key = group[number]
        try:
            with self._decoding(group[0]):
                return self._stored(key) or self._make(group, number, decode)
        finally:
            with self._lock:
                del self._loading[key]

    def _make(self, group: Sequence[str], number: int, decode: Decoder) -> Block:
        """Decodes the group and stores what the cache does not have; holds no more than one block of it at a time."""
        made: Block | None = None
        for other, batch in decode(lambda other: other == number or not self.cache.has(group[other])):
            self._store(group[other], batch)
            if other == number:
                # What is not kept by the cache is memory, and memory must not grow with the data: it is handed out once.
                made = self._stored(group[other]) or Block.of(batch)
        assert made is not None  # decode gives every block that it is told to
        pa.default_memory_pool().release_unused()  # Arrow keeps what it decoded into, in every thread anew
        return made

    @contextmanager
    def _decoding(self, group: str) -> Iterator[None]:
        """One decodes a row group at a time; who waited finds what was made."""
        with self._lock:
            lock, num_waiting = self._groups.get(group, (threading.Lock(), 0))
            self._groups[group] = (lock, num_waiting + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, num_waiting = self._groups.pop(group)
                if num_waiting > 1:
                    self._groups[group] = (lock, num_waiting - 1)

    def _stored(self, key: str) -> Block | None:
        content = self.cache.read(key)
        if content is None:
            return None
        block = Block.of(pa.ipc.open_stream(content).read_next_batch())
        with self._lock:
            self._open[key] = block
            while len(self._open) > _OPEN_BLOCKS:
                self._open.popitem(last=False)
        return block

    def _store(self, key: str, batch: pa.RecordBatch) -> None:
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, batch.schema) as writer:
            writer.write_batch(batch)
        try:
            self.cache.write(key, memoryview(stream.getvalue()))
        except OSError as error:
            log.warning("the block cache cannot be written to: %s; blocks are decoded each time they are needed", error)


class Blocks:
    """The blocks of one snapshot, by their index in it."""

    def __init__(self, snapshot: Snapshot, store: BlockStore) -> None:
        self._snapshot = snapshot
        self._store = store
        self._identity = json.dumps(
            [_FORMAT, snapshot.recipe.identity, snapshot.token_dtype, snapshot.token_bound], sort_keys=True
        )

    def request(self, indices: Iterable[int]) -> list[Future[Block]]:
        """The blocks at these indices, each in [0, num_blocks), soon. The futures raise what `get` raises."""
        addresses = [self._snapshot.block(index) for index in indices]
        return [self._store.request(self._keys(at), at.number, partial(self._read, at)) for at in addresses]

    def get(self, indices: Iterable[int]) -> list[Block]:
        """The blocks at these indices, each in [0, num_blocks).

        Raises ShardUnreadable: a shard cannot be decoded.  Raises ShardUnavailable: its storage fails.
        Raises SnapshotGone: a shard is no longer the one whose footer was read.
        """
        return [future.result() for future in self.request(indices)]

    def usable_rows(self, block: Block, index: int, rows: IntArray) -> IntArray:
        """The rows to serve for these rows of block `index`: themselves, or neighbours where the recipe substitutes.

        Raises BadRow: a row cannot be used and the recipe does not substitute, or the block has no usable row at all.
        """
        bad = [row for row in rows.tolist() if row in block.bad] if block.bad else []
        if not bad:
            return rows
        if len(block.bad) == block.num_rows or self._snapshot.recipe.on_bad_row == "fail":
            raise self._bad_row(block, index, bad[0])
        return block.substitutes[rows]

    def check_bad_rows(self, block: Block, index: int) -> None:
        """Raises BadRow: block `index` has one, and the recipe does not allow to do without it."""
        if block.bad and self._snapshot.recipe.on_bad_row == "fail":
            raise self._bad_row(block, index, min(block.bad))

    def _bad_row(self, block: Block, index: int, row: int) -> BadRow:
        address, name = self._snapshot.block(index), self._snapshot.folder.name
        place = f"row {address.first_row + row} of row group {address.row_group} in {address.shard.path.name}"
        first = f"{name}: {place} {block.bad[row]}"
        if len(block.bad) == block.num_rows:
            return BadRow(f"{first}, and so is every one of the {block.num_rows:,} rows beside it. Mend the shard.")
        return BadRow(
            f"{first}; {len(block.bad):,} of the {block.num_rows:,} rows beside it cannot be used. Mend the shard, or "
            f'set on_bad_row = "substitute" in {self._snapshot.folder / "penstock.toml"} to serve a neighbour in '
            f"place of each: that changes no other batch, so a run can go on where it stopped."
        )

    def _keys(self, address: BlockAddress) -> list[str]:
        """The names in the cache of all blocks of the row group that a block is of."""
        # By path and date too: the shard's digest is of samples.
        shard = address.shard
        parts = [str(shard.path.absolute()), shard.size_bytes, shard.mtime_ns, shard.digest, address.row_group]
        group = blake2b(json.dumps([*parts, address.rows_per_block, self._identity]).encode(), digest_size=16).hexdigest()
        return [f"{group}-{number}" for number in range(len(self._snapshot.blocks_of_group(address.group)))]

    def _read(self, address: BlockAddress, needed: Callable[[int], bool]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Decodes and encodes the blocks of a row group, one at a time, from its start."""
        try:
            yield from self._decode(address, needed)
        except OSError as error:
            if error.errno is None:  # pyarrow's word for a damaged file, too
                raise self._unreadable(address, error) from error
            raise ShardUnavailable(
                f"{self._snapshot.folder.name}: {address.shard.path} cannot be read now: {error.strerror}. The client tries "
                f"again; if it stays so, mend the storage or its permissions."
            ) from error
        except (pa.ArrowException, ValueError) as error:
            raise self._unreadable(address, error) from error

    def _decode(self, address: BlockAddress, needed: Callable[[int], bool]) -> Iterator[tuple[int, pa.RecordBatch]]:
        shard, snapshot = address.shard, self._snapshot
        if shard_changed(shard):
            raise SnapshotGone(
                f"snapshot {snapshot.fingerprint} is gone: {shard.path.name} changed since the server read it. Put the old "
                f"file back, or restart the server and begin a new run."
            )
        expected = [int(snapshot.rows_per_block[index]) for index in snapshot.blocks_of_group(address.group)]
        # Page by page: a row group of gigabytes must not be in memory as a whole.
        with pq.ParquetFile(shard.path, buffer_size=1 << 20, pre_buffer=False) as file:
            batches = file.iter_batches(address.rows_per_block, [address.row_group], list(snapshot.recipe.columns))
            for number, num_rows in enumerate(expected):
                batch = next(batches, None)
                rows = file.schema_arrow.empty_table() if batch is None else pa.Table.from_batches([batch])
                if rows.num_rows != num_rows:
                    raise ValueError(f"block {number} has {rows.num_rows} rows, not {num_rows}")
                if needed(number):
                    rows.validate()
                    yield number, self._encode(address, rows)

    def _encode(self, address: BlockAddress, rows: pa.Table) -> pa.RecordBatch:
        snapshot = self._snapshot
        batch = encode.encode(rows, snapshot.recipe, snapshot.token_dtype, snapshot.token_bound)
        num_bad = batch.num_rows - batch.column(encode.REASON).null_count
        if num_bad:
            policy = snapshot.recipe.on_bad_row
            then = "neighbours are served in their place" if policy == "substitute" else "batches that hold one fail"
            log.warning("%s, row group %d: %d rows cannot be used; %s", address.shard.path, address.row_group, num_bad, then)
        return batch

    def _unreadable(self, address: BlockAddress, error: Exception) -> ShardUnreadable:
        reason = " ".join(str(error).split()).rstrip(".")
        return ShardUnreadable(
            f"{self._snapshot.folder.name}: row group {address.row_group} of {address.shard.path.name} cannot be read: "
            f"{reason}. Batches that need it fail until the shard is mended; move it out of the folder to train without it."
        )
