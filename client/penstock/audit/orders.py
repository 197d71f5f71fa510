"""Orders of samples: which iterations belong to one run, also if its mix was changed after what was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf
from typing import Any

from penstock.audit.record import Place
from penstock.ledger.begin import Begin
from penstock.mix import first_other, parse_mix
from penstock.slicing import Slicing
from penstock.state.state import goes_on, order_of

_OF_MIXTURES = ("mix", "snapshot", "num_samples")  # what may become another in one run

OrderKey = tuple[tuple[str, object], ...]


@dataclass(slots=True)
class _Order:
    """An order: the first epoch and position of it that were asked for, and when each rank first and last began in it."""

    values: dict[str, Any]
    first: Place
    began: dict[int, tuple[datetime, datetime]]

    def times(self, rank: int) -> tuple[datetime, datetime]:
        """When a rank first and last began in it; if it never did, when the lowest rank did."""
        return self.began.get(rank) or self.began[min(self.began)]

    def goes_on_from(self, other: _Order) -> bool:
        """Whether it is the other one, but for a mix that is another from where the run changed over to it."""
        epoch, position = self.first
        if epoch or not 0 < position <= other.values["num_samples"] or not goes_on(other.values, self.values, position):
            return False
        rank = _shared_rank(self, other)
        is_later = self.times(rank)[0] > other.times(rank)[0]
        return is_later and all(self.values[name] == other.values[name] for name in self.values if name not in _OF_MIXTURES)


def _shared_rank(*orders: _Order) -> int:
    """A rank that began in each, since the clocks of two may differ; -1 if none did."""
    return min(set.intersection(*(set(order.began) for order in orders)), default=-1)


class Orders:
    """The orders of some iterations. First all of these are added, then each can be asked about."""

    def __init__(self) -> None:
        self._orders: dict[OrderKey, _Order] = {}
        # Of each the order that its run came to, and the sample of the first epoch up to which they agree.
        self._last: dict[OrderKey, tuple[OrderKey, float]] = {}

    def add(self, begin: Begin) -> None:
        """An iteration."""
        key = _key_of(begin)
        first = (begin.epoch, Slicing.of(begin.spec, begin.num_samples).position(begin.step))
        order = self._orders.setdefault(key, _Order(dict(key), first, {}))
        order.first = min(order.first, first)
        since, until = order.began.get(begin.rank, (begin.time, begin.time))
        order.began[begin.rank] = min(since, begin.time), max(until, begin.time)

    def of(self, begin: Begin) -> tuple[OrderKey, Begin, int]:
        """The order that an iteration is accounted for in, which is the last one of its run.

        With it the iteration, of as many samples as that order has, and the position up to which it gave the same samples.
        """
        if not self._last:
            self._find_last()
        last, sample = self._last[_key_of(begin)]
        num_samples = self._orders[last].values["num_samples"]
        stop = min(sample, begin.num_samples, num_samples) if begin.epoch == 0 or sample == inf else 0
        return last, replace(begin, num_samples=num_samples), int(stop)

    def _find_last(self) -> None:
        """Orders are of one run if each goes on from another of them; the last is that in which an iteration began last."""
        left = dict(self._orders)
        while left:
            run = {key: left[key] for key in _run_of(next(iter(left)), left)}
            rank = _shared_rank(*run.values())
            last = max(run, key=lambda key: run[key].times(rank)[1])
            self._last |= {key: (last, sample) for key, sample in _run_of(last, run).items()}
            left = {key: order for key, order in left.items() if key not in run}


def _run_of(key: OrderKey, orders: Mapping[OrderKey, _Order]) -> dict[OrderKey, float]:
    """The orders of the run that one is of, each with the sample of the first epoch up to which it agrees with that one."""
    found = {key: inf}
    queue = [key]
    for one in queue:
        for other in orders.keys() - found.keys():
            pair = orders[one], orders[other]
            if pair[0].goes_on_from(pair[1]) or pair[1].goes_on_from(pair[0]):
                found[other] = min(found[one], first_other(*(parse_mix(order.values["mix"]) for order in pair)))
                queue.append(other)
    return found


def _key_of(begin: Begin) -> OrderKey:
    """What decides which sample stands where in an epoch: of one order if it is equal."""
    return tuple({"dataset": begin.dataset, **order_of(begin.spec), "num_samples": begin.num_samples}.items())
