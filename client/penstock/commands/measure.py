"""Measuring a supply of batches: as fast as it goes, or at the pace of a model."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from penstock.commands.supply import Supply

Tick = Callable[[float, int, int], None]  # takes the seconds, tokens and bytes so far

_TICK_SECONDS = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """How long the loop waited for a batch: percentiles and the longest, in seconds; `share` is of the time measured."""

    p50: float
    p99: float
    longest: float
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What was measured in `seconds`; `cpu_seconds` are those of this process, all threads together."""

    seconds: float
    cpu_seconds: float
    num_batches: int
    num_tokens: int
    num_positions: int
    num_bytes: int
    num_retries: int
    waits: Waits

    @property
    def tokens_per_second(self) -> float:
        """Tokens, without padding."""
        return self.num_tokens / self.seconds

    @property
    def bytes_per_second(self) -> float:
        """What came over the wire."""
        return self.num_bytes / self.seconds

    @property
    def cpu_seconds_per_million_tokens(self) -> float:
        """What a million tokens cost this machine."""
        return self.cpu_seconds / max(self.num_tokens, 1) * 1e6


def measure(supply: Supply, seconds: float, tick: Tick, *, tokens_per_second: float | None = None) -> Figures:
    """Pull batches for `seconds`, at least one.

    With `tokens_per_second` the loop spends time on each batch, as a model of that speed does; otherwise it requests the next
    one at once. Raises what the supply raises.
    """
    waits = array("d")
    num_tokens = num_positions = 0
    bytes_before, retries_before, cpu_before = supply.num_bytes(), supply.num_retries(), time.process_time()
    began = asked = busy_until = ticked = time.perf_counter()
    while asked < began + seconds:
        batch = next(supply.batches)
        got = time.perf_counter()
        waits.append(got - asked)
        counted = supply.count(batch)
        num_tokens += counted.num_tokens
        num_positions += counted.num_positions
        if tokens_per_second:
            # Counted from when the last one was done: what a sleep takes too long must not make the model look slower.
            busy_until += got - asked + counted.num_tokens / tokens_per_second
            time.sleep(max(0.0, busy_until - time.perf_counter()))
        asked = time.perf_counter()
        if asked - ticked >= _TICK_SECONDS:
            ticked = asked
            tick(asked - began, num_tokens, supply.num_bytes() - bytes_before)
    return Figures(
        seconds=asked - began,
        cpu_seconds=time.process_time() - cpu_before,
        num_batches=len(waits),
        num_tokens=num_tokens,
        num_positions=num_positions,
        num_bytes=supply.num_bytes() - bytes_before,
        num_retries=supply.num_retries() - retries_before,
        waits=_waits(waits, asked - began),
    )


def _waits(waits: array[float], seconds: float) -> Waits:
    ordered = sorted(waits) or [0.0]
    p50, p99 = (ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] for percent in (50, 99))
    return Waits(p50=p50, p99=p99, longest=ordered[-1], share=sum(ordered) / max(seconds, 1e-9))
