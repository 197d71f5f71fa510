"""The order of an epoch: a pure, invertible function from positions to samples. No I/O, O(1) memory per lookup.

Golden values in tests/golden freeze it: a changed value breaks every run that resumes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from penstock_server.order.arrays import IntArray, concatenated_ranges, find, find_one, starts_of
from penstock_server.order.permutation import WordArray, key, keys_below, permute, permute_together, unpermute

_Move = Callable[[IntArray, IntArray, WordArray], IntArray]


class EpochOrder:
    """The order of one epoch: maps positions to samples. Samples come in pools of one or a few blocks.

    none    the pools in stored order, each from its start to its end
    window  permutes the groups of pools, cuts them into windows of at least `window` samples, and permutes each window
    global  one window

    The pools of a group come from one row group and stay together, since decoding one decodes all of them. Windows end at
    pools.

    Planning is O(pools), a lookup O(log pools); no list has one entry per sample.
    """

    def __init__(
        self, samples_per_pool: IntArray, pools_per_group: IntArray, *, shuffle: str, window: int, seed: int, epoch: int
    ) -> None:
        self._window_key = key(seed, epoch, "window")
        self._shuffled = shuffle != "none"
        self._pools = np.arange(len(samples_per_pool))
        if self._shuffled:
            groups = permute(np.arange(len(pools_per_group)), len(pools_per_group), key(seed, epoch, "blocks"))
            self._pools = concatenated_ranges(starts_of(pools_per_group)[groups], pools_per_group[groups])
        self._pool_starts = starts_of(samples_per_pool[self._pools])
        self.num_samples = int(self._pool_starts[-1])
        if shuffle == "window":
            self._window_starts = _cut(self._pool_starts, window)
        else:
            self._window_starts = np.array([0, self.num_samples])

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the order takes."""
        return self._pools.nbytes + self._pool_starts.nbytes + self._window_starts.nbytes

    @property
    def largest_window(self) -> int:
        """Samples in the largest window."""
        return int(np.diff(self._window_starts).max())

    def samples(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Returns the (pool, index in the pool) at each position; positions are in [0, num_samples)."""
        slots = self._in_windows(positions, permute_together) if self._shuffled else positions
        place = find(self._pool_starts, slots)
        return self._pools[place], slots - self._pool_starts[place]

    def positions(self, pools: IntArray, indices: IntArray) -> IntArray:
        """Returns the position of each (pool, index in the pool): the inverse of `samples`."""
        place = np.empty_like(self._pools)
        place[self._pools] = np.arange(len(place))
        slots = self._pool_starts[place[pools]] + indices
        return self._in_windows(slots, unpermute) if self._shuffled else slots

    def window(self, position: int) -> int:
        """Returns the window of a position."""
        return find_one(self._window_starts, position)

    def windows(self, positions: IntArray) -> IntArray:
        """Returns the window of each position."""
        return find(self._window_starts, positions)

    def bounds_of_window(self, window: int) -> tuple[int, int]:
        """Returns the positions [start, stop) of a window."""
        start, stop = self._window_starts[window : window + 2].tolist()
        return start, stop

    def pools_of_window(self, window: int) -> IntArray:
        """Returns the pools of a window; empty past the last window."""
        if window + 1 >= len(self._window_starts):
            return self._pools[:0]
        first, last = np.searchsorted(self._pool_starts, self._window_starts[window : window + 2])
        return self._pools[first:last]

    def ahead(self, position: int, count: int) -> tuple[IntArray, IntArray]:
        """Returns the next pools from a position on, and the position that first needs each, ascending.

        It is exact for the next `count` positions. The other pools of their last window follow, then those of the next window.
        Stored order has no windows: there the next `count` pools follow.
        """
        stop = min(position + count, self.num_samples)
        pools, first = np.unique(self.samples(np.arange(position, stop))[0], return_index=True)
        order = np.argsort(first)
        near, needed_at = pools[order], position + first[order]
        if not self._shuffled:
            place = find_one(self._pool_starts, stop - 1) + 1
            return np.append(near, self._pools[place : place + count]), np.append(
                needed_at, self._pool_starts[place:-1][:count]
            )
        window = self.window(stop - 1)
        _, end = self.bounds_of_window(window)
        rest = np.setdiff1d(self.pools_of_window(window), near) if stop < end else near[:0]
        following = np.setdiff1d(self.pools_of_window(window + 1), near)
        return (
            np.concatenate([near, rest, following]),
            np.concatenate([needed_at, np.full(len(rest), stop), np.full(len(following), end)]),
        )

    def _in_windows(self, slots: IntArray, move: _Move) -> IntArray:
        window = find(self._window_starts, slots)
        start = self._window_starts[window]
        if len(window) and window[0] == window[-1] and (window == window[0]).all():
            window, start = window[:1], start[:1]  # one window, so one key for all elements
        size = self._window_starts[window + 1] - start
        return start + move(slots - start, size, keys_below(self._window_key, window))


def _cut(pool_starts: IntArray, window: int) -> IntArray:
    """Returns window offsets: a window ends with the pool that fills it. A short rest joins the last window."""
    ends = pool_starts.tolist()
    total = ends[-1]
    offsets = [0]
    while offsets[-1] + window <= total:
        offsets.append(ends[bisect_left(ends, offsets[-1] + window)])
    if len(offsets) == 1:
        offsets.append(total)
    offsets[-1] = total
    return np.array(offsets)
