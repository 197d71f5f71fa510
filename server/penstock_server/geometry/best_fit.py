"""Best fit: whole documents packed into sequences of seq_len tokens, best-fit decreasing, inside pools of blocks.

Every document is in exactly one bin, but for those longer than seq_len: they fill bins of their own, and what is left of each
is packed like a document. The bins are the same in every epoch; their order is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock_server.geometry.order import IntArray, starts_of

POOL_ROWS = 1 << 16  # blocks are packed together until they have so many rows: fewer would leave more padding


@dataclass(frozen=True, slots=True)
class Bins:
    """The bins of a pool: bin b holds documents [starts[b], starts[b + 1]) of the lists, the longest first.

    Document i is tokens [firsts[i], lasts[i]) of document `rows[i]` of the pool.
    """

    starts: IntArray
    rows: IntArray
    firsts: IntArray
    lasts: IntArray

    @property
    def num_bins(self) -> int:
        """How many there are."""
        return len(self.starts) - 1


def pack(lengths: IntArray, seq_len: int) -> Bins:
    """Packs documents of these lengths, shape [num_documents], into bins of seq_len; documents without tokens are in none.

    Best-fit decreasing (Johnson, "Near-optimal bin packing algorithms", MIT, 1973): the documents in the order of their
    lengths, the longest first, each into the fullest bin that still has room.
    """
    rows, firsts, lasts = _parts(lengths, seq_len)
    sizes = lasts - firsts
    order = np.argsort(-sizes, kind="stable")
    bin_of = np.empty(len(sizes), np.int64)
    with_room: list[list[int]] = [[] for _ in range(seq_len + 1)]  # the bins with so many tokens of room
    some = 0  # bit r is set where with_room[r] has a bin
    num_bins = 0
    for part, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fits = some >> size
        if fits:
            room = size + (fits & -fits).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                some ^= 1 << room
        else:
            room, chosen = seq_len, num_bins
            num_bins += 1
        bin_of[part] = chosen
        if room > size:
            with_room[room - size].append(chosen)
            some |= 1 << (room - size)
    by_bin = np.lexsort((-sizes, bin_of))
    counts = np.bincount(bin_of, minlength=num_bins)
    return Bins(starts_of(counts), rows[by_bin], firsts[by_bin], lasts[by_bin])


def _parts(lengths: IntArray, seq_len: int) -> tuple[IntArray, IntArray, IntArray]:
    """The documents, those that are too long in parts of seq_len and a rest."""
    num_parts = -(-lengths // seq_len)
    rows = np.repeat(np.arange(len(lengths)), num_parts)
    firsts = (np.arange(len(rows)) - starts_of(num_parts)[rows]) * seq_len
    return rows, firsts, np.minimum(firsts + seq_len, lengths[rows])


def pools_of(rows_per_block: IntArray, blocks_per_group: IntArray) -> tuple[IntArray, IntArray]:
    """How blocks are pooled: where each pool starts, and at last their number; and the pools of each group of them.

    Small row groups that follow each other are one pool; each block of a large row group is a pool of its own, and the order
    keeps these together, since the row group is decoded in one go.
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
    return np.array(starts), np.array(per_group)


def _close(starts: list[int], per_group: list[int], end: int) -> None:
    if end > starts[-1]:
        starts.append(end)
        per_group.append(1)
