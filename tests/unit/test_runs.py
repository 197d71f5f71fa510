import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle
from typing import cast

import pytest

import penstock.feeding.ranges
from penstock.feeding.ranges import OBJECT_BYTES, fetch_ahead, fetch_runs
from penstock.source import Source
from penstock.spec import Spec
from penstock.transport.transport import Transport
from penstock.wire import Frame

KIB = 1 << 10
TARGET = 16 * (KIB + OBJECT_BYTES)


@dataclass(frozen=True, slots=True)
class Step:
    """As much of a frame as runs look at."""

    number: int
    nbytes: int = KIB


def frames(steps: range, then: range = range(0), *, nbytes: int = KIB) -> list[Frame]:
    return [cast(Frame, Step(step, nbytes)) for step in steps]


def test_the_first_frame_comes_alone_and_runs_grow_to_a_few_bytes() -> None:
    steps = range(3, 500, 7)
    runs = list(fetch_runs(frames, steps, TARGET))
    assert [len(run) for run in runs] == [1, 1, 2, 4, 8, 16, 16, 16, 7]
    assert [frame for run in runs for frame in run] == frames(steps)


def test_a_run_has_one_frame_at_least_however_large() -> None:
    large = partial(frames, nbytes=64 * KIB)
    assert [len(run) for run in fetch_runs(large, range(4), TARGET)] == [1] * 4
    assert [len(run) for run in fetch_runs(frames, range(3), 0)] == [1] * 3
    assert list(fetch_runs(frames, range(0), KIB)) == []


@dataclass
class Clock:
    """Time as it is told to go on."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(penstock.feeding.ranges, "time", clock)
    return clock


def test_on_a_slow_way_runs_are_as_large_as_comes_in_half_a_second_and_grow_again_once_it_is_fast(clock: Clock) -> None:
    def fetch(steps: range, then: range) -> list[Frame]:
        clock.now += len(steps) * (0.12 if steps[0] < 100 else 0.001)
        return frames(steps)

    runs = [len(run) for run in fetch_runs(fetch, range(400), TARGET)]
    assert runs[:6] == [1, 1, 2, 4, 4, 4]
    assert max(runs[: runs.index(16)]) < 16
    assert runs[-2] == 16


def test_on_a_long_way_where_a_large_run_takes_no_longer_than_a_small_one_runs_grow_all_the_same(clock: Clock) -> None:
    def fetch(steps: range, then: range) -> list[Frame]:
        clock.now += 1.0 if steps[0] else 2.0  # with the time to connect
        return frames(steps)

    assert [len(run) for run in fetch_runs(fetch, range(100), TARGET)][:8] == [1, 1, 2, 4, 8, 16, 16, 16]


def test_a_first_batch_for_which_the_server_made_its_block_is_not_taken_for_a_long_way(clock: Clock) -> None:
    def fetch(steps: range, then: range) -> list[Frame]:
        clock.now += len(steps) * 0.12 + (0 if steps[0] else 5.0)
        return frames(steps)

    runs = [len(run) for run in fetch_runs(fetch, range(100), TARGET)]
    assert runs[:4] == [1, 1, 2, 4]
    assert set(runs[4:-1]) <= {5, 6}


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("seconds", [0.3, 0.45, 0.6, 2.0])
def test_a_way_that_becomes_long_after_the_first_batch_leaves_runs_large(
    clock: Clock, seconds: float, *, is_ahead: bool
) -> None:
    """Also where what was asked for ahead is there at once."""
    took = chain([0.01], cycle([0.0, 2 * seconds] if is_ahead else [seconds]))

    def fetch(steps: range, then: range) -> list[Frame]:
        clock.now += next(took)
        return frames(steps)

    assert len(list(fetch_runs(fetch, range(1_000), TARGET))) < 1_000 // 16 + 20


def test_a_long_way_that_is_a_short_one_now_and_then_leaves_runs_large(clock: Clock) -> None:
    took = cycle([1.5, 0.2, 1.5, 1.5, 0.2, 0.2, 1.5])

    def fetch(steps: range, then: range) -> list[Frame]:
        clock.now += next(took)
        return frames(steps)

    assert {len(run) for run in list(fetch_runs(fetch, range(400), TARGET))[10:-1]} == {16}


def test_what_is_fetched_next_is_known_before() -> None:
    asked: list[tuple[range, range]] = []

    def fetch(steps: range, then: range) -> list[Frame]:
        asked.append((steps, then))
        return frames(steps)

    list(fetch_runs(fetch, range(3, 500, 7), TARGET))
    assert [then for _, then in asked] == [*(steps for steps, _ in asked[1:]), range(500, 500, 7)]


class Asked:
    """A source, and a transport, that notes what it was asked for, and what it was told would follow."""

    def __init__(self, nbytes: int = KIB) -> None:
        self.steps: list[tuple[range, range]] = []
        self.is_interrupted = False
        self._nbytes = nbytes

    def frames(self, _transport: Transport, _spec: Spec, _epoch: int, steps: range, then: range) -> list[Frame]:
        time.sleep(0.002)  # as any answer takes
        self.steps.append((steps, then))
        return frames(steps, nbytes=self._nbytes)

    def interrupt(self) -> None:
        self.is_interrupted = True


def test_who_has_little_in_hand_asks_for_two_runs_at_a_time_and_who_has_enough_for_one() -> None:
    asked = Asked()
    with closing(fetch_ahead(cast(Source, asked), cast(Transport, asked), Spec(), 0, range(10_000), 4 * TARGET)) as ahead:
        for turn in range(2):
            while ahead.buffered_bytes < 4 * TARGET:
                time.sleep(0.001)
            assert not asked.steps[-1][1]  # nobody takes anything
            begun = len(asked.steps)
            assert [cast(Step, next(ahead)).number for _ in range(500)] == list(range(500 * turn, 500 * turn + 500))
            assert any(then for _, then in asked.steps[begun:])
        assert asked.steps[0] == (range(1), range(1, 2))
        assert not asked.is_interrupted
    assert asked.is_interrupted


def test_a_run_is_a_few_mib_however_large_the_budget() -> None:
    asked = Asked(1 << 20)
    with closing(fetch_ahead(cast(Source, asked), cast(Transport, asked), Spec(), 0, range(64), 1 << 40)) as ahead:
        assert len(list(ahead)) == 64
    assert max(len(steps) for steps, _ in asked.steps) == 7


def test_a_fetch_may_give_less_than_it_was_asked_for() -> None:
    asked: list[int] = []

    def fetch(steps: range, then: range) -> list[Frame]:
        asked.append(len(steps))
        return frames(steps[: 1 if len(asked) == 5 else None])

    runs = list(fetch_runs(fetch, range(40), TARGET))
    assert [frame for run in runs for frame in run] == frames(range(40))
    assert asked[:8] == [1, 1, 2, 4, 8, 1, 1, 2]  # and it begins small again
