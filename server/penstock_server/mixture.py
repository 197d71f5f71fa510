"""Mixtures: which dataset each sample is of, and which sample of that dataset's own endless stream. Pure, invertible, O(1).

A mixture's samples are counted from 0 over all its epochs, and so are each dataset's: dataset i's stream is its epochs one
behind the other. In every prefix of a phase each dataset has its share of the samples, to within one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from penstock.mix import Mix
from penstock_server.order import IntArray, find

ENDLESS = 1 << 52  # samples of an epoch that never ends; they and what is made of them stay below 2^53


@lru_cache(maxsize=64)
def _schedule(shares: tuple[int, ...]) -> IntArray:
    """Which dataset each sample of one period is of, shape [sum(shares)], so that shares[i] are of dataset i.

    Any prefix of n samples holds dataset i more than n * share - 1 and less than n * share + 1 times: Tijdeman, "The chairman
    assignment problem", Discrete Mathematics 32, 1980. Of the datasets that may come, the one that must come first.
    """
    period, present = sum(shares), [i for i, share in enumerate(shares) if share]
    if len(present) == 1:
        return np.full(period, present[0])
    margin = 2 * len(present) - 2
    owed = dict.fromkeys(present, 0)  # share * n - count * period, exactly, in whole numbers
    chosen = np.empty(period, np.int64)
    for n in range(period):
        best, best_deadline = -1, (0, 1)
        for i in present:
            owed[i] += shares[i]
            if owed[i] * margin >= period:
                deadline = (period * (margin - 1) - owed[i] * margin, shares[i])
                if best < 0 or deadline[0] * best_deadline[1] < best_deadline[0] * deadline[1]:
                    best, best_deadline = i, deadline
        owed[best] -= period
        chosen[n] = best
    return chosen


@dataclass(frozen=True, slots=True)
class _Period:
    """A phase's schedule, and what comes before it: `counts[n, i]` samples of dataset i are among the first n of a period."""

    schedule: IntArray
    counts: IntArray
    places: tuple[IntArray, ...]  # of each dataset, its samples in the period
    before: IntArray  # samples of each dataset in the phases before


class Mixture:
    """The phases of a mix as a function of samples."""

    def __init__(self, mix: Mix) -> None:
        self._starts = np.array([phase.start for phase in mix.phases])
        self._num_datasets = len(mix.datasets)
        self._periods: list[_Period] = []
        before = np.zeros(self._num_datasets, np.int64)
        for number, phase in enumerate(mix.phases):
            schedule = _schedule(phase.shares)
            counts = np.zeros((len(schedule) + 1, self._num_datasets), np.int64)
            np.cumsum(schedule[:, None] == np.arange(self._num_datasets), axis=0, out=counts[1:])
            places = tuple(np.flatnonzero(schedule == i) for i in range(self._num_datasets))
            self._periods.append(_Period(schedule, counts, places, before))
            if number + 1 < len(mix.phases):
                rounds, rest = divmod(mix.phases[number + 1].start - phase.start, len(schedule))
                before = before + rounds * counts[-1] + counts[rest]

    def locate(self, samples: IntArray) -> tuple[IntArray, IntArray]:
        """Of each sample its dataset and its number in that dataset's stream, both of the shape of `samples`."""
        datasets, numbers = np.empty_like(samples), np.empty_like(samples)
        phases = find(self._starts, samples)
        for phase in np.unique(phases).tolist():
            mine, period = phases == phase, self._periods[phase]
            rounds, rest = np.divmod(samples[mine] - self._starts[phase], len(period.schedule))
            chosen = period.schedule[rest]
            datasets[mine] = chosen
            numbers[mine] = period.before[chosen] + rounds * period.counts[-1, chosen] + period.counts[rest, chosen]
        return datasets, numbers

    def num_before(self, dataset: int, sample: int) -> int:
        """Samples of a dataset before this one."""
        phase = int(find(self._starts, np.array([sample]))[0])
        period = self._periods[phase]
        rounds, rest = divmod(sample - int(self._starts[phase]), len(period.schedule))
        return int(period.before[dataset] + rounds * period.counts[-1, dataset] + period.counts[rest, dataset])

    def sample(self, dataset: int, number: int) -> int | None:
        """The inverse: the sample that is the given one of a dataset's stream, or None: it never comes."""
        for phase in reversed(range(len(self._periods))):
            period = self._periods[phase]
            if number < period.before[dataset]:
                continue
            places = period.places[dataset]
            if not len(places):
                continue
            rounds, rest = divmod(number - int(period.before[dataset]), len(places))
            found = int(self._starts[phase]) + rounds * len(period.schedule) + int(places[rest])
            last = phase + 1 == len(self._periods)
            if last or found < self._starts[phase + 1]:
                return found
        return None

    def epoch_length(self, sizes: IntArray, stop: str) -> int | None:
        """Samples of an epoch over datasets of these sizes, in samples; None if the rule never ends it.

        first: before the first dataset would begin a second time. all: once every dataset has been seen whole. never: endless.
        """
        if stop == "never":
            return ENDLESS
        if stop == "first":
            ends = [self.sample(i, int(size)) for i, size in enumerate(sizes)]
            return min((end for end in ends if end is not None), default=None)
        last = [self.sample(i, int(size) - 1) for i, size in enumerate(sizes)]
        return None if None in last else 1 + max(end for end in last if end is not None)
