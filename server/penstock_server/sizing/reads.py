"""Reads: the touches whose blocks a cache of some size lacks, so that a row group is decoded. Pure.

It follows `blocks/cache.py` and `blocks/store.py`. The cache keeps the blocks used last. If a new block does not fit, those
used longest ago are evicted, until a 32nd of the budget is free beside it. A read of a block stores all blocks of its row
group, if the cache has room for twice as many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock_server.blocks.cache import SPARE
from penstock_server.order.arrays import IntArray, begins_run, concatenated_ranges, distinct
from penstock_server.sizing.touches import Touches

MAX_EVICTIONS = 1 << 12  # a second of CPU
_MIN_STEP, _MAX_STEP = 1 << 6, 1 << 18  # touches looked at together


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Blocks of all members of a plan, in the order of their numbers; shape [num_blocks] each.

    cached  bytes in the cache
    stored  bytes in the shards
    groups  the row group, ascending
    """

    cached: IntArray
    stored: IntArray
    groups: IntArray


class Reads(NamedTuple):
    """The touches that read, ascending, of the first `num_touches`; the unit that each reads, and its bytes in the shards."""

    touches: IntArray
    units: IntArray
    nbytes: IntArray
    num_touches: int

    @property
    def num_repeated(self) -> int:
        """Reads of a unit that was read before."""
        return len(self.units) - len(distinct(self.units))


def reads_of(touches: Touches, sizes: BlockSizes, budget: int, most: int | None = None) -> Reads:
    """Returns the reads with a cache of `budget` bytes that is empty at first.

    It ends early after MAX_EVICTIONS, or after more than `most` reads.
    """
    cache, read = _Cache(sizes, budget), [np.zeros(0, np.int64)]
    uses, stores = _times(touches)
    blocks, at, step, num_evictions, num_reads = touches.blocks, 0, _MIN_STEP, 0, 0
    while at < len(blocks) and num_evictions < MAX_EVICTIONS and (most is None or num_reads <= most):
        part = blocks[at : at + step]
        new = np.flatnonzero((touches.before[at : at + step] < at) & (cache.used_at[part] < 0))
        units, firsts = np.unique(cache.units[part[new]], return_index=True)
        by_touch = np.argsort(firsts)
        new, units = at + new[firsts[by_touch]], units[by_touch]
        num_fit = cache.num_fitting(units)
        stop = int(new[num_fit]) if num_fit < len(new) else at + len(part)
        cache.read(units[:num_fit], stores[new[:num_fit]])
        cache.use(blocks[at:stop], uses[at:stop])
        if num_fit < len(new):
            rest = _rest_of_batch(touches, stop)
            is_cached = cache.used_at[blocks[rest]] >= 0
            cache.use(blocks[rest][is_cached], uses[rest][is_cached])
            cache.evict_for(int(units[num_fit]))
            cache.read(units[num_fit : num_fit + 1], stores[stop : stop + 1])
            num_evictions += 1
        read.append(new[: num_fit + 1])
        num_reads += len(read[-1])
        at, step = stop, int(np.clip(2 * (stop - at), _MIN_STEP, _MAX_STEP))
    found = np.concatenate(read)
    return Reads(found, cache.units[blocks[found]], cache.read_bytes[blocks[found]], at)


def _times(touches: Touches) -> tuple[IntArray, IntArray]:
    """Returns the times when each touch uses a cached block, and when it stores a missing one.

    A request looks up all blocks of its batch before it reads one.
    """
    sizes = np.diff(np.append(touches.batches, len(touches.blocks)))
    uses = np.repeat(touches.batches, sizes) + np.arange(len(touches.blocks))
    return uses, uses + np.repeat(sizes, sizes)


def _rest_of_batch(touches: Touches, at: int) -> slice:
    """Returns the touches of a batch from touch `at` on."""
    following = int(np.searchsorted(touches.batches, at, side="right"))
    return slice(at, int(touches.batches[following]) if following < len(touches.batches) else len(touches.blocks))


class _Cache:
    """Cached blocks: `used_at` is the time when each was used last, -1 if it is not cached; shape [num_blocks].

    A read stores a unit: a row group, or one block of it if the cache has no room for the others. `units` has the unit
    of each block, and `read_bytes` the bytes of a read for it: a row group is decoded from its start.
    """

    def __init__(self, sizes: BlockSizes, budget: int) -> None:
        self._sizes, self._budget = sizes.cached, budget
        begins_group = begins_run(sizes.groups)
        groups, first_blocks = np.cumsum(begins_group) - 1, np.flatnonzero(begins_group)
        keeps_all = 2 * np.maximum.reduceat(sizes.cached, first_blocks) * np.bincount(groups) <= budget
        begins_unit = begins_group | ~keeps_all[groups]
        self.units = np.cumsum(begins_unit) - 1
        self._starts = np.append(np.flatnonzero(begins_unit), len(groups))
        self._missing_bytes = np.add.reduceat(sizes.cached, self._starts[:-1])  # bytes of a unit that are not cached
        before_group = (np.cumsum(sizes.stored) - sizes.stored)[first_blocks][groups]
        of_group = np.add.reduceat(sizes.stored, first_blocks)[groups]
        self.read_bytes = np.where(keeps_all[groups], of_group, np.cumsum(sizes.stored) - before_group)
        self.used_at = np.full(len(groups), -1, np.int64)
        self._used_bytes = 0

    def num_fitting(self, units: IntArray) -> int:
        """Returns how many of these units can be read before one must be evicted."""
        ends = self._used_bytes + np.cumsum(self._missing_bytes[units])
        return int(np.searchsorted(ends, self._budget, side="right"))

    def read(self, units: IntArray, times: IntArray) -> None:
        """Stores the missing blocks of units at these times."""
        counts = self._starts[units + 1] - self._starts[units]
        blocks, read_at = concatenated_ranges(self._starts[units], counts), np.repeat(times, counts)
        is_missing = self.used_at[blocks] < 0
        self.used_at[blocks[is_missing]] = read_at[is_missing]
        self._used_bytes += int(self._missing_bytes[units].sum())
        self._missing_bytes[units] = 0

    def use(self, blocks: IntArray, times: IntArray) -> None:
        """Uses cached blocks at these times, ascending."""
        self.used_at[blocks] = np.maximum(self.used_at[blocks], times)

    def evict_for(self, unit: int) -> None:
        """Evicts the blocks used longest ago, until there is room for a unit and some bytes more."""
        target = self._budget - int(self._missing_bytes[unit]) - self._budget // SPARE
        cached = np.flatnonzero(self.used_at >= 0)
        newest = cached[np.argsort(-(self.used_at[cached] * len(self.used_at) + cached))]  # a row group is stored in order
        kept_bytes = np.cumsum(self._sizes[newest])
        num_kept = int(np.searchsorted(kept_bytes, target, side="right"))
        evicted = newest[num_kept:]
        self.used_at[evicted] = -1
        np.add.at(self._missing_bytes, self.units[evicted], self._sizes[evicted])
        self._used_bytes = int(kept_bytes[num_kept - 1]) if num_kept else 0
