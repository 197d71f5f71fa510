"""The monitor's thread."""

from __future__ import annotations

import logging
import threading
from unittest.mock import Mock

import pytest

from penstock_server.monitoring import monitor
from penstock_server.monitoring.monitor import Monitor


def test_status_that_cannot_be_gathered_is_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks, ten_looks = list[int](), threading.Event()

    def look(_: Monitor) -> None:
        looks.append(0)
        if len(looks) > 1:
            if len(looks) > 10:
                ten_looks.set()
            raise FileNotFoundError("counter_0.db")  # the folder was removed

    monkeypatch.setattr(monitor, "_SECONDS", 0.001)
    monkeypatch.setattr(Monitor, "look", look)
    with caplog.at_level(logging.ERROR, "penstock.monitor"), Monitor(Mock(), Mock(), Mock()).running():
        assert ten_looks.wait(60)
    assert [record.message for record in caplog.records] == ["the status of this process cannot be gathered"]
