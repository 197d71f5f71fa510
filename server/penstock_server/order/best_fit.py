"""Best fit: whole documents packed into samples of seq_len tokens, best-fit decreasing, inside pools of blocks.

Every document is in exactly one bin, except those longer than seq_len: they fill separate bins, and the rest of each is
packed like a document. Packing happens once and fixes the size of every slot of every bin. Each epoch draws anew the document,
or part of one, that fills a slot, among all in the pool with exactly the slot's size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock_server.order.arrays import IntArray, begins_run, concatenated_ranges, find, find_one, numbered, starts_of
from penstock_server.order.packing import Packing, Spans
from penstock_server.order.permutation import WordArray, keys_below, permute, unpermute

_Words = npt.NDArray[np.uint32]
_Move = Callable[[IntArray, IntArray, WordArray], IntArray]

POOL_ROWS = 1 << 16  # minimum rows of a pool of small row groups: fewer would leave more padding
_COLUMNS = 4  # columns of Bins.words, one word per part


@dataclass(frozen=True, slots=True)
class Bins:
    """Bins of a pool: bin b holds parts [starts[b], starts[b + 1]), the longest first.

    Part i is tokens [firsts[i], lasts[i]) of document rows[i] of the pool: all of it, unless it is longer than seq_len.
    """

    starts: IntArray
    rows: IntArray
    firsts: IntArray
    lasts: IntArray

    @property
    def num_bins(self) -> int:
        """Number of bins."""
        return len(self.starts) - 1

    @property
    def words(self) -> _Words:
        """Arrays of slots, and of the parts that may fill them, concatenated.

        Slots and parts have ranks, [0, num_parts): by size, the largest first. As packed, a slot holds the part of its rank.

        starts  [num_bins + 1]: bin b is slots [starts[b], starts[b + 1])
        ranks   [num_parts]: the rank of each slot
        rows    [num_parts]: by rank, the part's document
        firsts  [num_parts]: by rank, the document's token that the part begins with
        links   [num_parts]: by rank, the first rank of the same size; at that first rank, the first rank of the next size
        """
        sizes = self.lasts - self.firsts
        by_rank = np.argsort(-sizes, kind="stable")
        ranks = np.empty_like(by_rank)
        ranks[by_rank] = np.arange(len(by_rank))
        begins = np.flatnonzero(begins_run(sizes[by_rank]))
        ends = np.append(begins[1:], len(sizes))[: len(begins)]
        links = np.repeat(begins, ends - begins)
        links[begins] = ends
        return np.concatenate([self.starts, ranks, self.rows[by_rank], self.firsts[by_rank], links]).astype(np.uint32)


def pack(lengths: IntArray, seq_len: int) -> Bins:
    """Packs documents of these lengths, shape [num_documents], into bins of seq_len; leaves out empty documents.

    Best-fit decreasing (Johnson, "Near-optimal bin packing algorithms", MIT, 1973): the documents in the order of their
    lengths, the longest first, each into the fullest bin that still has room.
    """
    rows, firsts, lasts = _parts(lengths, seq_len)
    sizes = lasts - firsts
    order = np.argsort(-sizes, kind="stable")
    bin_of = np.empty(len(sizes), np.int64)
    with_room: dict[int, list[int]] = {}  # bins by free tokens
    rooms: list[int] = []  # keys of with_room, ascending
    num_bins = 0
    for part, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        at = bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            chosen = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        else:
            room, chosen = seq_len, num_bins
            num_bins += 1
        bin_of[part] = chosen
        if rest := room - size:
            if rest not in with_room:
                with_room[rest] = []
                insort(rooms, rest)
            with_room[rest].append(chosen)
    by_bin = np.lexsort((-sizes, bin_of))
    counts = np.bincount(bin_of, minlength=num_bins)
    return Bins(starts_of(counts), rows[by_bin], firsts[by_bin], lasts[by_bin])


def _parts(lengths: IntArray, seq_len: int) -> tuple[IntArray, IntArray, IntArray]:
    """Splits documents longer than seq_len into parts of seq_len and a rest."""
    rows, numbers = numbered(-(-lengths // seq_len))
    firsts = numbers * seq_len
    return rows, firsts, np.minimum(firsts + seq_len, lengths[rows])


class Pools(NamedTuple):
    """Pools of blocks: the first block of each, then the number of blocks; and the pools per group."""

    starts: IntArray
    per_group: IntArray


def pools_of(rows_per_block: IntArray, blocks_per_group: IntArray) -> Pools:
    """Groups blocks into pools.

    Consecutive small row groups form one pool. Each block of a large row group is a separate pool; the order keeps these
    together, since the row group is decoded at once.
    """
    starts, per_group = [0], list[int]()
    first_block = starts_of(blocks_per_group).tolist()
    rows = starts_of(rows_per_block).tolist()
    for begin, end in pairwise(first_block):
        if end - begin > 1:
            _close(starts, per_group, begin)
            starts += range(begin + 1, end + 1)
            per_group.append(end - begin)
        elif rows[end] - rows[starts[-1]] >= POOL_ROWS:
            _close(starts, per_group, end)
    _close(starts, per_group, first_block[-1])
    return Pools(np.array(starts), np.array(per_group))


def _close(starts: list[int], per_group: list[int], end: int) -> None:
    if end > starts[-1]:
        starts.append(end)
        per_group.append(1)


class PackedPools:
    """Bins of all pools; `sizes` has the bins and parts of each, shape [2, num_pools], `words` the words of all Bins.

    The epoch's `draw_key` decides which part fills which slot. With None, each part stays in the slot of its packing.
    """

    def __init__(self, sizes: IntArray, words: _Words) -> None:
        self.bins_per_pool, self._num_parts = sizes
        self._starts = starts_of(sizes[0] + 1 + _COLUMNS * sizes[1])
        self._words = words

    @classmethod
    def of(cls, pools: Iterable[Bins]) -> PackedPools:
        """Builds the pools in memory."""
        found = [(bins.num_bins, len(bins.rows), bins.words) for bins in pools]
        sizes = np.array([(num_bins, num_parts) for num_bins, num_parts, _ in found], np.int64).reshape(-1, 2).T
        return cls(sizes, np.concatenate([np.zeros(0, np.uint32), *(words for *_, words in found)]))

    @staticmethod
    def num_words(sizes: IntArray) -> int:
        """Returns the number of words of pools with these bins and parts, shape [2, num_pools]."""
        return int((sizes[0] + 1 + _COLUMNS * sizes[1]).sum())

    def documents(self, pools: IntArray, numbers: IntArray, draw_key: int | None) -> tuple[IntArray, IntArray, IntArray]:
        """Returns the content of bin numbers[i] of pool pools[i], both of shape [num_bins].

        The result is the number of parts of each bin, [num_bins]; then, bin by bin, each part's document, as its number in the
        pool, and the document's token that the part begins with, both [num_parts].
        """
        at = self._starts[pools] + numbers
        starts, ends = self._read(at), self._read(at + 1)
        sizes = ends - starts
        pools = np.repeat(pools, sizes)
        ranks = self._read(self._column(pools, 0) + concatenated_ranges(starts, sizes))
        ranks = self._drawn(pools, ranks, draw_key, permute)
        return sizes, self._read(self._column(pools, 1) + ranks), self._read(self._column(pools, 2) + ranks)

    def holding(self, pool: int, document: int, draw_key: int | None) -> IntArray:
        """Returns the bins of a pool with a document, or a part of it."""
        begin, middle, end = self._starts[pool], self._starts[pool] + self.bins_per_pool[pool] + 1, self._starts[pool + 1]
        ranks, rows, *_ = self._words[middle:end].reshape(_COLUMNS, -1)
        parts = np.flatnonzero(rows == document)
        of_slots = self._drawn(np.full_like(parts, pool), parts, draw_key, unpermute)
        slots = np.flatnonzero(np.isin(ranks, of_slots))
        found: IntArray = np.searchsorted(self._words[begin:middle], slots, side="right") - 1
        return found

    def _drawn(self, pools: IntArray, ranks: IntArray, draw_key: int | None, move: _Move) -> IntArray:
        """Moves ranks among those of the same size, by the epoch's key."""
        if draw_key is None:
            return ranks
        at = self._column(pools, 3)
        links = self._read(at + ranks)
        begins = np.where(links > ranks, ranks, links)
        sizes = self._read(at + begins) - begins
        # A key for each size of each pool: with one for all, documents of two sizes could stay together.
        return begins + move(ranks - begins, sizes, keys_below(draw_key, (pools << 32) + begins))

    def _read(self, places: IntArray) -> IntArray:
        return self._words[places].astype(np.int64)

    def _column(self, pools: IntArray, number: int) -> IntArray:
        """Returns the offset of a column of Bins.words in each pool; column 0 is `ranks`."""
        begins: IntArray = self._starts[pools] + self.bins_per_pool[pools] + 1 + number * self._num_parts[pools]
        return begins


class BestFit(Packing):
    """A Packing with one sample per bin of every pool.

    `pool_starts`: see Pools. `rows_per_block`: the packed rows, shape [num_blocks]. `draw_key`: see PackedPools.
    """

    def __init__(
        self, pool_starts: IntArray, packed: PackedPools, rows_per_block: IntArray, seq_len: int, draw_key: int | None
    ) -> None:
        self._pool_starts, self._packed, self._seq_len, self._draw_key = pool_starts, packed, seq_len, draw_key
        self._first_row = starts_of(rows_per_block)
        self.samples_per_pool = packed.bins_per_pool

    def blocks_of(self, pool: int) -> range:
        """Returns the blocks of a pool."""
        return range(int(self._pool_starts[pool]), int(self._pool_starts[pool + 1]))

    def spans(self, pools: IntArray, indices: IntArray) -> Spans:
        """Returns one span per document."""
        sizes, documents, starts = self._packed.documents(pools, indices, self._draw_key)
        rows = np.repeat(self._first_row[self._pool_starts[pools]], sizes) + documents
        blocks = find(self._first_row, rows)
        samples = np.repeat(np.arange(len(pools)), sizes)
        return Spans(samples, blocks, rows - self._first_row[blocks], starts, starts + self._seq_len)

    def holding(self, block: int, row: int, start: int, stop: int) -> tuple[IntArray, IntArray]:  # noqa: ARG002
        """Returns the bin of the document; several if it is longer than seq_len."""
        pool = find_one(self._pool_starts, block)
        document = int(self._first_row[block] - self._first_row[self._pool_starts[pool]]) + row
        found = self._packed.holding(pool, document, self._draw_key)
        return np.full(len(found), pool), found
