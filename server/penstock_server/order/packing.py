"""Packing: how rows become samples. Pure arithmetic on counts and lengths; it reads no tokens.

    Rows      one row per sample, cut to seq_len; from row counts
    SplitRows one or more samples per row; from row lengths
    Concat    a ring of the tokens of all documents, block after block, cut into samples; from token counts
    BestFit   whole documents in bins; from row lengths (see best_fit)

Each packing groups the blocks into pools, gives the number of samples per pool, which an order permutes, and maps samples to
spans of tokens. A pool is one block, except for BestFit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from penstock_server.order.arrays import IntArray, by_value, concatenated_ranges, distinct, find, starts_of

STREAM = -1  # in place of a row: all tokens of the block, row after row


class Spans(NamedTuple):
    """Spans of tokens, in the order of their samples.

    Span i, of sample `samples[i]`, is tokens [starts[i], stops[i]) of row `rows[i]` of block `blocks[i]`, cut at the row's
    end. If the row is STREAM, the tokens are those of the block's stream.
    """

    samples: IntArray
    blocks: IntArray
    rows: IntArray
    starts: IntArray
    stops: IntArray


class Packing(Protocol):
    """Protocol: maps the blocks of one snapshot to samples in one epoch."""

    samples_per_pool: IntArray
    """Number of samples of each pool, shape [num_pools]."""

    def blocks_of(self, pool: int) -> range:
        """Returns the blocks where a pool's samples begin."""
        return range(pool, pool + 1)

    def spans(self, pools: IntArray, indices: IntArray) -> Spans:
        """Returns the spans of samples; sample i has number indices[i] in pools[i]."""

    def blocks(self, pools: IntArray, indices: IntArray) -> tuple[IntArray, IntArray]:
        """Returns the (sample, block) of each span of such samples, without their rows."""
        return self.spans(pools, indices)[:2]

    def holding(self, block: int, row: int, start: int, stop: int) -> tuple[IntArray, IntArray]:
        """Returns the (pool, number) of each sample with tokens of a row, which are [start, stop) of its block's stream."""


class Rows(Packing):
    """Packing of one row per sample, with at most `seq_len` tokens."""

    def __init__(self, rows_per_block: IntArray, seq_len: int) -> None:
        self.samples_per_pool = rows_per_block
        self._seq_len = seq_len

    def spans(self, pools: IntArray, indices: IntArray) -> Spans:
        """Returns the first tokens of one row per sample."""
        return Spans(np.arange(len(pools)), pools, indices, np.zeros_like(indices), np.full_like(indices, self._seq_len))

    def blocks(self, pools: IntArray, indices: IntArray) -> tuple[IntArray, IntArray]:  # noqa: ARG002
        """Returns the one block of each sample."""
        return np.arange(len(pools)), pools

    def holding(self, block: int, row: int, start: int, stop: int) -> tuple[IntArray, IntArray]:  # noqa: ARG002
        """Returns the one sample of the row."""
        return np.array([block]), np.array([row])


class SplitRows(Packing):
    """Packing that splits each row into samples of `seq_len` tokens; the last may be shorter.

    `row_lengths(block)` returns the tokens of each row of a block, shape [rows of the block]; an empty row has no sample.
    """

    def __init__(self, samples_per_block: IntArray, row_lengths: Callable[[int], IntArray], seq_len: int) -> None:
        self.samples_per_pool = samples_per_block
        self._row_lengths, self._seq_len = row_lengths, seq_len

    @staticmethod
    def count(lengths: IntArray, seq_len: int) -> IntArray:
        """Returns the number of samples of rows with these lengths, shape of `lengths`."""
        return -(-lengths // seq_len)

    def spans(self, pools: IntArray, indices: IntArray) -> Spans:
        """Returns a part of one row per sample."""
        rows, starts = np.zeros_like(indices), np.zeros_like(indices)
        for block, mine in by_value(pools):
            firsts = self._firsts(block)
            rows[mine] = find(firsts, indices[mine])
            starts[mine] = (indices[mine] - firsts[rows[mine]]) * self._seq_len
        return Spans(np.arange(len(pools)), pools, rows, starts, starts + self._seq_len)

    def blocks(self, pools: IntArray, indices: IntArray) -> tuple[IntArray, IntArray]:  # noqa: ARG002
        """Returns the one block of each sample; reads no row lengths."""
        return np.arange(len(pools)), pools

    def holding(self, block: int, row: int, start: int, stop: int) -> tuple[IntArray, IntArray]:  # noqa: ARG002
        """Returns the samples of all parts of the row."""
        first, last = self._firsts(block)[row : row + 2].tolist()
        return np.full(last - first, block), np.arange(first, last)

    def _firsts(self, block: int) -> IntArray:
        """Returns the number of each row's first sample in the block, then the total."""
        return starts_of(self.count(self._row_lengths(block), self._seq_len))


class Concat(Packing):
    """Packing of the ring of tokens, cut every `stride` tokens from token `shift` on, 0 <= shift < stride.

    Sample s is [s * stride + shift, s * stride + shift + sample_len) of the ring, with stride = sample_len - overlap. Only a
    rest shorter than a sample is left out, so without a shift no sample crosses the ring's end.
    Each epoch has another shift, so the rest and the sample offsets differ between epochs.
    """

    def __init__(self, tokens_per_block: IntArray, sample_len: int, shift: int, overlap: int = 0) -> None:
        self._starts = starts_of(tokens_per_block)
        self._sample_len, self._stride, self._shift = sample_len, sample_len - overlap, shift
        self.num_samples = max(0, int(self._starts[-1]) - overlap) // self._stride
        # The first sample that begins at or after each block's first token.
        self._first = np.clip(-((shift - self._starts) // self._stride), 0, self.num_samples)
        self.samples_per_pool = np.diff(self._first)

    def spans(self, pools: IntArray, indices: IntArray) -> Spans:
        """Returns one span per block that a sample meets; on the ring the first block follows the last."""
        begins = (self._first[pools] + indices) * self._stride + self._shift
        ends = begins + self._sample_len
        first, last = self._place(begins), self._place(ends - 1)
        num_spans = last - first + 1
        samples = np.repeat(np.arange(len(pools)), num_spans)
        rounds, blocks = np.divmod(concatenated_ranges(first, num_spans), len(self._starts) - 1)
        block_begins = self._starts[blocks] + rounds * self._starts[-1]
        block_ends = self._starts[blocks + 1] + rounds * self._starts[-1]
        starts = np.maximum(begins[samples], block_begins) - block_begins
        stops = np.minimum(ends[samples], block_ends) - block_begins
        filled = stops > starts  # drops spans of blocks without tokens
        spans = (samples, blocks, np.full_like(blocks, STREAM), starts, stops)
        return Spans(*(values[filled] for values in spans))

    def _place(self, tokens: IntArray) -> IntArray:
        """Returns the block of each token of the ring, plus the number of blocks for each full round."""
        rounds, inside = np.divmod(tokens, self._starts[-1])
        return rounds * (len(self._starts) - 1) + find(self._starts, inside)

    def holding(self, block: int, row: int, start: int, stop: int) -> tuple[IntArray, IntArray]:  # noqa: ARG002
        """Returns the samples that the row's tokens meet, also across the ring's end; empty if they are in the rest."""
        total = int(self._starts[-1])
        begin, end = int(self._starts[block]) + start - self._shift, int(self._starts[block]) + stop - self._shift
        overlap, stride = self._sample_len - self._stride, self._stride
        ranges = [np.arange((begin - overlap + lap) // stride, -(-(end + lap) // stride)) for lap in (0, total)]
        samples = distinct(np.concatenate(ranges))
        samples = samples[(samples >= 0) & (samples < self.num_samples)]
        pools = find(self._first, samples)
        return pools, samples - self._first[pools]
