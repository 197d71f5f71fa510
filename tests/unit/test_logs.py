"""The client's log: lines of several ranks in one file can be told apart."""

from __future__ import annotations

import logging
import socket

import pytest

from penstock import RemoteDataset, ServerUnavailable, logs

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
