"""Length buckets: an order with neighbours of similar length, for less padding in batches padded to the longest sample."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from penstock_server.order.arrays import IntArray, by_value, concatenated_ranges, distinct, starts_of
from penstock_server.order.permutation import permute
from penstock_server.order.shuffle import EpochOrder

_REMEMBERED_WINDOWS = 4  # 8 bytes per sample each
_Places = npt.NDArray[np.int32]

_STEP = 1 << 18  # samples
MAX_WINDOW = 1 << 23  # samples sorted at a time


class LengthOrder:
    """An order with each window sorted by length and cut into runs of `run` samples, the runs permuted.

    The samples of a batch have similar lengths, and are still mixed. Samples of one length stay in the underlying order. The
    epoch's `run_key` and the window's number permute the runs. `lengths(pools, indices)` returns the tokens of samples.

    Runs begin at multiples of `run` in the epoch, as global batches do, so a window's first and last run may be shorter. After
    a shorter run inside a window, each global batch would span two runs.
    """

    def __init__(self, order: EpochOrder, lengths: Callable[[IntArray, IntArray], IntArray], run: int, run_key: int) -> None:
        self._order, self._lengths, self._run, self._run_key = order, lengths, run, run_key
        self._known: OrderedDict[int, tuple[_Places, _Places]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_samples = order.num_samples

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the order takes with a full cache of windows."""
        places = min(_REMEMBERED_WINDOWS * self._order.largest_window, self.num_samples)
        return self._order.nbytes + 2 * np.dtype(np.int32).itemsize * places

    def samples(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Returns the (pool, index in the pool) at each position; positions are in [0, num_samples)."""
        return self._order.samples(self._moved(positions, inverse=False))

    def positions(self, pools: IntArray, indices: IntArray) -> IntArray:
        """Returns the position of each (pool, index in the pool): the inverse of `samples`."""
        return self._moved(self._order.positions(pools, indices), inverse=True)

    def window(self, position: int) -> int:
        """Returns the window of a position."""
        return self._order.window(position)

    def pools_of_window(self, window: int) -> IntArray:
        """Returns the pools of a window; empty past the last window."""
        return self._order.pools_of_window(window)

    def ahead(self, position: int, count: int) -> tuple[IntArray, IntArray]:
        """Returns the next pools as EpochOrder.ahead; approximate within a window, since exactness would need a sort."""
        return self._order.ahead(position, count)

    def _moved(self, positions: IntArray, *, inverse: bool) -> IntArray:
        moved = np.empty_like(positions)
        for window, mine in by_value(self._order.windows(positions)):
            start, _ = self._order.bounds_of_window(window)
            with self._lock:  # all ranks reach a window at once; only one thread should sort it
                moves = self._arranged(window)[int(inverse)]
            moved[mine] = start + moves[positions[mine] - start]
        return moved

    def _arranged(self, window: int) -> tuple[_Places, _Places]:
        """As _arrange, cached for the last few windows."""
        # An lru_cache on the method and this object would refer to each other, and stay until a garbage collection.
        if window not in self._known:
            if len(self._known) >= _REMEMBERED_WINDOWS:
                self._known.popitem(last=False)
            self._known[window] = self._arrange(window)
        self._known.move_to_end(window)
        return self._known[window]

    def _arrange(self, window: int) -> tuple[_Places, _Places]:
        """Returns the source of each place of a window, and the inverse; both relative to the window's start."""
        start, stop = self._order.bounds_of_window(window)
        lengths = np.empty(stop - start, np.int32)
        for at in range(start, stop, _STEP):  # a dozen arrays of a piece, rather than of the window, are in memory
            places = np.arange(at, min(at + _STEP, stop))
            lengths[places - start] = self._lengths(*self._order.samples(places))
        by_length = np.argsort(lengths, kind="stable")
        offsets = distinct(np.clip(np.arange(start - start % self._run, stop + self._run, self._run), start, stop))
        sizes = np.diff(offsets)
        # Cut into runs after the permutation: if the short run always had the longest rows, drop_last=true would drop them.
        parts = permute(np.arange(len(sizes)), len(sizes), np.uint64(self._run_key ^ window))
        sizes_of_parts = np.empty_like(sizes)  # sizes of the sorted parts; run i is part parts[i]
        sizes_of_parts[parts] = sizes
        taken = by_length[concatenated_ranges(starts_of(sizes_of_parts)[parts], sizes)]
        inverse = np.empty(len(taken), np.int32)
        inverse[taken] = np.arange(len(taken), dtype=np.int32)
        return taken.astype(np.int32), inverse
