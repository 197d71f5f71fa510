"""The supervisor replaces workers that die."""

from __future__ import annotations

import errno
import time
from unittest.mock import Mock

import pytest

from penstock_server.serving import workers
from penstock_server.serving.workers import ServerProcess, ending


class Clock:
    """Time that passes when a test says so."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    return clock


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """All processes that the supervisor starts."""
    process = Mock(pid=7, exitcode=-9)
    monkeypatch.setattr(workers, "_context", Mock(**{"Process.return_value": process}))
    return process


def test_worker_that_dies_young_is_replaced_after_a_growing_delay(clock: Clock, process: Mock) -> None:
    worker = ServerProcess(Mock(), Mock(), Mock())
    process.is_alive.return_value = False
    for number, delay in enumerate([0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 16.0], 1):
        worker.check()
        clock.now += delay - 0.1
        worker.check()
        assert process.start.call_count == number
        clock.now += 0.2
        worker.check()
        assert process.start.call_count == number + 1


def test_worker_that_lived_for_a_while_is_replaced_immediately(clock: Clock, process: Mock) -> None:
    worker = ServerProcess(Mock(), Mock(), Mock())
    process.is_alive.return_value = False
    clock.now += 6.0
    worker.check()
    assert process.start.call_count == 2
    assert not worker.due_at


def test_worker_that_cannot_be_started_is_tried_again(clock: Clock, process: Mock) -> None:
    worker = ServerProcess(Mock(), Mock(), Mock())
    process.is_alive.return_value = False
    clock.now += 6.0
    process.start.side_effect = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    worker.check()
    process.start.side_effect = None
    clock.now += 0.6
    worker.check()
    assert process.start.call_count == 3
    assert not worker.due_at


@pytest.mark.parametrize(
    ("exit_code", "text"),
    [
        (3, "ended with status 3"),
        (-11, "was ended by SIGSEGV"),
        (-9, "was ended by SIGKILL (the kernel sends it when memory runs out)"),
        (-99, "was ended by signal 99"),
    ],
)
def test_ending_names_the_signal(exit_code: int, text: str) -> None:
    assert ending(exit_code) == text
