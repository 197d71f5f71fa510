"""The client's log, whose lines name host and rank, and its progress line."""

from __future__ import annotations

import io
import logging
import os
import pty
import socket
import sys

import pytest

from penstock import RemoteDataset, ServerUnavailable, logs
from penstock.logs import StatusLine

AWAY = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs._process_name, "rank", None)


def connect(rank: int, world_size: int) -> None:
    with pytest.raises(ServerUnavailable):
        RemoteDataset(AWAY, "numbers", rank=rank, world_size=world_size, retry_seconds=0.05)


def processes(caplog: pytest.LogCaptureFixture) -> set[str]:
    """What stands before the text in the lines logged so far, which are cleared."""
    found = {record.getMessage().partition(": http")[0] for record in caplog.records if record.name == "penstock"}
    caplog.clear()
    return found


def test_log_line_names_the_host_and_the_rank_of_several(caplog: pytest.LogCaptureFixture) -> None:
    host = socket.gethostname()
    connect(0, 1)
    assert processes(caplog) == {f"penstock: on {host}"}
    connect(3, 8)
    assert processes(caplog) == {f"penstock: rank 3 on {host}"}


def test_dataset_of_one_rank_keeps_the_rank_in_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    """As an evaluation on one rank of a job makes it."""
    connect(3, 8)
    connect(0, 1)
    assert processes(caplog) == {f"penstock: rank 3 on {socket.gethostname()}"}


def test_log_line_with_percent_signs_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="penstock"):
        logs.log.warning("penstock: %s is %d%% full", "50%disk", 99)
    assert caplog.records[-1].getMessage() == f"penstock: on {socket.gethostname()}: 50%disk is 99% full"


def test_status_line_is_cut_to_the_terminal_and_cleared_where_it_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    reads, writes = pty.openpty()
    monkeypatch.setenv("COLUMNS", "10")
    with os.fdopen(writes, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        status = StatusLine()
        status.draw("0123456789 and more")
        monkeypatch.setattr(sys, "stderr", other := io.StringIO())
        status.clear()
        expected = b"\r012345678\x1b[K\r\x1b[K"
        seen = b""
        while len(seen) < len(expected):  # a read may give the line alone
            seen += os.read(reads, 1000)
        assert seen == expected
        assert other.getvalue() == ""
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "dumb")  # it would show the escape sequence
        assert not StatusLine().is_seen
    os.close(reads)


def test_status_line_is_not_drawn_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    status = StatusLine()
    status.draw("fox")
    status.clear()
    assert stream.getvalue() == ""
