"""The processes that one server consists of, as each is followed by another once it has died."""

from __future__ import annotations

import errno
import socket
import time
from typing import Any
from unittest.mock import Mock

import pytest

from penstock_server.serving.accepting import WorkerSlot
from penstock_server.serving.processes import _Child, _how_it_ended


def child(seat: Any, *, is_alive: bool, lived_seconds: float, served: bool = True, delay_seconds: float = 0.5) -> _Child:
    process, now = Mock(pid=7, exitcode=-9, is_alive=lambda: is_alive), time.monotonic()
    if not isinstance(seat, WorkerSlot):
        seat = Mock(number=seat, told_at=now if served else 0.0)
    return _Child(process, seat, now - lived_seconds, delay_seconds)


def test_a_process_that_dies_again_and_again_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def start(_settings: object, _listener: socket.socket, seat: Any) -> _Child:
        started.append(seat.number)
        return child(seat.number, is_alive=True, lived_seconds=0)

    monkeypatch.setattr(_Child, "start", start)
    children = [
        child("dies soon", is_alive=False, lived_seconds=0, delay_seconds=12.0),
        child("was steady", is_alive=False, lived_seconds=3600),
        child("lives", is_alive=True, lived_seconds=3600),
    ]
    for _ in range(2):
        children = [one.followed(Mock(), Mock()) for one in children]
        assert started == ["was steady"]
    later = time.monotonic() + 12.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    children = [one.followed(Mock(), Mock()) for one in children]
    assert started == ["was steady", "dies soon"]
    assert [one.delay_seconds for one in children] == [16.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("lived_seconds", "served", "is_immediate"),
    [(8.0, True, True), (2.0, True, False), (60.0, False, False)],
    ids=["served for a while", "served for a moment", "never served"],
)
def test_worker_that_served_for_a_while_is_replaced_immediately(
    lived_seconds: float, served: bool, is_immediate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kill of a worker that serves would else double the delay, until no worker is left for many seconds."""
    start = Mock(return_value=child("replacement", is_alive=True, lived_seconds=0))
    monkeypatch.setattr(_Child, "start", start)
    dead = child("killed", is_alive=False, lived_seconds=lived_seconds, served=served, delay_seconds=8.0)
    dead.followed(Mock(), Mock())
    assert bool(start.call_count) is is_immediate


def test_where_no_process_can_be_started_it_is_tried_again_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    again = child("seat", is_alive=True, lived_seconds=0)
    start = Mock(side_effect=[BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), again])
    monkeypatch.setattr(_Child, "start", start)
    one = child("seat", is_alive=False, lived_seconds=3600)
    for _ in range(3):
        one = one.followed(Mock(), Mock())
        assert start.call_count == 1
    later = time.monotonic() + 0.5
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert one.followed(Mock(), Mock()).process is again.process


@pytest.mark.parametrize(
    ("exit_code", "said"),
    [
        (0, "ended with status 0"),
        (3, "ended with status 3"),
        (-11, "was ended by SIGSEGV"),
        (-9, "was ended by SIGKILL, as the kernel does where memory runs out"),
        (-99, "was ended by signal 99"),
    ],
)
def test_the_log_names_the_signal_that_ended_a_process(exit_code: int, said: str) -> None:
    assert _how_it_ended(exit_code) == said


def test_the_log_tells_once_that_a_process_hangs_and_that_it_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def at(seconds: float) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: began + seconds)

    began = time.monotonic()
    [seat] = WorkerSlot.of(1)
    at(-100)
    seat.tell(5)  # the process whose place it took
    at(0)
    one = child(seat, is_alive=True, lived_seconds=0)
    at(60)
    one = one.watched()  # it has not begun to serve
    seat.tell(1)
    at(69)
    one = one.watched()
    assert not caplog.text
    for seconds in (71, 90):
        at(seconds)
        one = one.watched()
    assert caplog.text.count("server process 7 hangs, or was stopped: it has done nothing for 10 seconds") == 1
    seat.tell(1)
    one = one.watched().watched()
    assert caplog.text.count("server process 7 is back") == 1
    at(200)
    one.watched()
    assert caplog.text.count("hangs, or was stopped") == 2
    caplog.clear()
    seat.leave()  # as one that is to stop
    one.watched()
    assert not caplog.text
