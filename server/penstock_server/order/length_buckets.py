"""An order whose neighbours are of similar length: less padding in a batch that is padded to its longest sample."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from penstock_server.order.arrays import IntArray, by_value, concatenated_ranges, distinct, starts_of
from penstock_server.order.permutation import permute
from penstock_server.order.shuffle import EpochOrder

_REMEMBERED_WINDOWS = 4  # 8 bytes a sample each
_Places = npt.NDArray[np.int32]

MAX_WINDOW = 1 << 23  # samples that are sorted at a time


class LengthOrder:
    """Each window of an order, sorted by length and cut into runs of `run` samples, the runs permuted.

    So batches are of similar length and yet mixed: samples of one length stay in the underlying order, and runs are permuted
    by `run_key`, which is the epoch's, and the window's number. `lengths(pools, indices)` are the tokens of samples.

    Runs begin at multiples of `run` in the epoch, as global batches do, so a window's first and last run may be shorter. With a
    shorter one in the midst of a window each global batch after it would be of two runs.
    """

    def __init__(self, order: EpochOrder, lengths: Callable[[IntArray, IntArray], IntArray], run: int, run_key: int) -> None:
        self._order, self._lengths, self._run, self._run_key = order, lengths, run, run_key
        self._known: OrderedDict[int, tuple[_Places, _Places]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_samples = order.num_samples

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it takes once it remembers as many windows as it can."""
        places = min(_REMEMBERED_WINDOWS * self._order.largest_window, self.num_samples)
        return self._order.nbytes + 2 * np.dtype(np.int32).itemsize * places

    def samples(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """The (pool, index in the pool) at each position; positions are in [0, num_samples)."""
        return self._order.samples(self._moved(positions, inverse=False))

    def positions(self, pools: IntArray, indices: IntArray) -> IntArray:
        """The inverse: the position at which each (pool, index in the pool) stands."""
        return self._moved(self._order.positions(pools, indices), inverse=True)

    def window(self, position: int) -> int:
        """In which window a position lies."""
        return self._order.window(position)

    def pools_of_window(self, window: int) -> IntArray:
        """The pools of a window; none past the last one."""
        return self._order.pools_of_window(window)

    def ahead(self, position: int, count: int) -> tuple[IntArray, IntArray]:
        """The pools that come next, as EpochOrder.ahead has them: within a window about, since that would have to be sorted."""
        return self._order.ahead(position, count)

    def _moved(self, positions: IntArray, *, inverse: bool) -> IntArray:
        moved = np.empty_like(positions)
        for window, mine in by_value(self._order.windows(positions)):
            start, _ = self._order.bounds_of_window(window)
            with self._lock:  # all ranks come to a window at once, and one of them is to sort it
                moves = self._arranged(window)[int(inverse)]
            moved[mine] = start + moves[positions[mine] - start]
        return moved

    def _arranged(self, window: int) -> tuple[_Places, _Places]:
        """As _arrange; the last few are remembered."""
        # A cache around the method would hold this, and this the cache: both would stay until garbage is collected.
        if window not in self._known:
            if len(self._known) >= _REMEMBERED_WINDOWS:
                self._known.popitem(last=False)
            self._known[window] = self._arrange(window)
        self._known.move_to_end(window)
        return self._known[window]

    def _arrange(self, window: int) -> tuple[_Places, _Places]:
        """Where each place of a window takes its sample from, and the inverse; both from the window's start."""
        start, stop = self._order.bounds_of_window(window)
        lengths = self._lengths(*self._order.samples(np.arange(start, stop)))
        by_length = np.argsort(lengths, kind="stable")
        borders = distinct(np.clip(np.arange(start - start % self._run, stop + self._run, self._run), start, stop))
        sizes = np.diff(borders)
        # Cut once they have their places: if the short run were always that of the longest rows, drop_last=true would drop
        # those.
        parts = permute(np.arange(len(sizes)), len(sizes), np.uint64(self._run_key ^ window))
        sizes_of_parts = np.empty_like(sizes)  # of what is sorted; run i is its part parts[i]
        sizes_of_parts[parts] = sizes
        taken = by_length[concatenated_ranges(starts_of(sizes_of_parts)[parts], sizes)]
        inverse = np.empty(len(taken), np.int32)
        inverse[taken] = np.arange(len(taken), dtype=np.int32)
        return taken.astype(np.int32), inverse
