"""The bins of a snapshot: what best_fit packed for one seq_len and split, in a sealed file beside the cached blocks.

A file is, little-endian: of each pool in turn, uint32, where each bin's documents start and at last their number, shape
[num_bins + 1]; the documents of all bins, by their number in the pool, [num_parts]; the first token of each that is in the
bin, [num_parts]. Then bins and parts of each pool, int64 [2, num_pools].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock_server.counts.turn import turn
from penstock_server.geometry.best_fit import Bins
from penstock_server.geometry.order import IntArray, concatenated_ranges, find, starts_of
from penstock_server.geometry.packing import Spans
from penstock_server.sealed import read_sealed, write_sealed

_Words = npt.NDArray[np.uint32]


class PackedPools:
    """The bins of each pool; `sizes` are the bins and the parts of each, shape [2, num_pools], `words` as the file has them."""

    def __init__(self, sizes: IntArray, words: _Words) -> None:
        self.bins_per_pool, self._num_parts = sizes
        self._starts = starts_of(sizes[0] + 1 + 2 * sizes[1])
        self._words = words

    @classmethod
    def of(cls, pools: Iterable[Bins]) -> PackedPools:
        """The bins of pools, kept in memory."""
        found = [(bins.num_bins, len(bins.rows), _words(bins)) for bins in pools]
        sizes = np.array([(num_bins, num_parts) for num_bins, num_parts, _ in found], np.int64).reshape(-1, 2).T
        return cls(sizes, np.concatenate([np.zeros(0, np.uint32), *(words for *_, words in found)]))

    def documents(self, pools: IntArray, numbers: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """What is in bins numbers[i] of pools[i], both of shape [num_bins].

        How many documents each has, [num_bins]; and of these, bin by bin, their numbers in the pool and the first token of each
        that is in the bin, [num_documents].
        """
        at = self._starts[pools]
        starts, ends = self._words[at + numbers].astype(np.int64), self._words[at + numbers + 1]
        sizes = ends - starts
        words = concatenated_ranges(at + self.bins_per_pool[pools] + 1 + starts, sizes)
        firsts = words + np.repeat(self._num_parts[pools], sizes)
        return sizes, self._words[words].astype(np.int64), self._words[firsts].astype(np.int64)

    def holding(self, pool: int, document: int) -> IntArray:
        """The bins of a pool that a document is in, or a part of it."""
        starts, documents, _ = self._of_pool(pool)
        found: IntArray = np.searchsorted(starts, np.flatnonzero(documents == document), side="right") - 1
        return found

    def _of_pool(self, pool: int) -> tuple[_Words, _Words, _Words]:
        words = self._words[self._starts[pool] : self._starts[pool + 1]]
        first, second = int(self.bins_per_pool[pool]) + 1, int(self._num_parts[pool])
        return words[:first], words[first : first + second], words[first + second :]


class BestFit:
    """The bins of every pool, one sequence each: a Packing.

    `pool_starts` see best_fit.pools_of; `rows_per_block` are the rows that were packed, shape [num_blocks].
    """

    def __init__(self, pool_starts: IntArray, packed: PackedPools, rows_per_block: IntArray, seq_len: int) -> None:
        self._pool_starts, self._packed, self._seq_len = pool_starts, packed, seq_len
        self._first_row = starts_of(rows_per_block)
        self.sequences_per_pool = packed.bins_per_pool

    def blocks_of(self, pool: int) -> range:
        """The blocks whose documents are packed together."""
        return range(int(self._pool_starts[pool]), int(self._pool_starts[pool + 1]))

    def spans(self, pools: IntArray, indices: IntArray) -> Spans:
        """A span a document."""
        sizes, documents, starts = self._packed.documents(pools, indices)
        rows = np.repeat(self._first_row[self._pool_starts[pools]], sizes) + documents
        blocks = find(self._first_row, rows)
        sequences = np.repeat(np.arange(len(pools)), sizes)
        return Spans(sequences, blocks, rows - self._first_row[blocks], starts, starts + self._seq_len)

    def holding(self, block: int, row: int, start: int, stop: int) -> tuple[IntArray, IntArray]:  # noqa: ARG002
        """The bin of the document; several if it is too long for one."""
        pool = int(find(self._pool_starts, np.array([block]))[0])
        document = int(self._first_row[block] - self._first_row[self._pool_starts[pool]]) + row
        found = self._packed.holding(pool, document)
        return np.full(len(found), pool), found


def keep_bins(path: Path, num_pools: int, pack: Callable[[], Iterable[Bins]]) -> PackedPools:
    """The bins that were stored, else those that `pack` gives pool by pool, stored; if they cannot be, they stay in memory."""
    load = partial(read_sealed, path, partial(_parse, num_pools))
    with turn(path):
        if found := load():
            return found
        write_sealed(path, _pieces(pack()), "it is held in memory, and packed again after a restart")
        return load() or PackedPools.of(pack())


def _pieces(pools: Iterable[Bins]) -> Iterator[bytes]:
    # Pool by pool: all of them may be more than there is memory.
    sizes = []
    for bins in pools:
        yield _words(bins).astype("<u4").tobytes()
        sizes.append((bins.num_bins, len(bins.rows)))
    yield np.array(sizes, "<i8").reshape(-1, 2).T.tobytes()


def _parse(num_pools: int, body: memoryview) -> PackedPools | None:
    end = len(body) - 16 * num_pools
    if end < 0:
        return None
    sizes = np.frombuffer(body[end:], "<i8").astype(np.int64).reshape(2, num_pools)
    fits = end == 4 * int((sizes[0] + 1 + 2 * sizes[1]).sum())
    return PackedPools(sizes, np.frombuffer(body[:end], "<u4")) if fits else None


def _words(bins: Bins) -> _Words:
    return np.concatenate([bins.starts, bins.rows, bins.firsts]).astype(np.uint32)
