"""Comparison with a server: whether it still returns a run's batches, and which rows the missing batches hold."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.audit.reading import IntArray, read_ledger
from penstock.audit.report import Report
from penstock.client import Client, Steps
from penstock.errors import DataError, OutOfRange, SnapshotGone, UnknownDataset
from penstock.ledger.begin import Begin

_RETRY_SECONDS = 30.0
_STEPS_AT_ONCE = 16
_MAX_BATCHES_SHOWN = 20
_REFUSALS = (OutOfRange, DataError, SnapshotGone, UnknownDataset)


@dataclass(frozen=True, slots=True)
class Differing:
    """A batch that the server now returns with other content; `now` is its digest, or the reason of a refusal."""

    dataset: str
    epoch: int
    rank: int
    step: int
    then: str
    now: str
    is_refused: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """Number of batches that were requested again, and those that differ."""

    num_batches: int
    differing: list[Differing]


def compare(paths: Sequence[Path], num_batches: int, servers: Sequence[str], sample: int | None) -> Comparison:
    """Request the batches in ledgers again: all of them, or a random `sample` of `num_batches`.

    Raises ServerUnavailable: no server answers. Raises LedgerError: see read_ledger.
    """
    size = num_batches if sample is None else min(sample, num_batches)
    chosen = np.array(sorted(random.sample(range(num_batches), size)), np.int64)
    count = 0
    differing: list[Differing] = []
    for begin, digests in _runs(paths, chosen):
        count += len(digests)
        differing += _differing(begin, digests, servers)
    return Comparison(count, differing)


def num_missing_batches(report: Report) -> int:
    """Count the batches without a record, although the run continued after them."""
    return sum(len(gap.steps) * len(gap.ranks) for epoch in report.epochs for gap in epoch.gaps)


def rows_of_missing(report: Report, servers: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the first missing batches: each one's name, and its provenance from the server, or the reason of a refusal.

    If there are several orders of samples, the name contains the number of the order.

    Raises ServerUnavailable: no server answers.
    """
    gaps = [(number, gap) for number, order in enumerate(report.orders, 1) for epoch in order.epochs for gap in epoch.gaps]
    batches = ((number, gap, rank, step) for number, gap in gaps for step in gap.steps for rank in gap.ranks)
    for (number, gap, rank, step), _ in zip(batches, range(_MAX_BATCHES_SHOWN), strict=False):
        begin = gap.segment.begin
        client = _client(begin, servers, rank)
        with closing(client.connect(first_contact=True)) as transport:
            of_order = f"order {number} ({begin.dataset}), " if len(report.orders) > 1 else ""
            name = f"{of_order}epoch {gap.segment.epoch}, step {step:,} of start {gap.segment.start.number}, rank {rank}"
            try:
                yield name, client.provenance(transport, begin.spec, gap.segment.epoch, step)
            except _REFUSALS as error:
                yield name, {"reason": str(error)}


def _runs(paths: Sequence[Path], chosen: IntArray) -> Iterator[tuple[Begin, dict[int, str]]]:
    """Yield digests of consecutive steps, a few at a time; of the chosen batches, by their number in all ledgers together."""
    first = 0
    for path in paths:
        for section in read_ledger(path).sections:
            stop = first + len(section.steps)
            numbers = chosen[(first <= chosen) & (chosen < stop)] - first
            first = stop
            digests: dict[int, str] = {}
            for number in numbers.tolist():
                step = int(section.steps[number])
                if digests and (step - 1 not in digests or len(digests) == _STEPS_AT_ONCE):
                    yield section.begin, digests
                    digests = {}
                digests[step] = f"{int(section.digests[number]):016x}"
            if digests:
                yield section.begin, digests


def _differing(begin: Begin, digests: dict[int, str], servers: Sequence[str]) -> Iterator[Differing]:
    client = _client(begin, servers, begin.rank)
    with closing(client.connect(first_contact=True)) as transport:
        steps = range(min(digests), max(digests) + 1)
        while steps:
            is_refused = True
            try:
                frames = client.frames(transport, Steps(begin.spec, begin.epoch, steps))
                found, is_refused = {frame.step: frame.digest for frame in frames}, False
            except DataError as error:  # of the first step, and perhaps of no other
                found = {steps[0]: str(error)}
            except _REFUSALS as error:
                found = dict.fromkeys(steps, str(error))
            for step, now in found.items():
                if now != digests[step]:
                    yield Differing(begin.dataset, begin.epoch, begin.rank, step, digests[step], now, is_refused)
            steps = steps[len(found) :]


def _client(begin: Begin, servers: Sequence[str], rank: int) -> Client:
    return Client(servers, begin.dataset, rank=rank, retry_seconds=_RETRY_SECONDS)
