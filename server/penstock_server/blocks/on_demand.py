"""Rows on demand: tokenizes only the rows that a cold batch needs, and completes their blocks afterwards.

request   returns a future for some rows of each block that is not cached yet
_serve    a thread decodes the row groups of a request, and tokenizes the requested rows together, on all cores
Decoded   a block with decoded rows; it keeps the tokens of requested rows, so that no row is tokenized twice
finish    read-ahead tokenizes the rest of a block, between requests, and stores it
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock_server.blocks.block import Block
from penstock_server.blocks.decode import RowGroupReader, group_of, name_in
from penstock_server.blocks.mmap import Maps
from penstock_server.catalog.snapshot import BlockAddress
from penstock_server.order.arrays import IntArray
from penstock_server.problems import OutOfMemory, Problem
from penstock_server.recipes.encode import Selected
from penstock_server.recipes.split import is_selected, is_validation

log = logging.getLogger("penstock.on_demand")

_REQUESTS = 8  # served at a time; each holds the text and tokens of its rows
_ENCODED_TOGETHER = 32 << 20  # bytes of rows; texts of 2 GiB do not fit into one Arrow array
_FINISHED_TOGETHER = 64 << 10  # bytes of rows that read-ahead tokenizes before it gives way to requests
_UNUSED_SECONDS = 30.0  # unused for this long, decoded rows may be dropped to make room
_PRESSED = 0.9  # fraction of the budget; above it, blocks are completed while requests wait, since that makes room


class PickedRows(NamedTuple):
    """Some rows of a block, with their tokens.

    block  only these rows, all good
    rows   row numbers in the block, or in its split if one was requested; ascending, shape [block.num_rows]
    """

    block: Block
    rows: IntArray


class RowsFuture(Future["PickedRows | Block"]):
    """Future of the rows of one request; the result is the whole block if some of the rows are bad.

    `is_decoded`: the rows are read, and wait to be tokenized together with others.
    """

    is_decoded = False


@dataclass(slots=True, eq=False)
class Decoded:
    """A block with decoded rows, and the tokens of the requested rows.

    Row i is encoded as row `row_in_piece[i]` of `pieces[piece[i]]`; piece[i] is -1 before that.
    """

    name: str
    at: BlockAddress
    rows: Selected
    nbytes: int
    pieces: list[pa.RecordBatch] = field(default_factory=list)
    piece: npt.NDArray[np.int32] = field(init=False)
    row_in_piece: npt.NDArray[np.int32] = field(init=False)
    used_at: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_finished: bool = False

    def __post_init__(self) -> None:
        self.piece = np.full(len(self.rows.numbers), -1, np.int32)
        self.row_in_piece = np.zeros(len(self.rows.numbers), np.int32)

    def missing(self, rows: IntArray) -> IntArray:
        """Returns the rows in `rows` that are not encoded."""
        missing: IntArray = rows[self.piece[rows] < 0]
        return missing

    def add(self, rows: IntArray, encoded: pa.RecordBatch) -> bool:
        """Keeps the tokens of rows. Returns True once: when they complete the block."""
        with self.lock:
            new = self.piece[rows] < 0
            self.row_in_piece[rows[new]] = np.flatnonzero(new)
            self.piece[rows[new]] = len(self.pieces)
            self.pieces.append(encoded)
            self.nbytes += encoded.nbytes
            is_complete = not self.is_finished and bool((self.piece >= 0).all())
            self.is_finished = self.is_finished or is_complete
            return is_complete

    def encoded(self, rows: IntArray) -> pa.RecordBatch:
        """Returns the tokens of encoded rows, in the order of `rows`."""
        with self.lock:
            piece, row_in_piece, pieces = self.piece[rows], self.row_in_piece[rows], list(self.pieces)
        used = np.flatnonzero(np.bincount(piece, minlength=1)) if len(piece) else np.zeros(1, np.int64)
        starts = np.zeros(len(pieces), np.int64)
        starts[used] = np.cumsum([0, *(pieces[number].num_rows for number in used[:-1])])
        joined = pa.concat_batches([pieces[number] for number in used])
        return joined.take(pa.array(starts[piece] + row_in_piece))


@dataclass(slots=True)
class _Wanted:
    """Requested rows of one block; `picked` are those not encoded before, `own` the numbers of all in the block."""

    at: BlockAddress
    name: str
    rows: IntArray
    future: RowsFuture
    decoded: Decoded | None = None
    own: IntArray | None = None
    picked: Selected | None = None


class RowsOnDemand:
    """Decoded rows of all datasets, within `budget_bytes` of memory, and the threads that tokenize requested rows."""

    def __init__(self, maps: Maps, budget_bytes: int, num_threads: int) -> None:
        self.budget_bytes, self.held_bytes = budget_bytes, 0
        self._maps = maps
        self._lock = threading.Lock()
        self._decoded = OrderedDict[str, Decoded]()  # by block name, least recently used first
        self._decoding: dict[str, Future[None]] = {}  # by the name of a row group's first block
        self._idle = threading.Condition()
        self._num_requests = 0  # requests that wait for rows
        self._relief: threading.Thread | None = None
        self._requests = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="penstock-rows")
        self._decoders = ThreadPoolExecutor(num_threads, thread_name_prefix="penstock-decode")

    def request(
        self, reader: RowGroupReader, names: Mapping[int, str], rows: Mapping[int, IntArray], split: str
    ) -> dict[int, RowsFuture]:
        """Returns a future per block index for `rows`: ascending row numbers in the block, or in its split.

        The futures raise what RowGroupReader raises. Cancel one to release its rows.
        """
        snapshot = reader.snapshot
        wanted = [_Wanted(snapshot.block(index), names[index], own, RowsFuture()) for index, own in rows.items()]
        if wanted:
            with self._idle:
                self._num_requests += 1
            try:
                self._requests.submit(self._serve, reader, wanted, split)
            except RuntimeError:  # no thread can be started now
                self._leave()
                raise
        return {each.at.index: each.future for each in wanted}

    def finish(self, reader: RowGroupReader, address: BlockAddress, name: str) -> Block | None:
        """Tokenizes the missing rows of a block and stores it. None if it has no room, or is already being completed.

        Gives way to requests before each small part. Raises what RowGroupReader raises.
        """
        with self._giving_way():
            self._give_way()
            decoded = self._find(name)
            if decoded is None and self._has_room(int(reader.snapshot.bytes_per_block[address.index])):
                self._decode_group(reader, [_Wanted(address, name, np.zeros(0, np.int64), RowsFuture())], "all")
                decoded = self._find(name)
            if decoded is None:
                return None
            return self._complete(reader, decoded, gives_way=True)

    def close(self) -> None:
        """Cancels the requests that have not started."""
        self._requests.shutdown(wait=False, cancel_futures=True)
        self._decoders.shutdown(wait=False, cancel_futures=True)

    def _leave(self) -> None:
        with self._idle:
            self._num_requests -= 1
            self._idle.notify_all()

    @contextmanager
    def _giving_way(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._idle:
                if self._relief is threading.current_thread():
                    self._relief = None

    def _give_way(self) -> None:
        """Waits while requests wait for rows. If decoded rows fill their budget, one thread goes on to make room."""
        me = threading.current_thread()
        with self._idle:
            while self._num_requests:
                if self.held_bytes >= _PRESSED * self.budget_bytes and self._relief in (None, me):
                    self._relief = me
                    return
                self._idle.wait(0.1)

    def _serve(self, reader: RowGroupReader, wanted: list[_Wanted], split: str) -> None:
        """Serves a request: decodes missing row groups in parallel, then encodes the rows together."""
        try:
            self._pick_all(reader, wanted, split)
        except BaseException as error:
            if isinstance(error, MemoryError):
                error = OutOfMemory("for the rows of a batch", error, "write smaller rows")
            for each in wanted:
                _answer(each.future, error)
        finally:
            self._leave()

    def _pick_all(self, reader: RowGroupReader, wanted: list[_Wanted], split: str) -> None:
        wanted = [each for each in wanted if not each.future.cancelled()]
        cold = [each for each in wanted if not self._pick_decoded(reader, each, split)]
        groups = dict[int, list[_Wanted]]()
        for each in cold:
            groups.setdefault(each.at.group, []).append(each)
        ready = [each for each in wanted if each.picked is not None]
        under_way = [(own, self._begin_decoding(reader, own, split)) for own in groups.values()]
        nbytes = sum(each.picked.rows.nbytes for each in ready if each.picked)
        for own, (future, is_own) in under_way:
            try:
                future.result()
                # Another request decoded it, perhaps without room to keep all rows of this one.
                left = [each for each in own if not self._pick_decoded(reader, each, split)] if not is_own else []
                if left:
                    self._decode_group(reader, left, split)
            except Exception as error:
                for each in own:
                    _answer(each.future, error)
                continue
            for each in own:
                if each.picked is not None:  # None if the request was cancelled
                    nbytes += each.picked.rows.nbytes
                    ready.append(each)
            if nbytes >= _ENCODED_TOGETHER:
                self._encode(reader, ready)
                ready, nbytes = [], 0
        self._encode(reader, ready)

    def _pick_decoded(self, reader: RowGroupReader, each: _Wanted, split: str) -> bool:
        """Picks the rows from a decoded block. Returns False if the block is not decoded."""
        decoded = self._find(each.name)
        if decoded is None:
            return False
        each.decoded = decoded
        each.own = _rows_of_split(decoded.rows, split, reader, each.at)[each.rows]
        each.picked = decoded.rows.take(decoded.missing(each.own))
        each.future.is_decoded = True
        return True

    def _find(self, name: str) -> Decoded | None:
        with self._lock:
            decoded = self._decoded.get(name)
            if decoded:
                decoded.used_at = time.monotonic()
                self._decoded.move_to_end(name)
            return decoded

    def _begin_decoding(self, reader: RowGroupReader, wanted: list[_Wanted], split: str) -> tuple[Future[None], bool]:
        """Decodes a row group once for all requests. Returns the future, and whether this call started it."""
        name = group_of(wanted[0].name)
        with self._lock:
            if under_way := self._decoding.get(name):
                return under_way, False
            future = self._decoding[name] = self._decoders.submit(self._decode_group, reader, wanted, split)

        def forget(_: Future[None]) -> None:
            with self._lock:
                self._decoding.pop(name, None)

        future.add_done_callback(forget)
        return future, True

    def _decode_group(self, reader: RowGroupReader, wanted: Sequence[_Wanted], split: str) -> None:
        """Decodes a row group up to the last wanted block, keeps its blocks while the budget has room, and picks the rows."""
        if all(each.future.cancelled() for each in wanted):
            return
        snapshot, first = reader.snapshot, wanted[0].at
        group = snapshot.blocks_of_group(first.group)
        named = partial(name_in, group_of(wanted[0].name))
        by_number = {each.at.number: each for each in wanted}
        last = max(by_number)
        is_kept = dict[int, bool]()

        def is_needed(number: int) -> bool:
            is_new = named(number) not in self._decoded
            is_kept[number] = is_new and self._has_room(int(snapshot.bytes_per_block[group[number]]))
            if number not in by_number and is_kept[number]:
                is_kept[number] = not self._maps.cache.has(named(number))
            return number in by_number or is_kept[number]

        parts = list[Selected]()
        rows = reader.rows(first, is_needed)
        try:
            pickers = {number: _Picker(reader, each, split) for number, each in by_number.items()}
            for at, part, is_last in rows:
                if is_kept[at.number]:
                    parts.append(part)
                if picker := pickers.get(at.number):
                    picker.take(part)
                if not is_last:
                    continue
                decoded = self._keep(named(at.number), at, Selected.joined(parts)) if parts else None
                parts.clear()
                if picker:
                    picker.end(decoded)
                if at.number >= last and (len(group) == 1 or not is_kept[at.number]):
                    return
        finally:
            rows.close()

    def _has_room(self, nbytes: int) -> bool:
        with self._lock:
            if self.held_bytes + nbytes > self.budget_bytes:
                self._drop_unused()
            return self.held_bytes + nbytes <= self.budget_bytes

    def _drop_unused(self) -> None:
        before = time.monotonic() - _UNUSED_SECONDS
        while self._decoded and (oldest := next(iter(self._decoded.values()))).used_at < before:
            del self._decoded[oldest.name]
            self.held_bytes -= oldest.nbytes

    def _keep(self, name: str, at: BlockAddress, rows: Selected) -> Decoded:
        decoded = Decoded(name, at, rows, rows.rows.nbytes)
        with self._lock:
            if found := self._decoded.get(name):
                return found
            self._decoded[name] = decoded
            self.held_bytes += decoded.nbytes
        return decoded

    def _drop(self, decoded: Decoded) -> None:
        with self._lock:
            if self._decoded.get(decoded.name) is decoded:
                del self._decoded[decoded.name]
                self.held_bytes -= decoded.nbytes

    def _encode(self, reader: RowGroupReader, wanted: list[_Wanted]) -> None:
        """Encodes the picked rows, together if they share a schema, and resolves their futures."""
        alike = list[list[_Wanted]]()
        for each in wanted:
            if each.future.cancelled():
                continue
            assert each.picked is not None
            if each.decoded is not None and not len(each.picked.numbers):
                self._hand_over(reader, each, None)
                continue
            for others in alike:
                other = others[0]
                assert other.picked is not None
                is_same_bound = reader.token_bound(other.at) == reader.token_bound(each.at)
                if is_same_bound and other.picked.rows.schema == each.picked.rows.schema:
                    others.append(each)
                    break
            else:
                alike.append([each])
        for some in alike:
            try:
                self._encode_alike(reader, some)
            except Problem:
                if len(some) == 1:
                    raise
                for each in some:  # one by one: one may be at fault, and the joint error names the row group of the first
                    try:
                        self._encode_alike(reader, [each])
                    except Problem as problem:
                        _answer(each.future, problem)

    def _encode_alike(self, reader: RowGroupReader, wanted: list[_Wanted]) -> None:
        picked = [each.picked for each in wanted if each.picked is not None]
        joined = reader.encode(Selected.joined(picked), wanted[0].at)
        first = 0
        for each, own in zip(wanted, picked, strict=True):
            # Copied: a slice would keep the whole joint batch in memory.
            encoded = joined.take(pa.array(np.arange(first, first + len(own.numbers))))
            first += len(own.numbers)
            self._hand_over(reader, each, encoded)

    def _hand_over(self, reader: RowGroupReader, each: _Wanted, encoded: pa.RecordBatch | None) -> None:
        """Resolves the future for the rows of one block, and keeps their tokens to complete the block.

        `encoded` are the tokens of the picked rows; None if all were encoded before.
        """
        decoded, is_complete = each.decoded, False
        assert each.picked is not None
        numbers = each.picked.numbers
        if decoded is not None:
            assert each.own is not None
            if encoded is not None:
                is_complete = self._add(decoded, np.searchsorted(decoded.rows.numbers, numbers), encoded)
            if encoded is None or len(numbers) < len(each.own):
                encoded, numbers = decoded.encoded(each.own), decoded.rows.numbers[each.own]
        assert encoded is not None
        block = Block.of(encoded)
        if block.bad:
            _answer(each.future, self._whole(reader, each))
        else:
            _answer(each.future, PickedRows(replace(block, numbered=numbers), each.rows))
        if is_complete and decoded is not None:
            self._store(reader, decoded)

    def _add(self, decoded: Decoded, rows: IntArray, encoded: pa.RecordBatch) -> bool:
        is_complete = decoded.add(rows, encoded)
        with self._lock:
            if self._decoded.get(decoded.name) is decoded:
                self.held_bytes += encoded.nbytes
        return is_complete

    def _whole(self, reader: RowGroupReader, each: _Wanted) -> Block:
        """Makes the whole block now: the replacement of a bad row, and its error message, depend on all rows."""
        decoded = each.decoded
        if decoded is None:
            parts = [rows for at, rows, _ in reader.rows(each.at, lambda number: number == each.at.number)]
            decoded = Decoded(each.name, each.at, Selected.joined(parts), 0)
        return self._complete(reader, decoded, gives_way=False)

    def _complete(self, reader: RowGroupReader, decoded: Decoded, *, gives_way: bool) -> Block:
        """Encodes the remaining rows of a block, some at a time, and stores it."""
        rows = decoded.rows
        size = len(rows.numbers)
        step = max(1, _FINISHED_TOGETHER * size // max(1, rows.rows.nbytes)) if gives_way else max(1, size)
        is_complete = False
        for start in range(0, size, step):
            if gives_way:
                self._give_way()
                if self._maps.cache.has(decoded.name) and (block := self._maps.read(decoded.name)):
                    self._drop(decoded)  # another process has stored it meanwhile
                    return block
            missing = decoded.missing(np.arange(start, min(start + step, size)))
            if len(missing):
                encoded = reader.encode(rows.take(missing), decoded.at)
                is_complete = self._add(decoded, missing, encoded)
        if not size:
            decoded.add(np.zeros(0, np.int64), reader.encode(rows, decoded.at))
        return self._store(reader, decoded, tells=is_complete)

    def _store(self, reader: RowGroupReader, decoded: Decoded, *, tells: bool = True) -> Block:
        """Stores a block after all its rows are encoded."""
        batch = decoded.encoded(np.arange(len(decoded.rows.numbers)))
        if tells:
            reader.warn_of_bad_rows(decoded.at, batch)
        self._maps.write(decoded.name, batch)
        self._drop(decoded)
        return self._maps.read(decoded.name) or Block.of(batch)


class _Picker:
    """Picks the wanted rows of a block from its parts as they are decoded."""

    def __init__(self, reader: RowGroupReader, wanted: _Wanted, split: str) -> None:
        self._reader, self._wanted, self._split = reader, wanted, split
        self._parts = list[Selected]()
        self._num_before = 0  # rows of the split in earlier parts

    def take(self, part: Selected) -> None:
        """Picks the rows of one part."""
        own = _rows_of_split(part, self._split, self._reader, self._wanted.at)
        rows = self._wanted.rows - self._num_before
        self._parts.append(part.take(own[rows[(rows >= 0) & (rows < len(own))]]))
        self._num_before += len(own)

    def end(self, decoded: Decoded | None) -> None:
        """Sets the picked rows after the last part; `decoded` is the block, if it is kept."""
        self._wanted.decoded = decoded
        if decoded:
            self._wanted.own = _rows_of_split(decoded.rows, self._split, self._reader, self._wanted.at)[self._wanted.rows]
        self._wanted.picked = Selected.joined(self._parts)
        self._wanted.future.is_decoded = True


def _rows_of_split(rows: Selected, split: str, reader: RowGroupReader, at: BlockAddress) -> IntArray:
    """Returns the indices of the rows of a block in a split."""
    selection = reader.snapshot.select_in(at.index, split)
    if selection == "all":
        return np.arange(len(rows.numbers))
    return np.flatnonzero(is_selected(is_validation(rows.hashes, reader.snapshot.validation), selection))


def _answer(future: RowsFuture, answer: PickedRows | Block | BaseException) -> None:
    """Resolves a future, unless it is cancelled or done."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)
