"""Mixtures: map each sample to a dataset and a sample of its endless stream. Pure, invertible, O(1).

A mixture's samples are counted from 0 over all its epochs, and so are each dataset's: dataset i's stream is the sequence of
its epochs. In every prefix of a phase each dataset has its share of the samples, to within one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from penstock.mix import Mix
from penstock_server.lru import LruCache
from penstock_server.order.arrays import IntArray, by_value, find, find_one, numbered

ENDLESS = 1 << 52  # samples of an endless epoch; numbers derived from it stay below 2^53


def _schedule(shares: tuple[int, ...]) -> IntArray:
    """Returns the dataset of each sample of one period, shape [sum(shares)]; dataset i has shares[i] samples.

    Any prefix of n samples holds dataset i more than n * share - 1 and less than n * share + 1 times: Tijdeman, "The chairman
    assignment problem", Discrete Mathematics 32, 1980. Each step takes the eligible dataset with the earliest deadline.
    """
    period, present = sum(shares), [i for i, share in enumerate(shares) if share]
    if len(present) == 1:
        return np.full(period, present[0])
    margin = 2 * len(present) - 2
    datasets, numbers = numbered(np.array(shares))
    turns, own = 1 + numbers * margin, np.array(shares)[datasets]
    firsts = -(-period * turns // (margin * own)) - 1  # earliest position of the dataset's sample of this number
    # Its latest position, in another unit: unequal values differ by at least 4 / period^2, which float64 resolves.
    deadlines = (turns + margin - 2) / own
    by_first = np.argsort(firsts, kind="stable")
    coming = list(zip(deadlines[by_first].tolist(), datasets[by_first].tolist(), strict=True))
    num_come = np.searchsorted(firsts[by_first], np.arange(period), side="right").tolist()
    chosen = np.empty(period, np.int64)
    may_come: list[tuple[float, int]] = []
    for n, (before, now) in enumerate(pairwise([0, *num_come])):
        for one in coming[before:now]:
            heappush(may_come, one)
        _, chosen[n] = heappop(may_come)
    return chosen


@dataclass(frozen=True, slots=True)
class _Period:
    """One period of a phase: the dataset of each sample, and the number of earlier samples of that dataset.

    `counts` has the number of samples of each dataset, and `places` their positions.
    """

    schedule: IntArray
    numbers: IntArray
    counts: IntArray
    places: list[IntArray]

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.schedule.nbytes + self.numbers.nbytes + sum(places.nbytes for places in self.places)

    def num_before(self, dataset: int, samples: int) -> int:
        """Returns the samples of a dataset among the first `samples` of the phase."""
        rounds, rest = divmod(samples, len(self.schedule))
        places = self.places[dataset]
        return rounds * len(places) + int(np.searchsorted(places, rest))


def _period(shares: tuple[int, ...]) -> _Period:
    schedule, numbers = _schedule(shares), np.empty(sum(shares), np.int64)
    counts, by_dataset = np.array(shares), np.argsort(schedule, kind="stable")
    numbers[by_dataset] = numbered(counts)[1]
    return _Period(schedule, numbers, counts, np.split(by_dataset, np.cumsum(counts)[:-1]))


def mixture_of(mix: Mix) -> Mixture:
    """Returns the mixture of a mix, one of those used last if possible."""
    return _mixtures.get(mix, partial(Mixture, mix))


class Mixture:
    """Phases of a mix as a function of samples."""

    def __init__(self, mix: Mix) -> None:
        self._starts = np.array([phase.start for phase in mix.phases])
        periods = {shares: _period(shares) for shares in {phase.shares for phase in mix.phases}}
        self._periods = [periods[phase.shares] for phase in mix.phases]
        self.nbytes = self._starts.nbytes + sum(period.nbytes for period in periods.values())
        before = [np.zeros(len(mix.datasets), np.int64)]
        for period, (start, stop) in zip(self._periods, pairwise(self._starts.tolist()), strict=False):
            rounds, rest = divmod(stop - start, len(period.schedule))
            begun = np.bincount(period.schedule[:rest], minlength=len(mix.datasets))
            before.append(before[-1] + rounds * period.counts + begun)
        self._before = np.stack(before, axis=1)  # samples of each dataset in the phases before each

    def locate(self, samples: IntArray) -> tuple[IntArray, IntArray]:
        """Returns the dataset of each sample and its number in that dataset's stream, both of the shape of `samples`."""
        datasets, numbers = np.empty_like(samples), np.empty_like(samples)
        phases = find(self._starts, samples)
        for phase, mine in by_value(phases):
            period = self._periods[phase]
            rounds, rest = np.divmod(samples[mine] - self._starts[phase], len(period.schedule))
            chosen = period.schedule[rest]
            datasets[mine] = chosen
            numbers[mine] = self._before[chosen, phase] + rounds * period.counts[chosen] + period.numbers[rest]
        return datasets, numbers

    def num_before(self, dataset: int, sample: int) -> int:
        """Returns the number of samples of a dataset before this one."""
        phase = find_one(self._starts, sample)
        of_phase = self._periods[phase].num_before(dataset, sample - int(self._starts[phase]))
        return int(self._before[dataset, phase]) + of_phase

    def sample(self, dataset: int, number: int) -> int | None:
        """Returns the sample with a given number in a dataset's stream, the inverse of `locate`; None if it never comes."""
        phase = find_one(self._before[dataset], number)
        period = self._periods[phase]
        places = period.places[dataset]
        if not len(places):  # the dataset ends with an earlier phase
            return None
        rounds, rest = divmod(number - int(self._before[dataset, phase]), len(places))
        return int(self._starts[phase]) + rounds * len(period.schedule) + int(places[rest])

    def epoch_length(self, sizes: Sequence[int], stop: str) -> int | None:
        """Returns the samples of an epoch over datasets of these sizes, in samples; None if the rule never ends it.

        first_exhausted: before a dataset would repeat. all_exhausted: when every dataset was seen whole. never: endless.
        """
        if stop == "never":
            return ENDLESS
        if stop == "first_exhausted":
            ends = [self.sample(i, size) for i, size in enumerate(sizes)]
            return min((end for end in ends if end is not None), default=None)
        last = [self.sample(i, size - 1) for i, size in enumerate(sizes)]
        return None if None in last else 1 + max(end for end in last if end is not None)


_mixtures = LruCache[Mixture](64 << 20, lambda mixture: mixture.nbytes, most=64)
