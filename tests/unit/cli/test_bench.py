"""The arithmetic of `penstock bench`, on supplies whose speed is known."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from penstock.cli import bench
from penstock.cli.bench import Supply, measure
from penstock.spec import Spec


class Clock:
    """Replacement of the module time, whose time passes only in sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now / 4  # a quarter of a core

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(bench, "time", clock)
    return clock


def supply(clock: Clock, *seconds: float) -> Supply:
    """Batches of 1000 tokens, 250 positions of padding and 2000 bytes; these seconds pass before each, over and over."""
    made = 0

    def batches() -> Generator[int, None, None]:
        nonlocal made
        while True:
            clock.now += seconds[made % len(seconds)]
            made += 1
            yield made

    return Supply(
        spec=Spec(),
        num_steps=1,
        memory="",
        batches=batches(),
        count=lambda _: (1000, 1250),
        spent=lambda: (2000 * made, made // 10),
    )


def test_measure_divides_by_the_time_measured(clock: Clock) -> None:
    figures = measure(supply(clock, 0.125), 10)
    assert (figures.num_batches, figures.seconds) == (80, 10)
    assert (figures.tokens_per_second, figures.bytes_per_second) == (8000, 16000)
    assert figures.num_positions == 100_000
    assert figures.cpu_seconds_per_million_tokens == 2.5 / 80_000 * 1e6
    assert figures.num_retries == 8


def test_measure_leaves_out_what_came_before(clock: Clock) -> None:
    source = supply(clock, 0.125)
    for _ in range(30):
        next(source.batches)
    figures = measure(source, 1)
    assert (figures.num_batches, figures.num_bytes, figures.num_retries) == (8, 16_000, 0)


def test_measure_gives_percentiles_of_waits(clock: Clock) -> None:
    figures = measure(supply(clock, *[0.25] * 98, 2, 4), 30.5)
    assert figures.num_batches == 100
    assert (figures.waits["p50"], figures.waits["p99"], figures.waits["longest"]) == (0.25, 4, 4)
    assert figures.waits["share"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("seconds", "rate", "tokens_per_second", "share"),
    [(0.0, 4000, 4000, 0), (0.25, 4000, 2000, 0.5), (0.75, 4000, 1000, 0.75), (0.5, 1e12, 2000, 1)],
)
def test_measure_at_a_pace_gives_the_share_of_waiting(
    clock: Clock, seconds: float, rate: float, tokens_per_second: float, share: float
) -> None:
    figures = measure(supply(clock, seconds), 100, tokens_per_second=rate)
    assert figures.tokens_per_second == pytest.approx(tokens_per_second, rel=0.01)
    assert figures.waits["share"] == pytest.approx(share, abs=0.01)


def test_measure_at_a_pace_makes_up_for_long_sleeps(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "sleep", lambda seconds: setattr(clock, "now", clock.now + seconds + 0.03))
    figures = measure(supply(clock, 0.0), 100, tokens_per_second=10_000)
    assert figures.tokens_per_second == pytest.approx(10_000, rel=0.01)
