"""Packing: how rows become samples. Pure arithmetic on counts and lengths; no token is looked at.

    Rows      one row, one sample, cut to its longest length; from row counts
    SplitRows one row, as many samples as it fills; from row lengths
    Concat    the documents of all blocks, one after the other, are a ring of tokens, cut into samples; from token counts
    BestFit   whole documents in bins; from row lengths (see best_fit)

Each cuts the blocks into pools and says how many samples each pool has, which is what an order permutes, and what a sample
is made of. A pool is one block, but for BestFit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from penstock_server.order.arrays import IntArray, by_value, concatenated_ranges, distinct, find, starts_of

STREAM = -1  # in place of a row: the whole block's tokens, its rows one after the other


class Spans(NamedTuple):
    """Runs of tokens, in the order of the samples that they make up.

    Span i, of sample `samples[i]`, is tokens [starts[i], stops[i]) of row `rows[i]` of block `blocks[i]`, cut at the row's
    end; of the block's stream where the row is STREAM.
    """

    samples: IntArray
    blocks: IntArray
    rows: IntArray
    starts: IntArray
    stops: IntArray


class Packing(Protocol):
    """How the blocks of one snapshot become samples in one epoch."""

    @property
    def samples_per_pool(self) -> IntArray:
        """How many samples each pool has, shape [num_pools]."""

    def blocks_of(self, pool: int) -> range:
        """The blocks that a pool's samples are made of; those of Concat may run on into the blocks after them."""

    def spans(self, pools: IntArray, indices: IntArray) -> Spans:
        """What samples are made of; sample i is the one with number indices[i] of pools[i]."""

    def holding(self, block: int, row: int, start: int, stop: int) -> tuple[IntArray, IntArray]:
        """The inverse: the (pool, number) of each sample that a row is in, whose tokens are [start, stop) of its block's."""


class Rows:
    """One row, one sample, of at most `seq_len` tokens."""

    def __init__(self, rows_per_block: IntArray, seq_len: int) -> None:
        self.samples_per_pool = rows_per_block
        self._seq_len = seq_len

    def blocks_of(self, pool: int) -> range:
        """The one block."""
        return range(pool, pool + 1)

    def spans(self, pools: IntArray, indices: IntArray) -> Spans:
        """The first tokens of one row each."""
        return Spans(np.arange(len(pools)), pools, indices, np.zeros_like(indices), np.full_like(indices, self._seq_len))

    def holding(self, block: int, row: int, start: int, stop: int) -> tuple[IntArray, IntArray]:  # noqa: ARG002
        """The sample that is the row."""
        return np.array([block]), np.array([row])


class SplitRows:
    """One row, as many samples of `seq_len` tokens as it takes; the last may be shorter.

    `row_lengths(block)` are the tokens of each of a block's rows, shape [rows of the block]; a row without tokens is none.
    """

    def __init__(self, samples_per_block: IntArray, row_lengths: Callable[[int], IntArray], seq_len: int) -> None:
        self.samples_per_pool = samples_per_block
        self._row_lengths, self._seq_len = row_lengths, seq_len

    @staticmethod
    def count(lengths: IntArray, seq_len: int) -> IntArray:
        """The samples that rows of these lengths make, shape of `lengths`."""
        return -(-lengths // seq_len)

    def blocks_of(self, pool: int) -> range:
        """The one block."""
        return range(pool, pool + 1)

    def spans(self, pools: IntArray, indices: IntArray) -> Spans:
        """A part of one row each."""
        rows, starts = np.zeros_like(indices), np.zeros_like(indices)
        for block, mine in by_value(pools):
            firsts = self._firsts(block)
            rows[mine] = find(firsts, indices[mine])
            starts[mine] = (indices[mine] - firsts[rows[mine]]) * self._seq_len
        return Spans(np.arange(len(pools)), pools, rows, starts, starts + self._seq_len)

    def holding(self, block: int, row: int, start: int, stop: int) -> tuple[IntArray, IntArray]:  # noqa: ARG002
        """All parts of the row."""
        first, last = self._firsts(block)[row : row + 2].tolist()
        return np.full(last - first, block), np.arange(first, last)

    def _firsts(self, block: int) -> IntArray:
        """The number of each row's first sample in the block, and at last that of all."""
        return starts_of(self.count(self._row_lengths(block), self._seq_len))


class Concat:
    """The ring of tokens, cut every `seq_len` tokens from token `shift` on, 0 <= shift < seq_len.

    Sequence s is [s * seq_len + shift, (s + 1) * seq_len + shift) of the ring. Nothing is left out but what is too short
    for a sample; with another shift in each epoch that is something else each time, and so are the borders.
    """

    def __init__(self, tokens_per_block: IntArray, seq_len: int, shift: int) -> None:
        self._starts = starts_of(tokens_per_block)
        self._seq_len, self._shift = seq_len, shift
        self.num_samples = int(self._starts[-1]) // seq_len
        # The first sample that begins at a block's first token or after it.
        self._first = np.clip(-((shift - self._starts) // seq_len), 0, self.num_samples)
        self.samples_per_pool = np.diff(self._first)

    def blocks_of(self, pool: int) -> range:
        """The block that its samples begin in."""
        return range(pool, pool + 1)

    def spans(self, pools: IntArray, indices: IntArray) -> Spans:
        """As many spans as a sample meets blocks; on the ring the first block follows the last."""
        begins = (self._first[pools] + indices) * self._seq_len + self._shift
        ends = begins + self._seq_len
        first, last = self._place(begins), self._place(ends - 1)
        num_spans = last - first + 1
        samples = np.repeat(np.arange(len(pools)), num_spans)
        rounds, blocks = np.divmod(concatenated_ranges(first, num_spans), len(self._starts) - 1)
        block_begins = self._starts[blocks] + rounds * self._starts[-1]
        block_ends = self._starts[blocks + 1] + rounds * self._starts[-1]
        starts = np.maximum(begins[samples], block_begins) - block_begins
        stops = np.minimum(ends[samples], block_ends) - block_begins
        filled = stops > starts  # blocks without a token lie in between
        spans = (samples, blocks, np.full_like(blocks, STREAM), starts, stops)
        return Spans(*(values[filled] for values in spans))

    def _place(self, tokens: IntArray) -> IntArray:
        """In which block tokens of the ring lie, going round it: as many more than in the first round as there are blocks."""
        rounds, inside = np.divmod(tokens, self._starts[-1])
        return rounds * (len(self._starts) - 1) + find(self._starts, inside)

    def holding(self, block: int, row: int, start: int, stop: int) -> tuple[IntArray, IntArray]:  # noqa: ARG002
        """The samples that the row's tokens meet, also where the ring closes; none if they are what is left out."""
        total = int(self._starts[-1])
        begin, end = int(self._starts[block]) + start - self._shift, int(self._starts[block]) + stop - self._shift
        turns = [np.arange((begin + turn) // self._seq_len, -(-(end + turn) // self._seq_len)) for turn in (0, total)]
        samples = distinct(np.concatenate(turns))
        samples = samples[(samples >= 0) & (samples < self.num_samples)]
        pools = find(self._first, samples)
        return pools, samples - self._first[pools]
