"""Orders of samples: which iterations are of one run, also where its mix became another behind what was trained on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from penstock.audit.slicing import Slicing
from penstock.ledger import Begin
from penstock.state import Position, goes_on, write_state

_COUNTS = ("version", "epoch", "step", "offset", "batch_size", "world_size", "skip")  # of a state, what names no order
_OF_MIXTURES = ("mix", "snapshot", "num_sequences")  # what may become another in one run

OrderKey = tuple[tuple[str, object], ...]


@dataclass(slots=True)
class _Order:
    """An order: the first sample of it that was asked for, over all epochs, and the lowest rank and when that began."""

    values: dict[str, Any]
    first: int
    began: tuple[int, datetime]

    def goes_on_from(self, other: _Order) -> bool:
        """Whether it is the other one, but for a mix that is another from where the run changed over to it."""
        is_later = self.first > 0 and self.began[1] > other.began[1]
        same = all(value == other.values[name] for name, value in self.values.items() if name not in _OF_MIXTURES)
        return is_later and same and goes_on(other.values, self.values, self.first)


class Orders:
    """The orders of some iterations. First all of these are added, then each can be asked about."""

    def __init__(self) -> None:
        self._orders: dict[OrderKey, _Order] = {}
        self._last: dict[OrderKey, _Order] = {}

    def add(self, begin: Begin) -> None:
        """An iteration."""
        key = _key_of(begin)
        first = begin.epoch * begin.num_sequences + Slicing.of(begin).position(begin.step)
        began = (begin.rank, begin.time)
        order = self._orders.setdefault(key, _Order(dict(key), first, began))
        order.first, order.began = min(order.first, first), min(order.began, began)

    def of(self, begin: Begin) -> tuple[OrderKey, Begin]:
        """The order that an iteration is accounted for in, and the iteration as one of it: that which its run came to."""
        key = _key_of(begin)
        if key not in self._last:
            self._last[key] = self._find_last(key)
        values = self._last[key].values
        return tuple(values.items()), replace(begin, num_sequences=values["num_sequences"])

    def _find_last(self, key: OrderKey) -> _Order:
        order = self._orders[key]
        while later := [other for other in self._orders.values() if other.goes_on_from(order)]:
            order = min(later, key=lambda other: other.began[1])
        return order


def _key_of(begin: Begin) -> OrderKey:
    """What decides which sample stands where in an epoch: of one order if it is equal."""
    state = write_state(begin.dataset, begin.spec, Position()) | {"num_sequences": begin.num_sequences}
    return tuple((name, value) for name, value in state.items() if name not in _COUNTS)
