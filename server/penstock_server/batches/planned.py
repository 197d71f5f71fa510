"""Planned epochs: how blocks become samples, and in what order, remembered while a snapshot is served."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from penstock_server.order.length_buckets import LengthOrder
from penstock_server.order.packing import Packing
from penstock_server.order.shuffle import EpochOrder

PlannedEpoch = tuple[Packing, EpochOrder | LengthOrder]

_BUDGET_BYTES = 256 << 20  # ten epochs of a million blocks; thousands of small ones, of which a mixture may need many at once
_MIN_BYTES = 4 << 10  # of the smallest epoch
_FEWEST = 4  # whatever they take: two jobs whose ranks go from one epoch to the next


class PlannedEpochs:
    """The epochs of one snapshot that were asked for last: as many as the budget holds, and a few at least.

    An epoch is planned once, however many ask for it, and no other snapshot waits for that.
    """

    def __init__(self) -> None:
        self._epochs: OrderedDict[Hashable, PlannedEpoch] = OrderedDict()
        self._num_bytes = 0
        self._lock, self._planning = threading.Lock(), threading.Lock()

    def get(self, name: Hashable, plan: Callable[[], PlannedEpoch]) -> PlannedEpoch:
        """The epoch of this name, which `plan` makes if it is not remembered. Raises what `plan` raises."""
        if found := self._find(name):
            return found
        with self._planning:  # all ranks come to an epoch at once, and one of them is to plan it
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
    """About the bytes of memory that it takes, or will."""
    packing, order = epoch
    return _MIN_BYTES + packing.samples_per_pool.nbytes + order.nbytes
