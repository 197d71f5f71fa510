"""The results of a run: the figures of each loader, the ratios, the machine; to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from peers import OURS
from ratios import Ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One loader timed once. CPU is in seconds per token; the server's is None where there is none."""

    num_workers: int
    tokens_per_second: float
    trainer_cpu: float
    server_cpu: float | None
    first_batch_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Median, minimum and maximum of the samples with `num_workers` workers."""

    median: float
    low: float
    high: float
    num_workers: int


def _median(figure: Figure) -> float:
    return figure.median


@dataclass(kw_only=True, slots=True)
class Loader:
    """One loader: its setup, its order, its samples, and its failures."""

    key: str
    name: str
    versions: str
    reads: str
    shuffle: str
    ahead: str
    spread: float | None = None
    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def is_ours(self) -> bool:
        return self.key == OURS

    @property
    def tokens_per_second(self) -> Figure | None:
        """Tokens per second, with the fastest number of workers."""
        return max(self._figures(lambda sample: sample.tokens_per_second), key=_median, default=None)

    @property
    def trainer_cpu(self) -> Figure | None:
        """Seconds of trainer CPU per token, with the cheapest number of workers."""
        return min(self._figures(lambda sample: sample.trainer_cpu), key=_median, default=None)

    @property
    def server_cpu(self) -> Figure | None:
        """Seconds of server CPU per token, for loaders with a server."""
        return min(self._figures(lambda sample: sample.server_cpu), key=_median, default=None)

    @property
    def cpu(self) -> Figure | None:
        """Seconds of trainer and server CPU per token, with the cheapest number of workers."""
        return min(self._figures(lambda sample: sample.trainer_cpu + (sample.server_cpu or 0)), key=_median, default=None)

    @property
    def first_batch(self) -> Figure | None:
        """Seconds until the first batch, with the fastest number of workers."""
        return min(self._figures(lambda sample: sample.first_batch_seconds), key=_median, default=None)

    def _figures(self, value: Callable[[Sample], float | None]) -> Iterator[Figure]:
        for num_workers in sorted({sample.num_workers for sample in self.samples}):
            found = [value(sample) for sample in self.samples if sample.num_workers == num_workers]
            known = [each for each in found if each is not None]
            if known:
                yield Figure(median=median(known), low=min(known), high=max(known), num_workers=num_workers)


@dataclass(kw_only=True, slots=True)
class Results:
    """The results of a run. `settings` and `machine` are lines to print; `failures` are those of ratios and planning."""

    date: str
    command: str
    machine: list[str]
    settings: list[str]
    loaders: list[Loader] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    planning: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def by_speed(self) -> list[Loader]:
        """Return the loaders, fastest first, those without figures last."""
        return sorted(self.loaders, key=lambda loader: -(loader.tokens_per_second.median if loader.tokens_per_second else 0))

    def ours(self) -> Loader | None:
        """Return Penstock, if it was measured."""
        return next((loader for loader in self.loaders if loader.is_ours and loader.samples), None)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        """Return the results that `write` saved."""
        told: dict[str, Any] = json.loads(path.read_text())
        loaders = [
            Loader(**{**loader, "samples": [Sample(**sample) for sample in loader["samples"]]}) for loader in told["loaders"]
        ]
        return cls(**{**told, "loaders": loaders, "ratios": [Ratio(**ratio) for ratio in told["ratios"]]})
