"""Readers that take or say nothing are cut, and those that take little not, until the server stops: a real one, in a thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import in_thread
from corpora import write_numbered
from penstock_server.api.admission import InFlight
from penstock_server.blocks.decode import RowGroupReader
from penstock_server.serving import stalled as stalled_module
from slow import slow_readers

RUN = "/v1/datasets/numbers/epochs/0/ranks/0/batches"
WIDE: dict[str, str | int] = {"batch_size": 8, "seq_len": 1 << 18}
STALLED_SECONDS = 1.0
STOP_SECONDS = 0.5


@contextmanager
def serving(folder: Path, in_flight: InFlight, silent_seconds: float = 60.0) -> Iterator[str]:
    write_numbered(folder / "data" / "numbers", 96)
    with in_thread.serving(
        folder / "data",
        folder / "cache",
        in_flight,
        stalled_seconds=STALLED_SECONDS,
        silent_seconds=silent_seconds,
        stop_seconds=STOP_SECONDS,
    ) as address:
        yield address


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_until_empty(in_flight: InFlight) -> None:
    wait_until(lambda: not in_flight.num_responses)
    assert in_flight.reserved_bytes == 0


def test_a_reader_that_takes_nothing_is_cut_and_gives_back_what_it_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_flight = InFlight(1 << 30)
    with serving(tmp_path, in_flight) as url, slow_readers(1, url, RUN, WIDE) as reader:
        reader.wait_for_heads()
        assert in_flight.num_responses == 1
        reader.stop_reading()
        wait_until_empty(in_flight)
    assert "has read nothing for 1 seconds; its connection is cut" in caplog.text


def test_a_reader_that_takes_little_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    in_flight = InFlight(1 << 30)
    with serving(tmp_path, in_flight) as url:
        with slow_readers(1, url, RUN, WIDE, pause_seconds=0.1) as reader:
            reader.wait_for_heads()
            time.sleep(5 * STALLED_SECONDS)
            assert (in_flight.num_responses, reader.num_connected) == (1, 1)
        wait_until_empty(in_flight)
    assert "has read nothing" not in caplog.text


def test_who_sends_no_whole_request_is_cut_and_who_waits_for_an_answer_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked, is_over, read = threading.Event(), threading.Event(), RowGroupReader.blocks

    def hanging(*given: Any) -> Any:
        is_asked.set()
        is_over.wait(60)
        return read(*given)

    monkeypatch.setattr(RowGroupReader, "blocks", hanging)
    request = b"GET %s HTTP/1.1\r\nHost: here\r\n\r\n"
    with ExitStack() as opened:
        opened.callback(is_over.set)
        url = opened.enter_context(serving(tmp_path, InFlight(1 << 30), silent_seconds=0.5))

        def connected(sent: bytes) -> socket.socket:
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 30))
            connection.sendall(sent)
            return connection

        waiting = connected(request % f"{RUN}/0".encode())
        assert is_asked.wait(30)
        silent, begun, again = connected(b""), connected(b"GET /healthz HT"), connected(request % b"/healthz" + b"GET ")
        assert silent.recv(1) == begun.recv(1) == b""
        with again.makefile("rb") as answered:
            assert answered.read().startswith(b"HTTP/1.1 200 OK")
        is_over.set()
        assert waiting.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")


def test_who_asks_again_and_again_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    busy, silent = Mock(), Mock(cycle=None)
    for connection in (busy, silent):
        connection.transport.is_closing.return_value = False
    known = stalled_module._Silent()
    for now[0] in (0.0, 30.0, 60.0):
        busy.cycle = Mock(response_complete=True)  # another at each look
        known = stalled_module._close_silent([busy, silent], known, 60.0)
    assert not busy.transport.close.called
    assert silent.transport.close.called
    assert known.keys() == {busy}


def test_a_server_that_stops_cuts_what_is_under_way_and_says_nothing_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, is_asked, is_over, read = threading.Event(), threading.Event(), threading.Event(), RowGroupReader.blocks

    def perhaps_hanging(*given: Any) -> Any:
        if hangs.is_set():
            is_asked.set()
            is_over.wait(60)
        return read(*given)

    monkeypatch.setattr(RowGroupReader, "blocks", perhaps_hanging)
    write_numbered(tmp_path / "data" / "others", 96)
    with ExitStack() as readers:
        readers.callback(is_over.set)
        with serving(tmp_path, InFlight(1 << 30)) as url:
            in_mid_answer = readers.enter_context(slow_readers(1, url, RUN, WIDE, pause_seconds=0.1))
            in_mid_answer.wait_for_heads()
            hangs.set()
            waiting = readers.enter_context(slow_readers(1, url, RUN.replace("numbers", "others"), {}, pause_seconds=0.1))
            assert is_asked.wait(30)
        wait_until(lambda: not waiting.num_connected)  # the other still gets what the kernel has for it
        assert waiting.num_received == [0]
    assert not caplog.records
