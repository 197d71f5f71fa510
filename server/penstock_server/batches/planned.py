"""Planned epochs: packing and order of the samples, cached while a snapshot is served."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from penstock_server.order.length_buckets import LengthOrder
from penstock_server.order.packing import Packing
from penstock_server.order.shuffle import EpochOrder

PlannedEpoch = tuple[Packing, EpochOrder | LengthOrder]

_BUDGET_BYTES = 256 << 20  # ten epochs of a million blocks, or thousands of small ones; a mixture may need many at once
_MIN_BYTES = 4 << 10  # of the smallest epoch
_FEWEST = 4  # whatever their size: two jobs with ranks in two consecutive epochs


class PlannedEpochs:
    """Least recently used cache of the epochs of one snapshot, within a budget, but with a minimum number.

    An epoch is planned once for all callers, and callers of other snapshots do not wait for it.
    """

    def __init__(self) -> None:
        self._epochs: OrderedDict[Hashable, PlannedEpoch] = OrderedDict()
        self._num_bytes = 0
        self._lock, self._planning = threading.Lock(), threading.Lock()

    def get(self, name: Hashable, plan: Callable[[], PlannedEpoch]) -> PlannedEpoch:
        """Returns the epoch of this name; calls `plan` if it is not cached. Raises what `plan` raises."""
        if found := self._find(name):
            return found
        with self._planning:  # all ranks reach an epoch at once; only one thread should plan it
            if found := self._find(name):
                return found
            made = plan()
            with self._lock:
                self._epochs[name] = made
                self._num_bytes += _nbytes(made)
                while self._num_bytes > _BUDGET_BYTES and len(self._epochs) > _FEWEST:
                    _, oldest = self._epochs.popitem(last=False)
                    self._num_bytes -= _nbytes(oldest)
            return made

    def _find(self, name: Hashable) -> PlannedEpoch | None:
        with self._lock:
            found = self._epochs.get(name)
            if found:
                self._epochs.move_to_end(name)
            return found


def _nbytes(epoch: PlannedEpoch) -> int:
    """Estimates the bytes of memory of an epoch, now or later."""
    packing, order = epoch
    return _MIN_BYTES + packing.samples_per_pool.nbytes + order.nbytes
