"""Readers that take nothing are cut, and those that take little are not, until the server stops: a real one, in a thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from corpora import write_numbered
from penstock_server.app import create_app
from penstock_server.datasets.catalog import open_catalog
from penstock_server.inflight import InFlight
from penstock_server.serve import Server
from penstock_server.storage.blocks import Blocks, EncodedBlocks
from penstock_server.storage.cache import CacheFolder
from penstock_server.storage.store import BlockStore
from slow import slow_readers

RUN = "/v1/datasets/numbers/epochs/0/ranks/0/batches"
WIDE: dict[str, str | int] = {"batch_size": 8, "seq_len": 1 << 18}
STALLED_SECONDS = 1.0
STOP_SECONDS = 0.5


@contextmanager
def serving(folder: Path, in_flight: InFlight) -> Iterator[str]:
    write_numbered(folder / "data" / "numbers", 96)
    store = BlockStore(CacheFolder(folder / "cache"))
    app = create_app(open_catalog(folder / "data", None, store), in_flight)
    server = Server(app, stalled_seconds=STALLED_SECONDS, stop_seconds=STOP_SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            store.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_until_empty(in_flight: InFlight) -> None:
    wait_until(lambda: not in_flight.num_holds)
    assert in_flight.held_bytes == 0


def test_a_reader_that_takes_nothing_is_cut_and_gives_back_what_it_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_flight = InFlight(1 << 30)
    with serving(tmp_path, in_flight) as url, slow_readers(1, url, RUN, WIDE) as reader:
        reader.wait_for_heads()
        assert in_flight.num_holds == 1
        reader.stop_reading()
        wait_until_empty(in_flight)
    assert "has read nothing for 1 seconds; its connection is cut" in caplog.text


def test_a_reader_that_takes_little_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    in_flight = InFlight(1 << 30)
    with serving(tmp_path, in_flight) as url:
        with slow_readers(1, url, RUN, WIDE, pause_seconds=0.1) as reader:
            reader.wait_for_heads()
            time.sleep(5 * STALLED_SECONDS)
            assert (in_flight.num_holds, reader.num_connected) == (1, 1)
        wait_until_empty(in_flight)
    assert "has read nothing" not in caplog.text


def test_a_server_that_stops_cuts_what_is_under_way_and_says_nothing_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, is_asked, is_over, read = threading.Event(), threading.Event(), threading.Event(), Blocks._read

    def perhaps_hanging(*given: Any) -> EncodedBlocks:
        if hangs.is_set():
            is_asked.set()
            is_over.wait(60)
        return read(*given)

    monkeypatch.setattr(Blocks, "_read", perhaps_hanging)
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
