"""Mixtures: which dataset each sample is of, and which sample of that dataset's own endless stream. Pure, invertible, O(1).

A mixture's samples are counted from 0 over all its epochs, and so are each dataset's: dataset i's stream is its epochs one
behind the other. In every prefix of a phase each dataset has its share of the samples, to within one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from penstock.mix import Mix
from penstock_server.geometry.arrays import IntArray, find

ENDLESS = 1 << 52  # samples of an epoch that never ends; they and what is made of them stay below 2^53


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
    """One period of a phase: of each sample its dataset, and how many of that dataset came before it; and where each's are."""

    schedule: IntArray
    numbers: IntArray
    places: tuple[IntArray, ...]

    def num_before(self, dataset: int, samples: int) -> int:
        """Samples of a dataset among the first `samples` of the phase."""
        rounds, rest = divmod(samples, len(self.schedule))
        places = self.places[dataset]
        return rounds * len(places) + int(np.searchsorted(places, rest))


@lru_cache(maxsize=64)
def _period(shares: tuple[int, ...]) -> _Period:
    schedule, numbers = _schedule(shares), np.empty(sum(shares), np.int64)
    places = tuple(np.flatnonzero(schedule == i) for i in range(len(shares)))
    for own in places:
        numbers[own] = np.arange(len(own))
    return _Period(schedule, numbers, places)


@lru_cache(maxsize=64)
def mixture_of(mix: Mix) -> Mixture:
    """The mixture of a mix; the last few are remembered."""
    return Mixture(mix)


class Mixture:
    """The phases of a mix as a function of samples."""

    def __init__(self, mix: Mix) -> None:
        self._starts = np.array([phase.start for phase in mix.phases])
        num_datasets = len(mix.datasets)
        self._periods = [_period(phase.shares) for phase in mix.phases]
        self._before = [np.zeros(num_datasets, np.int64)]  # samples of each dataset in the phases before
        for period, (start, stop) in zip(self._periods, pairwise(self._starts.tolist()), strict=False):
            of_phase = [period.num_before(i, stop - start) for i in range(num_datasets)]
            self._before.append(self._before[-1] + np.array(of_phase))

    def locate(self, samples: IntArray) -> tuple[IntArray, IntArray]:
        """The dataset of each sample and its number in that dataset's stream, both of the shape of `samples`."""
        datasets, numbers = np.empty_like(samples), np.empty_like(samples)
        phases = find(self._starts, samples)
        for phase in np.unique(phases).tolist():
            mine, period = phases == phase, self._periods[phase]
            rounds, rest = np.divmod(samples[mine] - self._starts[phase], len(period.schedule))
            chosen = period.schedule[rest]
            per_round = np.array([len(places) for places in period.places])
            datasets[mine] = chosen
            numbers[mine] = self._before[phase][chosen] + rounds * per_round[chosen] + period.numbers[rest]
        return datasets, numbers

    def num_before(self, dataset: int, sample: int) -> int:
        """Samples of a dataset before this one."""
        phase = int(find(self._starts, np.array([sample]))[0])
        of_phase = self._periods[phase].num_before(dataset, sample - int(self._starts[phase]))
        return int(self._before[phase][dataset]) + of_phase

    def sample(self, dataset: int, number: int) -> int | None:
        """The inverse: the sample that is the given one of a dataset's stream, or None: it never comes."""
        for phase in reversed(range(len(self._periods))):
            period, before = self._periods[phase], int(self._before[phase][dataset])
            if number < before:
                continue
            places = period.places[dataset]
            if not len(places):
                continue
            rounds, rest = divmod(number - before, len(places))
            found = int(self._starts[phase]) + rounds * len(period.schedule) + int(places[rest])
            last = phase + 1 == len(self._periods)
            if last or found < self._starts[phase + 1]:
                return found
        return None

    def epoch_length(self, sizes: Sequence[int], stop: str) -> int | None:
        """Samples of an epoch over datasets of these sizes, in sequences; None if the rule never ends it.

        first: before the first dataset would begin a second time. all: once every dataset has been seen whole. never: endless.
        """
        if stop == "never":
            return ENDLESS
        if stop == "first":
            ends = [self.sample(i, size) for i, size in enumerate(sizes)]
            return min((end for end in ends if end is not None), default=None)
        last = [self.sample(i, size - 1) for i, size in enumerate(sizes)]
        return None if None in last else 1 + max(end for end in last if end is not None)
