"""Rows on demand: tokenizes only the rows that a cold batch needs, and completes their blocks afterwards.

request   returns a future for some rows of each block that is not cached yet
_serve    a thread decodes the row groups of a request, and tokenizes the requested rows together, on all cores
Decoded   a block with decoded rows; it keeps the tokens of requested rows, so that no row is tokenized twice
finish    read-ahead tokenizes the rest of a block, between requests, and stores it
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import chain
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa

from penstock_server.blocks.block import Block
from penstock_server.blocks.cache import Maps
from penstock_server.blocks.decode import RowGroupReader
from penstock_server.catalog.snapshot import BlockAddress
from penstock_server.monitoring.stages import StageClock
from penstock_server.order.arrays import IntArray
from penstock_server.problems import OutOfMemory, Problem
from penstock_server.recipes.encode import Selected
from penstock_server.recipes.split import is_selected, is_validation

_REQUESTS = 8  # served at a time; each holds the text and tokens of its rows
_ENCODED_TOGETHER = 32 << 20  # bytes of rows; texts of 2 GiB do not fit into one Arrow array
_FINISHED_TOGETHER = 64 << 10  # bytes of rows that read-ahead tokenizes before it gives way to requests
_UNUSED_SECONDS = 30.0  # unused for this long, decoded rows may be dropped to make room
_PRESSED = 0.9  # fraction of the budget; above it, blocks are completed while requests wait, since that makes room


class Decoded:
    """Decoded rows of a block, and the tokens of the requested ones. `is_whole`: it has all rows of the block.

    Row i is encoded as row `row_in_piece[i]` of `pieces[piece[i]]`; piece[i] is -1 before that.
    """

    def __init__(self, name: str, at: BlockAddress, rows: Selected, *, is_whole: bool) -> None:
        self.name, self.at, self.rows, self.is_whole = name, at, rows, is_whole
        self.num_rows, self.nbytes = len(rows.numbers), rows.rows.nbytes
        self.used_at = time.monotonic()
        self._pieces: list[pa.RecordBatch] = []
        self._piece = np.full(self.num_rows, -1, np.int32)
        self._row_in_piece = np.zeros(self.num_rows, np.int32)
        self._lock = threading.Lock()

    def missing(self, rows: IntArray) -> IntArray:
        """Returns the rows in `rows` that are not encoded."""
        missing: IntArray = rows[self._piece[rows] < 0]
        return missing

    def add(self, rows: IntArray, encoded: pa.RecordBatch) -> bool:
        """Keeps the tokens of rows. Returns whether they complete the block."""
        with self._lock:
            new = self._piece[rows] < 0
            self._row_in_piece[rows[new]] = np.flatnonzero(new)
            self._piece[rows[new]] = len(self._pieces)
            self._pieces.append(encoded)
            self.nbytes += encoded.nbytes
            return self.is_whole and bool(new.any()) and bool((self._piece >= 0).all())

    def encoded(self, rows: IntArray) -> pa.RecordBatch:
        """Returns the tokens of encoded rows, in the order of `rows`."""
        with self._lock:
            piece, row_in_piece, pieces = self._piece[rows], self._row_in_piece[rows], list(self._pieces)
        used = np.unique(piece) if len(piece) else np.zeros(1, np.int64)
        starts = np.cumsum([0, *(pieces[number].num_rows for number in used)])
        joined = pa.concat_batches([pieces[number] for number in used])
        return joined.take(pa.array(starts[np.searchsorted(used, piece)] + row_in_piece))


class BlockFuture(Future[Block]):
    """The future of a requested block, with the clock of the work on it."""

    def __init__(self, at: BlockAddress, clock: StageClock) -> None:
        super().__init__()
        self.at, self.clock = at, clock

    @property
    def shard(self) -> str:
        """Name of its shard."""
        return self.at.shard.path.name


class RowsFuture(BlockFuture):
    """Requested rows of one block, and the future of these; its result is the whole block if some of the rows are bad.

    Until it is resolved, they are rows `indices` of `decoded`, after decoding.
    """

    def __init__(self, at: BlockAddress, rows: IntArray) -> None:
        super().__init__(at, StageClock("queue"))
        self.rows, self.indices = rows, np.zeros(0, np.int64)
        self.decoded: Decoded | None = None

    def resolve(self, result: Block | BaseException) -> None:
        """Resolves the future, unless it is cancelled or done; lets go of the decoded rows."""
        self.decoded = None
        self.clock.enter(None)
        if self.done() or not self.set_running_or_notify_cancel():
            return
        if isinstance(result, BaseException):
            self.set_exception(result)
        else:
            self.set_result(result)


class RowsOnDemand:
    """Decoded rows of all datasets, within `budget_bytes` of memory, and the threads that tokenize requested rows."""

    def __init__(self, maps: Maps, budget_bytes: int, num_threads: int) -> None:
        self.budget_bytes, self.held_bytes = budget_bytes, 0
        self._maps, self._metrics = maps, maps.cache.metrics
        self._lock = threading.Lock()
        self._decoded = OrderedDict[str, Decoded]()  # by block name, least recently used first
        self._decoding = WeakValueDictionary[str, Future[None]]()  # by the name of the row group
        self._idle = threading.Condition()
        self.num_requests = 0  # requests that wait for rows
        self._requests = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="penstock-rows")
        self._decoders = ThreadPoolExecutor(num_threads, thread_name_prefix="penstock-decode")

    def request(self, reader: RowGroupReader, rows: Mapping[int, IntArray], split: str) -> dict[int, RowsFuture]:
        """Returns a future per block index for `rows`: ascending row numbers in the block, or in its split.

        The futures raise what RowGroupReader raises. Cancel one to release its rows.
        """
        requests = [RowsFuture(reader.snapshot.block(index), of_block) for index, of_block in rows.items()]
        if requests:
            with self._idle:  # the thread cannot end before it is counted
                self._requests.submit(self._serve, reader, requests, split)
                self.num_requests += 1
        return {request.at.index: request for request in requests}

    def finish(self, reader: RowGroupReader, address: BlockAddress) -> Block | None:
        """Stores a block, and gives way to requests before each small part. Returns None if there is no room for its rows."""
        self._give_way()
        name = reader.names.of(address.index)
        if self._maps.shared and (block := self._maps.read(name)):
            return block
        decoded = self._find(name)
        if decoded is None and self._has_room(int(reader.snapshot.bytes_per_block[address.index])):
            self._decode(reader, [RowsFuture(address, np.zeros(0, np.int64))], "all")
            decoded = self._find(name)
        return self._complete(reader, decoded, gives_way=True) if decoded else None

    def close(self) -> None:
        """Cancels the requests that have not started."""
        self._requests.shutdown(wait=False, cancel_futures=True)
        self._decoders.shutdown(wait=False, cancel_futures=True)

    def _give_way(self) -> None:
        """Waits while requests wait for rows, unless decoded rows fill their budget: completing blocks makes room."""
        with self._idle:
            while self.num_requests and self.held_bytes < _PRESSED * self.budget_bytes:
                self._idle.wait(0.1)

    def _serve(self, reader: RowGroupReader, requests: list[RowsFuture], split: str) -> None:
        """Serves the requests of one call: decodes row groups in parallel, and encodes the rows of many together."""
        try:
            ready, nbytes = list[RowsFuture](), 0
            for request, decoded in self._with_decoded(reader, requests, split):
                ready.append(request)
                nbytes += decoded.nbytes * len(request.rows) // max(1, decoded.num_rows)
                if nbytes >= _ENCODED_TOGETHER:
                    self._encode(reader, ready)
                    ready, nbytes = [], 0
            self._encode(reader, ready)
        except BaseException as error:
            if isinstance(error, MemoryError):
                error = OutOfMemory("for the rows of a batch", error, "write smaller rows")
            for request in requests:
                request.resolve(error)
        finally:
            with self._idle:
                self.num_requests -= 1
                self._idle.notify_all()

    def _with_decoded(
        self, reader: RowGroupReader, requests: list[RowsFuture], split: str
    ) -> Iterator[tuple[RowsFuture, Decoded]]:
        """Yields the requests as soon as their rows are decoded. Resolves those whose row group cannot be read."""
        ready, cold = list[RowsFuture](), defaultdict[int, list[RowsFuture]](list)
        for request in self._not_shared(reader, requests):
            if self._find_rows(reader, request, split):
                ready.append(request)
            elif not request.cancelled():
                cold[request.at.group].append(request)
        for request in chain.from_iterable(cold.values()):
            request.clock.enter("decode")
        decoding = [(of_group, self._begin_decoding(reader, of_group, split)) for of_group in cold.values()]
        yield from ((request, request.decoded) for request in ready if request.decoded)
        for of_group, future in decoding:
            try:
                future.result()
                # Another call may have decoded the row group, and had no room for these rows.
                if left := [request for request in of_group if not self._find_rows(reader, request, split)]:
                    self._decode(reader, left, split)
            except Exception as error:
                for request in of_group:
                    request.resolve(error)
            else:
                yield from ((request, request.decoded) for request in of_group if request.decoded)

    def _not_shared(self, reader: RowGroupReader, requests: list[RowsFuture]) -> list[RowsFuture]:
        """Resolves the requests for blocks that the shared store has, with the whole block; returns the others."""
        if self._maps.shared is None:
            return requests
        names = [reader.names.of(request.at.index) for request in requests]
        blocks = self._maps.shared.map(lambda name: None if self._find(name) else self._maps.read(name), names)
        for request, block in zip(requests, blocks, strict=True):
            if block:
                request.resolve(block)
        return [request for request, block in zip(requests, blocks, strict=True) if not block]

    def _find_rows(self, reader: RowGroupReader, request: RowsFuture, split: str) -> bool:
        """Finds the rows of a request in a decoded block. Returns False if the block is not decoded."""
        if request.decoded is None and (decoded := self._find(reader.names.of(request.at.index))):
            request.decoded, request.indices = decoded, _rows_of_split(decoded, split, reader)[request.rows]
        return request.decoded is not None

    def _find(self, name: str) -> Decoded | None:
        with self._lock:
            decoded = self._decoded.get(name)
            if decoded:
                decoded.used_at = time.monotonic()
                self._decoded.move_to_end(name)
            return decoded

    def _begin_decoding(self, reader: RowGroupReader, requests: list[RowsFuture], split: str) -> Future[None]:
        """Decodes a row group once for all calls."""
        name = reader.names.of_group(requests[0].at)
        with self._lock:
            future = self._decoding.get(name)
            if future is None or future.done():
                future = self._decoding[name] = self._decoders.submit(self._decode, reader, requests, split)
            return future

    def _decode(self, reader: RowGroupReader, requests: list[RowsFuture], split: str) -> None:
        """Decodes a row group up to its last requested block, and on while its blocks fit into the budget."""
        if all(request.cancelled() for request in requests):
            return
        by_number = {request.at.number: request for request in requests}
        with self._metrics.decode_seconds.labels(reader.snapshot.name).time(), closing(reader.blocks(requests[0].at)) as blocks:
            for at, parts in blocks:
                name, request = reader.names.of(at.index), by_number.get(at.number)
                keeps = (
                    (request is not None or not self._maps.cache.has(name))
                    and name not in self._decoded
                    and self._has_room(int(reader.snapshot.bytes_per_block[at.index]))
                )
                if keeps or request:
                    decoded = Decoded(name, at, Selected.joined([*parts]), is_whole=True)
                    if keeps:
                        decoded = self._keep(decoded)
                    if request:
                        indices = _rows_of_split(decoded, split, reader)[request.rows]
                        if not keeps:  # only the requested rows: all rows of all row groups might not fit into memory
                            decoded = Decoded(name, at, decoded.rows.take(indices), is_whole=False)
                            indices = np.arange(len(indices))
                        request.decoded, request.indices = decoded, indices
                if at.number >= max(by_number) and not keeps:
                    return

    def _has_room(self, nbytes: int) -> bool:
        with self._lock:
            before = time.monotonic() - _UNUSED_SECONDS
            while self.held_bytes + nbytes > self.budget_bytes and self._decoded:
                oldest = next(iter(self._decoded.values()))
                if oldest.used_at >= before:
                    return False
                del self._decoded[oldest.name]
                self.held_bytes -= oldest.nbytes
            return self.held_bytes + nbytes <= self.budget_bytes

    def _keep(self, decoded: Decoded) -> Decoded:
        with self._lock:
            if decoded.name not in self._decoded:
                self._decoded[decoded.name] = decoded
                self.held_bytes += decoded.nbytes
            return self._decoded[decoded.name]

    def _drop(self, decoded: Decoded) -> None:
        with self._lock:
            if self._decoded.get(decoded.name) is decoded:
                del self._decoded[decoded.name]
                self.held_bytes -= decoded.nbytes

    def _add(self, decoded: Decoded, rows: IntArray, encoded: pa.RecordBatch) -> bool:
        is_complete = decoded.add(rows, encoded)
        with self._lock:
            if self._decoded.get(decoded.name) is decoded:
                self.held_bytes += encoded.nbytes
        return is_complete

    def _encode(self, reader: RowGroupReader, requests: list[RowsFuture]) -> None:
        """Encodes the requested rows, together if they share a schema, and resolves the futures."""
        for request in requests:
            request.clock.enter("tokenize")
        by_schema = defaultdict[pa.Schema, list[tuple[RowsFuture, Decoded]]](list)
        for request in requests:
            if request.decoded and not request.cancelled():
                by_schema[request.decoded.rows.rows.schema.remove_metadata()].append((request, request.decoded))
        for alike in by_schema.values():
            try:
                self._encode_together(reader, alike)
            except Problem:  # one row group may be at fault, and the joint error names the first
                for request, decoded in alike:
                    try:
                        self._encode_together(reader, [(request, decoded)])
                    except Problem as problem:
                        request.resolve(problem)

    def _encode_together(self, reader: RowGroupReader, requests: list[tuple[RowsFuture, Decoded]]) -> None:
        missing = [decoded.missing(request.indices) for request, decoded in requests]
        joined = Selected.joined([decoded.rows.take(rows) for (_, decoded), rows in zip(requests, missing, strict=True)])
        encoded = self._tokenized(reader, joined, requests[0][0].at) if len(joined.numbers) else None
        first = 0
        for (request, decoded), rows in zip(requests, missing, strict=True):
            is_complete = False
            if encoded is not None and len(rows):
                # Copied: a slice would keep the whole joint batch in memory.
                is_complete = self._add(decoded, rows, encoded.take(pa.array(np.arange(first, first + len(rows)))))
                first += len(rows)
            block = Block.of(decoded.encoded(request.indices))
            if block.bad:
                request.resolve(self._whole_block(reader, decoded))
            else:
                request.resolve(replace(block, numbered=decoded.rows.numbers[request.indices], picked=request.rows))
                if is_complete:
                    self._store(reader, decoded)

    def _whole_block(self, reader: RowGroupReader, decoded: Decoded) -> Block:
        """Makes the whole block now: the replacement of a bad row, and its error message, depend on all rows."""
        if not decoded.is_whole:
            decoded = Decoded(decoded.name, decoded.at, reader.block(decoded.at), is_whole=True)
        return self._complete(reader, decoded, gives_way=False)

    def _complete(self, reader: RowGroupReader, decoded: Decoded, *, gives_way: bool) -> Block:
        """Encodes the remaining rows of a block, some at a time, and stores it."""
        size = max(1, decoded.num_rows)
        step = max(1, _FINISHED_TOGETHER * size // max(1, decoded.rows.rows.nbytes)) if gives_way else size
        for start in range(0, size, step):
            if gives_way:
                self._give_way()
                if self._maps.cache.has(decoded.name) and (block := self._maps.read(decoded.name)):
                    self._drop(decoded)  # another thread or process has stored it meanwhile
                    return block
            missing = decoded.missing(np.arange(start, min(start + step, decoded.num_rows)))
            if len(missing) or not decoded.num_rows:
                self._add(decoded, missing, self._tokenized(reader, decoded.rows.take(missing), decoded.at))
        return self._store(reader, decoded)

    def _tokenized(self, reader: RowGroupReader, rows: Selected, at: BlockAddress) -> pa.RecordBatch:
        with self._metrics.tokenize_seconds.labels(reader.snapshot.name).time():
            return reader.encode(rows, at)

    def _store(self, reader: RowGroupReader, decoded: Decoded) -> Block:
        """Stores a block after all its rows are encoded."""
        batch = decoded.encoded(np.arange(decoded.num_rows))
        reader.warn_of_bad_rows(batch, decoded.at)
        self._maps.write(decoded.name, batch)
        self._drop(decoded)
        return self._maps.read(decoded.name) or Block.of(batch)


def _rows_of_split(decoded: Decoded, split: str, reader: RowGroupReader) -> IntArray:
    """Returns the indices of the rows of a whole block in a split."""
    selection = reader.snapshot.select_in(decoded.at.index, split)
    return np.flatnonzero(is_selected(is_validation(decoded.rows.hashes, reader.snapshot.validation), selection))
