"""The processes that one server consists of, as each is followed by another once it has died."""

from __future__ import annotations

import socket
import time
from typing import Any
from unittest.mock import Mock

import pytest

from penstock_server.processes import _Child


def child(seat: Any, *, is_alive: bool, lived_seconds: float, delay_seconds: float = 0.5) -> _Child:
    process = Mock(pid=7, exitcode=-9, is_alive=lambda: is_alive)
    return _Child(process, seat, time.monotonic() - lived_seconds, delay_seconds)


def test_a_process_that_dies_again_and_again_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def start(_settings: object, _listener: socket.socket, seat: str) -> _Child:
        started.append(seat)
        return child(seat, is_alive=True, lived_seconds=0)

    monkeypatch.setattr(_Child, "start", start)
    children = [
        child("dies soon", is_alive=False, lived_seconds=0, delay_seconds=8.0),
        child("was steady", is_alive=False, lived_seconds=3600),
        child("lives", is_alive=True, lived_seconds=3600),
    ]
    for _ in range(2):
        children = [one.followed(Mock(), Mock()) for one in children]
        assert started == ["was steady"]
    later = time.monotonic() + 8.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    children = [one.followed(Mock(), Mock()) for one in children]
    assert started == ["was steady", "dies soon"]
    assert [one.delay_seconds for one in children] == [16.0, 0.5, 0.5]
