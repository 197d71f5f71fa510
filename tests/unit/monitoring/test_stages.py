"""Clocks of the server's work, and waits for it."""

from __future__ import annotations

import time

import pytest

from penstock_server.monitoring.stages import SharedWait, StageClock


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    return clock


def test_each_second_is_in_one_stage(clock: Clock) -> None:
    work = StageClock("queue")
    clock.now = 1.0
    work.enter("decode")
    clock.now = 3.0
    assert (work.stage, work.seconds()) == ("decode", {"queue": 1.0, "decode": 2.0})
    work.enter("queue")
    clock.now = 6.0
    work.enter(None)
    clock.now = 60.0
    assert (work.stage, work.seconds()) == (None, {"queue": 4.0, "decode": 2.0})


def test_stage_ends_under_another_name(clock: Clock) -> None:
    work = StageClock("make")
    clock.now = 1.0
    work.end_as("index")
    assert work.seconds() == {"index": 1.0}


def test_wait_is_divided_in_proportion_to_the_work(clock: Clock) -> None:
    one, other = StageClock("decode"), StageClock("tokenize")
    clock.now = 5.0  # before the wait
    wait = SharedWait([one, other])
    clock.now = 6.0
    one.enter("tokenize")
    clock.now = 7.0
    one.enter(None)
    clock.now = 8.0
    assert wait.stages() == pytest.approx({"decode": 3 * 1 / 5, "tokenize": 3 * 4 / 5})


def test_wait_without_any_work_is_a_queue(clock: Clock) -> None:
    wait = SharedWait([StageClock()])
    clock.now = 2.0
    assert wait.stages() == {"queue": 2.0}
