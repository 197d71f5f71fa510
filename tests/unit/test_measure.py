"""The arithmetic of `penstock bench`, on supplies whose speed is known."""

from __future__ import annotations

from collections.abc import Generator

import pytest

import penstock.commands.measure
from penstock.commands.measure import measure
from penstock.commands.supply import Count, Supply
from penstock.spec import Spec


class Clock:
    """Time that passes only when somebody sleeps; stands in for the module time."""

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
    monkeypatch.setattr(penstock.commands.measure, "time", clock)
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
        makes_tensors=True,
        batches=batches(),
        count=lambda _: Count(num_tokens=1000, num_positions=1250),
        num_bytes=lambda: 2000 * made,
        num_retries=lambda: made // 10,
    )


def test_rates_are_over_the_time_measured(clock: Clock) -> None:
    figures = measure(supply(clock, 0.125), 10, lambda *_: None)
    assert (figures.num_batches, figures.seconds) == (80, 10)
    assert (figures.tokens_per_second, figures.bytes_per_second) == (8000, 16000)
    assert figures.num_positions == 100_000
    assert figures.cpu_seconds_per_million_tokens == 2.5 / 80_000 * 1e6
    assert figures.num_retries == 8


def test_what_came_before_is_not_counted(clock: Clock) -> None:
    source = supply(clock, 0.125)
    for _ in range(30):
        next(source.batches)
    figures = measure(source, 1, lambda *_: None)
    assert (figures.num_batches, figures.num_bytes, figures.num_retries) == (8, 16_000, 0)


def test_waits_are_told_by_percentiles(clock: Clock) -> None:
    figures = measure(supply(clock, *[0.25] * 98, 2, 4), 30.5, lambda *_: None)
    assert figures.num_batches == 100
    assert (figures.waits.p50, figures.waits.p99, figures.waits.longest) == (0.25, 4, 4)
    assert figures.waits.share == pytest.approx(1)


@pytest.mark.parametrize(
    ("seconds", "rate", "tokens_per_second", "share"),
    [(0.0, 4000, 4000, 0), (0.25, 4000, 2000, 0.5), (0.75, 4000, 1000, 0.75), (0.5, 1e12, 2000, 1)],
)
def test_a_model_of_some_speed_waits_for_its_share(
    clock: Clock, seconds: float, rate: float, tokens_per_second: float, share: float
) -> None:
    """A supply that fetches only while it is asked: both times add up."""
    figures = measure(supply(clock, seconds), 100, lambda *_: None, tokens_per_second=rate)
    assert figures.tokens_per_second == pytest.approx(tokens_per_second, rel=0.01)
    assert figures.waits.share == pytest.approx(share, abs=0.01)


def test_a_sleep_that_takes_too_long_does_not_make_the_model_slower(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "sleep", lambda seconds: setattr(clock, "now", clock.now + seconds + 0.03))
    figures = measure(supply(clock, 0.0), 100, lambda *_: None, tokens_per_second=10_000)
    assert figures.tokens_per_second == pytest.approx(10_000, rel=0.01)


def test_progress_is_told_a_few_times_a_second(clock: Clock) -> None:
    told: list[tuple[float, int, int]] = []
    measure(supply(clock, 0.125), 1, lambda *progress: told.append(progress))
    assert told == [(0.25, 2000, 4000), (0.5, 4000, 8000), (0.75, 6000, 12_000), (1.0, 8000, 16_000)]
