"""Waits of a loop: each moment belongs to one stage."""

from __future__ import annotations

import time

import pytest

from penstock.waits import LoopClock, Reporter
from penstock.wire.report import HEADER, Report


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    return clock


def blocked(loop: LoopClock, clock: Clock) -> None:
    loop.loop = 0.0, 0.0, clock.now, True
    loop.blocked.begin(clock.now)


def served(loop: LoopClock, clock: Clock) -> None:
    loop.blocked.end(clock.now)
    loop.loop = loop.wait_seconds, 0.0, None, False


def stages(loop: LoopClock) -> dict[str, float]:
    return {stage: seconds for stage, seconds in loop.wait_stages().items() if seconds}


def test_time_to_the_first_byte_is_divided_as_the_server_says(clock: Clock) -> None:
    loop = LoopClock()
    blocked(loop, clock)
    loop.enter("connect")
    clock.now = 1.0
    loop.enter("network")
    clock.now = 6.0
    loop.answered("tokenize;dur=3000, make;dur=1000")
    clock.now = 8.0
    loop.enter("client")
    clock.now = 8.5
    served(loop, clock)
    assert stages(loop) == {"connect": 1.0, "tokenize": 3.0, "make": 1.0, "network": 1.0, "receive": 2.0, "client": 0.5}


def test_server_that_worked_before_the_loop_waited_gets_its_share_of_the_wait(clock: Clock) -> None:
    loop = LoopClock()
    loop.enter("network")
    clock.now = 3.0
    blocked(loop, clock)
    clock.now = 4.0
    loop.answered("tokenize;dur=3000, make;dur=1000")
    served(loop, clock)
    assert stages(loop) == {"tokenize": 0.75, "make": 0.25}


def test_stages_of_a_thread_that_the_loop_does_not_wait_for_are_no_waits(clock: Clock) -> None:
    loop = LoopClock()
    for stage in ("connect", "network", "receive", "retry", "client"):
        loop.enter(stage)
        clock.now += 1.0
    assert stages(loop) == {}


def test_work_of_the_loop_on_its_tensors_is_the_client_stage(clock: Clock) -> None:
    loop = LoopClock()
    loop.enter("network")
    loop.loop = 0.0, 0.0, clock.now, True
    clock.now = 2.0
    assert stages(loop) == {"client": 2.0}


def test_amounts_are_reported_again_after_a_failure_and_once_otherwise(clock: Clock) -> None:
    total = Report(job="j", num_tokens=0)

    def look() -> Report:
        return total

    def tokens() -> int:
        report = Report.from_header(reporter.headers()[HEADER])
        assert report
        return report.num_tokens

    reporter = Reporter(LoopClock(), look)
    total = Report(job="j", num_tokens=5)
    assert tokens() == 5
    reporter.failed()
    total = Report(job="j", num_tokens=7)
    assert tokens() == 7
    reporter.answered("")
    total = Report(job="j", num_tokens=8)
    assert tokens() == 1
    assert tokens() == 0


def test_failed_request_that_was_sent_ahead_is_reported_again(clock: Clock) -> None:
    total = Report(job="j", num_tokens=0)
    reporter = Reporter(LoopClock(), lambda: total)

    def tokens() -> int:
        report = Report.from_header(reporter.headers()[HEADER])
        assert report
        return report.num_tokens

    total = Report(job="j", num_tokens=5)
    assert tokens() == 5
    total = Report(job="j", num_tokens=7)
    assert tokens() == 2  # sent ahead
    reporter.answered("")  # the first one
    reporter.failed()
    assert tokens() == 2
    reporter.answered("")
    assert tokens() == 0


def test_without_a_job_no_header_is_sent() -> None:
    assert Reporter().headers() == {}
