"""Orders of samples: groups iterations by run, also if the run's mix changed after the consumed samples."""

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

_OF_MIXTURES = ("mix", "snapshot", "num_samples")  # values that may change within a run

OrderKey = tuple[tuple[str, object], ...]


@dataclass(slots=True)
class _Order:
    """An order: the first epoch and position in it that began, and each rank's first and last begin time."""

    values: dict[str, Any]
    first: Place
    began: dict[int, tuple[datetime, datetime]]

    def times(self, rank: int) -> tuple[datetime, datetime]:
        """Return a rank's first and last begin time; the lowest rank's if this rank never began in it."""
        return self.began.get(rank) or self.began[min(self.began)]

    def goes_on_from(self, other: _Order) -> bool:
        """Whether it equals the other order up to the sample where the run changed the mix."""
        epoch, position = self.first
        if epoch or not 0 < position <= other.values["num_samples"] or not goes_on(other.values, self.values, position):
            return False
        rank = _shared_rank(self, other)
        is_later = self.times(rank)[0] > other.times(rank)[0]
        return is_later and all(self.values[name] == other.values[name] for name in self.values if name not in _OF_MIXTURES)


def _shared_rank(*orders: _Order) -> int:
    """Return a rank that began in every order, because ranks' clocks may differ; -1 without one."""
    return min(set.intersection(*(set(order.began) for order in orders)), default=-1)


class Orders:
    """Orders of some iterations. Add all iterations first, then call `of` for each."""

    def __init__(self) -> None:
        self._orders: dict[OrderKey, _Order] = {}
        # By order: its run's last order, and the end of the range of samples in the first epoch that both share.
        self._last: dict[OrderKey, tuple[OrderKey, float]] = {}

    def add(self, begin: Begin) -> None:
        """Add an iteration."""
        key = _key_of(begin)
        first = (begin.epoch, Slicing.of(begin.spec, begin.num_samples).position(begin.step))
        order = self._orders.setdefault(key, _Order(dict(key), first, {}))
        order.first = min(order.first, first)
        since, until = order.began.get(begin.rank, (begin.time, begin.time))
        order.began[begin.rank] = min(since, begin.time), max(until, begin.time)

    def of(self, begin: Begin) -> tuple[OrderKey, Begin, int]:
        """Return (order, iteration, stop): the audit counts an iteration in the last order of its run.

        The returned iteration has that order's number of samples. Before position `stop` it yielded the same samples.
        """
        if not self._last:
            self._find_last()
        last, sample = self._last[_key_of(begin)]
        num_samples = self._orders[last].values["num_samples"]
        stop = min(sample, begin.num_samples, num_samples) if begin.epoch == 0 or sample == inf else 0
        return last, replace(begin, num_samples=num_samples), int(stop)

    def _find_last(self) -> None:
        """Find each run's last order: orders belong to one run if they continue each other; the latest begin wins."""
        left = dict(self._orders)
        while left:
            run = {key: left[key] for key in _run_of(next(iter(left)), left)}
            rank = _shared_rank(*run.values())
            last = max(run, key=lambda key: run[key].times(rank)[1])
            self._last |= {key: (last, sample) for key, sample in _run_of(last, run).items()}
            left = {key: order for key, order in left.items() if key not in run}


def _run_of(key: OrderKey, orders: Mapping[OrderKey, _Order]) -> dict[OrderKey, float]:
    """Return all orders of one order's run, each with the end of the samples that both share in the first epoch."""
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
    """Return the values that decide the order of an epoch's samples: equal keys mean one order."""
    return tuple({"dataset": begin.dataset, **order_of(begin.spec), "num_samples": begin.num_samples}.items())
