"""A member: one dataset in one order, as a plan reads it. A plain dataset is a mixture of one member."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from penstock.spec import MAX_COUNT, Spec
from penstock_server.blocks.loader import Blocks
from penstock_server.catalog.snapshot import Snapshot
from penstock_server.index.index import Index
from penstock_server.lru import LruCache
from penstock_server.order.arrays import IntArray, by_value
from penstock_server.order.best_fit import BestFit
from penstock_server.order.length_buckets import LengthOrder
from penstock_server.order.packing import Concat, Packing, Rows, SplitRows
from penstock_server.order.permutation import key
from penstock_server.order.shuffle import EpochOrder

# How far read-ahead looks for the next blocks; a look takes a few milliseconds.
_POSITIONS_AHEAD, _STEPS_AHEAD, _MAX_POSITIONS_AHEAD = 1 << 13, 4, 1 << 16
PlannedEpoch = tuple[Packing, EpochOrder | LengthOrder]
_BUDGET_BYTES = 256 << 20  # ten epochs of a million blocks, or thousands of small ones; a mixture may need many at once
_MIN_BYTES = 4 << 10  # of the smallest epoch
_FEWEST = 4  # whatever their size: two jobs with ranks in two consecutive epochs


class OrderKey(NamedTuple):
    """Parameters of a spec that decide the order of a dataset's samples. `sample_len` limits all tokens of a row."""

    split: str
    packing: str
    sample_len: int
    overlap: int
    overflow: str
    length_bucket_size: int
    shuffle: str
    window: int
    seed: int

    @property
    def replaces_bad_rows(self) -> bool:
        """Whether a good row replaces a bad one. With counted lengths, a bad row has length 0 and is in no sample."""
        return (self.packing, self.overflow) == ("rows", "truncate")

    @classmethod
    def of(cls, spec: Spec) -> OrderKey:
        """Returns the key of a spec."""
        # In seq2seq, prompt and response are cut separately, each to its own length.
        return cls(
            split=spec.split or "all",
            sample_len=MAX_COUNT if spec.task == "seq2seq" else spec.sample_len,
            **{name: getattr(spec, name) for name in cls._fields if name not in ("split", "sample_len")},
        )


@dataclass(frozen=True, slots=True)
class Member:
    """A dataset and its order; `planned` caches the epochs of its snapshot, for all orders."""

    name: str
    snapshot: Snapshot
    blocks: Blocks
    index: Index
    planned: PlannedEpochs
    order_key: OrderKey

    @property
    def num_samples(self) -> int:
        """Samples per epoch. Raises what Index raises."""
        return self.epoch(0)[1].num_samples

    def epoch(self, epoch: int) -> PlannedEpoch:
        """Returns packing and order of an epoch, cached for the last few. Raises what Index raises."""
        return self.planned.get((self.order_key, epoch), partial(_plan, self, epoch))

    @property
    def spans_per_sample(self) -> float:
        """Estimated rows, or parts of rows, per sample. Raises what Index raises."""
        if self.order_key.packing == "rows":
            return 1.0
        return 1.0 + float(self.index.rows_per_block(self.order_key.split).sum() / self.num_samples)

    @property
    def window_bytes(self) -> int:
        """Estimated bytes of a window's blocks in the cache, from the first window."""
        packing, order = self.epoch(0)
        return int(self.index.bytes_per_block()[self._blocks_of(packing, order.pools_of_window(0))].sum())

    def read_ahead(self, epoch: int, position: int, step: int) -> None:
        """Makes the blocks after a position in the background; `step` is the number of positions per global batch."""
        job = (self.snapshot, self.order_key, epoch)
        count = min(max(_POSITIONS_AHEAD, _STEPS_AHEAD * step), _MAX_POSITIONS_AHEAD)
        if self.blocks.ahead.is_due(job, position, count):
            packing, order = self.epoch(epoch)
            pools, needed_at = order.ahead(position, count)
            when = zip(pools, needed_at.tolist(), strict=True)
            needed = [(block, at) for pool, at in when for block in self._blocks_of(packing, pool[None])]
            self.blocks.read_ahead(job, position, needed, by_rows=self.order_key.packing != "concat")

    def _blocks_of(self, packing: Packing, pools: IntArray) -> list[int]:
        """Returns the blocks of some pools, without shards that the split leaves out."""
        blocks = [block for pool in pools.tolist() for block in packing.blocks_of(pool)]
        if self.snapshot.split_rule == "files":
            blocks = [block for block in blocks if self.snapshot.select_in(block, self.order_key.split) != "none"]
        return blocks


def _plan(member: Member, epoch: int) -> PlannedEpoch:
    of = member.order_key
    # First, since row lengths also give the number of rows per block.
    lengths = member.index.row_lengths(of.split) if of.length_bucket_size else None
    packing = _packing(member, epoch)
    groups = member.snapshot.pools.per_group if of.packing == "best_fit" else member.snapshot.blocks_per_group
    order = EpochOrder(packing.samples_per_pool, groups, shuffle=of.shuffle, window=of.window, seed=of.seed, epoch=epoch)
    if lengths:
        of_pools = partial(_lengths, packing, lengths)
        return packing, LengthOrder(order, of_pools, of.length_bucket_size, key(of.seed, epoch, "runs"))
    return packing, order


def _packing(member: Member, epoch: int) -> Packing:
    of, index = member.order_key, member.index
    if of.packing == "concat":
        # Stored order cuts from the first token on, as other implementations do, for comparisons.
        shift = 0 if of.shuffle == "none" else key(of.seed, epoch, "shift") % (of.sample_len - of.overlap)
        return Concat(index.tokens_per_block(of.split), of.sample_len, shift, of.overlap)
    if of.packing == "best_fit":
        bins, rows = index.bins(of.split, of.sample_len), index.rows_per_block(of.split)
        # Without a shuffle every epoch is the same: an evaluation must give the same number each time.
        draw_key = None if of.shuffle == "none" else key(of.seed, epoch, "documents")
        return BestFit(member.snapshot.pools.starts, bins, rows, of.sample_len, draw_key)
    if of.overflow == "split":
        return SplitRows(index.parts_per_block(of.split, of.sample_len), index.row_lengths(of.split), of.sample_len)
    return Rows(index.rows_per_block(of.split), of.sample_len)


def _lengths(packing: Packing, of_block: Callable[[int], IntArray], pools: IntArray, indices: IntArray) -> IntArray:
    """Returns the tokens of samples of rows, cut to seq_len, shape of `pools`; `of_block`: see Index.row_lengths."""
    _, blocks, rows, starts, stops = packing.spans(pools, indices)
    lengths = np.empty_like(rows)
    for block, mine in by_value(blocks):
        lengths[mine] = of_block(block)[rows[mine]]
    return np.minimum(lengths, stops) - starts


class PlannedEpochs:
    """The epochs of one snapshot that were used last.

    An epoch is planned once for all callers, and callers of other snapshots do not wait for it.
    """

    def __init__(self) -> None:
        self._epochs = LruCache[PlannedEpoch](_BUDGET_BYTES, _nbytes, fewest=_FEWEST)
        self._planning = threading.Lock()

    def get(self, name: Hashable, plan: Callable[[], PlannedEpoch]) -> PlannedEpoch:
        """Returns the epoch of this name; calls `plan` if it is not cached. Raises what `plan` raises."""
        if found := self._epochs.find(name):
            return found
        with self._planning:  # all ranks reach an epoch at once; only one thread should plan it
            return self._epochs.get(name, plan)


def _nbytes(epoch: PlannedEpoch) -> int:
    """Estimates the bytes of memory of an epoch, now or later."""
    packing, order = epoch
    return _MIN_BYTES + packing.samples_per_pool.nbytes + order.nbytes
