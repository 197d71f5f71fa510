"""A real server in a thread: readers that stall, and responses in progress when it stops."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock_server.api.admission import InFlight
from penstock_server.blocks.decode import RowGroupReader
from support import servers as in_thread
from support.corpora import write_numbered
from support.servers import slow_readers

RUN = "/v1/datasets/numbers/epochs/0/ranks/0/batches"
WIDE: dict[str, str | int] = {"batch_size": 8, "seq_len": 1 << 18}
STALLED_SECONDS = 1.0
STOP_SECONDS = 0.5


@contextmanager
def serving(folder: Path, in_flight: InFlight) -> Iterator[str]:
    write_numbered(folder / "data" / "numbers", 96)
    with in_thread.serving(
        folder / "data",
        folder / "cache",
        in_flight,
        stalled_seconds=STALLED_SECONDS,
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


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux disconnects it")
def test_stalled_reader_is_disconnected_and_its_memory_released(tmp_path: Path) -> None:
    in_flight = InFlight(1 << 30)
    with serving(tmp_path, in_flight) as url, slow_readers(1, url, RUN, WIDE) as reader:
        reader.wait_for_heads()
        assert in_flight.num_responses == 1
        reader.stop_reading()
        wait_until_empty(in_flight)


def test_slow_reader_stays_connected(tmp_path: Path) -> None:
    in_flight = InFlight(1 << 30)
    with serving(tmp_path, in_flight) as url:
        with slow_readers(1, url, RUN, WIDE, pause_seconds=0.1) as reader:
            reader.wait_for_heads()
            time.sleep(5 * STALLED_SECONDS)
            assert (in_flight.num_responses, reader.num_connected) == (1, 1)
        wait_until_empty(in_flight)


def test_stop_aborts_responses_without_logging_errors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, is_asked, is_over, read = threading.Event(), threading.Event(), threading.Event(), RowGroupReader.blocks

    def perhaps_hanging(*given: Any) -> Any:
        if hangs.is_set():
            is_asked.set()
            is_over.wait(60)
        return read(*given)

    monkeypatch.setattr(RowGroupReader, "blocks", perhaps_hanging)
    write_numbered(tmp_path / "data" / "others", 97)  # other content, which no block of numbers has
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
