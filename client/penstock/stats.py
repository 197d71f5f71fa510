"""Statistics of a training loop: what it got, and how long it waited for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from operator import add, sub
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.iteration import BatchIterator


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Statistics of the iterations of this process.

    num_batches      batches that the loop got
    num_tokens       tokens in them, without padding
    num_bytes        bytes fetched, batches ahead of the loop included
    num_retries      failed fetches; others follow until retry_seconds have passed
    num_corrupted    failed fetches whose response arrived, but was damaged or for another request
    wait_seconds     time that the loop waited for batches, a current wait included
    compute_seconds  time that the loop worked with batches, each until its request for the next
    buffered_bytes   host memory of batches that are ready and wait for the loop, as they were received
    wait_stages      wait_seconds by what the loop waited for, such as "network" or "tokenize"; see penstock.wire.report
    """

    num_batches: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_retries: int = 0
    num_corrupted: int = 0
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    buffered_bytes: int = 0
    wait_stages: Mapping[str, float] = field(default_factory=dict)

    @property
    def wait_fraction(self) -> float:
        """Fraction of its time that the loop waited for batches, from 0 to 1."""
        return self.wait_seconds / (self.wait_seconds + self.compute_seconds) if self.wait_seconds else 0.0

    def __repr__(self) -> str:
        amounts = (f"{name}={getattr(self, name):{',.2f' if type_ == 'float' else ','}}" for name, type_ in _AMOUNTS.items())
        stages = f"wait_stages={{{', '.join(f'{stage}: {s:,.2f}' for stage, s in self.wait_stages.items() if s)}}}"
        return f"Stats(wait_fraction={self.wait_fraction:.1%}, {', '.join(amounts)}, {stages})"

    def __add__(self, other: Stats) -> Stats:
        return self._with(other, add)

    def __sub__(self, other: Stats) -> Stats:
        return self._with(other, sub)

    def _with(self, other: Stats, join: Callable[[Any, Any], Any]) -> Stats:
        stages = {**self.wait_stages, **other.wait_stages}
        return Stats(
            **{name: join(getattr(self, name), getattr(other, name)) for name in _AMOUNTS},
            wait_stages={stage: join(self.wait_stages.get(stage, 0.0), other.wait_stages.get(stage, 0.0)) for stage in stages},
        )


_AMOUNTS = {f.name: f.type for f in fields(Stats) if f.name != "wait_stages"}


class StatsAggregator:
    """Sum of the statistics of running iterators and of ended ones. A pickled or copied aggregator has no iterators."""

    def __init__(self) -> None:
        # (sum of the ended ones, running iterators). One tuple: a thread that reads must not count an iterator twice.
        self._counted: tuple[Stats, tuple[BatchIterator, ...]] = (Stats(), ())

    @contextmanager
    def counting(self, iterator: BatchIterator) -> Iterator[None]:
        """Count an iterator, and close it at the end of the block."""
        ended, running = self._counted
        self._counted = ended, (*running, iterator)
        try:
            yield
        finally:
            if not iterator.is_left:  # at an exit the functions called here may be gone
                iterator.close()
                last = replace(iterator.stats(), buffered_bytes=0)
                ended, running = self._counted
                self._counted = ended + last, tuple(other for other in running if other is not iterator)

    def total(self) -> Stats:
        """Return the current statistics of all iterators together."""
        ended, running = self._counted
        return sum((iterator.stats() for iterator in running), ended)

    def __getstate__(self) -> dict[str, Any]:
        """Return only the statistics: the threads of an iterator stay in this process."""
        return {"_counted": (replace(self.total(), buffered_bytes=0), ())}
