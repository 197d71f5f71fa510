"""Ledgers on disks that are full, fail, hang or lose them."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ledger_files import SPEC, book, digest, entries, fails_with, open_at, open_files, record
from ledgers import behind, round_at
from penstock import LedgerError
from penstock.audit.reading import read_ledger
from penstock.distributed import Worker
from penstock.ledger import file as file_module
from penstock.ledger import recorder as book_module

FREES_THE_DISK = """
import os, sys
from penstock import Spec
from penstock.ledger.recorder import Recorder
from penstock.state.progress import Progress
progress = Progress(9)
ledger = Recorder(sys.argv[1], "numbers", 0).open(Spec(snapshot="abc"), 9, progress.begin(None), progress)
def fail(*_):
    raise OSError(28, "No space left")
write, os.write = os.write, fail
ledger.record(0, "0123456789abcdef")
ledger.close()
os.write = write
"""


def test_a_close_that_fails_is_told_and_leaves_no_number_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, close = tmp_path / "run.ledger", os.close
    data = book(path)
    ledger = data.open(SPEC, 1000, round_at(), behind(0))

    def fail(fd: int) -> None:
        close(fd)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as over:
        over.setattr(os, "close", fail)
        ledger.close()
    assert "run.ledger cannot be written: Disk quota exceeded" in caplog.text
    with (tmp_path / "checkpoint.pt").open("wb"):  # which has the number now
        ledger = data.open(SPEC, 1000, round_at(epoch=1, is_first=False), behind(1))
        record(ledger, 0)
        ledger.close()
    assert (tmp_path / "checkpoint.pt").read_bytes() == b""
    assert entries(read_ledger(path)) == [(0, digest(0))]


@pytest.mark.parametrize("nbytes", [0, 3, 700, 800])
def test_a_ledger_that_is_cut_off_goes_on_with_a_begin_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, nbytes: int
) -> None:
    """As by logrotate with copytruncate."""
    path, copied = tmp_path / "run.ledger", tmp_path / "run.ledger.1"
    ledger = open_at(path)
    record(ledger, *range(20))
    copied.write_bytes(path.read_bytes())
    os.truncate(path, nbytes)
    record(ledger, 20, 21)
    ledger.close()
    assert [s for s, _ in entries(read_ledger(path))][-2:] == [20, 21]
    assert caplog.text.count("was cut off while it was written") == 1
    open_at(path, epoch=1).close()
    steps = {s for one in (copied, path) for s, _ in entries(read_ledger(one))}
    assert steps == set(range(22))


def test_a_ledger_that_a_shared_file_system_has_lost_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, fstat = tmp_path / "run.ledger", os.fstat
    ledger = open_at(path)

    def stale(fd: int) -> os.stat_result:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as away:
        away.setattr(os, "write", fails_with(errno.ESTALE, after_bytes=60))
        record(ledger, 0, 1, 2)
        away.setattr(os, "fstat", stale)
        path.unlink()
        ledger._file.sync()
        away.setattr(os, "fstat", fstat)
    record(ledger, 3)
    ledger.close()
    assert "was deleted while it was written" in caplog.text
    reading = read_ledger(path)
    assert (entries(reading)[-3:], reading.damages) == ([(step, digest(step)) for step in (1, 2, 3)], [])


def test_what_an_iteration_could_not_write_is_written_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.ledger"
    data = book(path)
    data.open(SPEC, 1000, round_at(), behind(0)).close()
    with monkeypatch.context() as full:
        full.setattr(os, "write", fails_with(errno.ENOSPC, after_bytes=1000))
        for epoch in (1, 2):
            ledger = data.open(SPEC, 1000, round_at(epoch=epoch, is_first=False), behind(epoch))
            record(ledger, *range(9))
            ledger.finish()
            ledger.close()
    assert open_files(tmp_path) == []
    assert f"lines are not in the ledger {path}. They wait for another iteration" in caplog.text
    data.open(SPEC, 1000, round_at(epoch=3, is_first=False), behind(3)).close()
    reading = read_ledger(path)
    assert [(part.begin.epoch, len(part.steps), part.has_end) for part in reading.parts] == [
        (0, 0, False), (1, 9, True), (2, 9, True), (3, 0, False),
    ]  # fmt: skip
    assert all(damage.is_torn for damage in reading.damages)
    assert open_files(tmp_path) == []


def test_what_waits_is_written_at_the_exit_if_not_before(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    done = subprocess.run([sys.executable, "-c", FREES_THE_DISK, path], stderr=subprocess.PIPE, text=True, check=True)
    assert "1 lines are not in the ledger" in done.stderr
    assert entries(read_ledger(path)) == [(0, "0123456789abcdef")]


def test_a_ledger_that_is_deleted_is_told_of_and_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(book_module, "_SYNC_SECONDS", 0.01)
    path = tmp_path / "run.ledger"
    ledger = open_at(path)
    record(ledger, 0)
    path.unlink()
    deadline = time.monotonic() + 30
    while "was deleted" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    record(ledger, 1)
    ledger.close()
    assert entries(read_ledger(path)) == [(1, digest(1))]
    assert caplog.text.count("was deleted") == 1


def test_a_process_that_may_start_no_more_threads_leaves_the_file_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    path = tmp_path / "run.ledger"
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            open_at(path)
    assert open_files(tmp_path) == []
    ledger = open_at(path)
    record(ledger, 0)
    ledger.close()
    assert entries(read_ledger(path)) == [(0, digest(0))]


def test_a_full_disk_at_the_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = book(tmp_path / "run.ledger")
    monkeypatch.setattr(os, "write", fails_with(errno.ENOSPC))
    with pytest.raises(LedgerError, match="run.ledger cannot be written: No space left on device"):
        data.open(SPEC, 1000, round_at(), behind(0))
    monkeypatch.undo()
    open_at(tmp_path / "run.ledger").close()


def test_a_full_disk_on_the_way_is_told_once_stops_nothing_and_loses_nothing_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.ledger"
    data = book(path)
    ledger = data.open(SPEC, 1000, round_at(), behind(0))
    for first in (0, 10):
        monkeypatch.setattr(os, "write", fails_with(errno.ENOSPC, after_bytes=60))  # one line, and a part of the next
        record(ledger, *range(first, first + 9))
        assert entries(read_ledger(path)) == [(step, digest(step)) for step in range(first + 1)]
        monkeypatch.undo()
        record(ledger, first + 9)
        assert entries(read_ledger(path)) == [(step, digest(step)) for step in range(first + 10)]
    ledger.close()
    assert read_ledger(path).damages == []
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert [f"{path} cannot be written: No space left on device. Training goes on" in text for text in told] == [True, True]


@pytest.mark.parametrize("seconds", [0.01, 3600.0])
def test_what_waits_in_memory_is_written_at_the_close_or_at_the_next_sync_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: float
) -> None:
    monkeypatch.setattr(book_module, "_SYNC_SECONDS", seconds)
    path = tmp_path / "run.ledger"
    ledger = open_at(path)
    with monkeypatch.context() as full:
        full.setattr(os, "write", fails_with(errno.ENOSPC, after_bytes=60))
        record(ledger, *range(9))
        ledger.finish()
    deadline = time.monotonic() + 30
    while seconds < 1 and not read_ledger(path).parts[0].has_end:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ledger.close()
    reading = read_ledger(path)
    assert entries(reading) == [(step, digest(step)) for step in range(9)]
    assert (reading.parts[0].has_end, reading.damages) == (True, [])
    assert "are not in the ledger" not in caplog.text


def test_batches_that_find_no_room_to_wait_in_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.ledger"
    ledger = open_at(path)
    monkeypatch.setattr(file_module, "_MAX_WAITING_BYTES", 100)
    monkeypatch.setattr(os, "write", fails_with(errno.EIO))
    record(ledger, *range(10))
    monkeypatch.undo()
    record(ledger, 10)
    assert [step for step, _ in entries(read_ledger(path))] == [0, 1, 2, 10]
    ledger.close()
    assert "7 lines are not in the ledger" in caplog.text


def test_a_ledger_that_goes_away_between_epochs_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    data = book(folder / "run.ledger")
    data.open(SPEC, 1000, round_at(), behind(0)).close()
    (folder / "run.ledger").unlink()
    folder.rmdir()
    ledger = data.open(SPEC, 1000, round_at(epoch=1, is_first=False), behind(1))
    record(ledger, 0)
    assert "cannot be written: No such file or directory" in caplog.text
    folder.mkdir()
    record(ledger, 1)
    ledger.close()
    assert [step for step, _ in entries(read_ledger(folder / "run.ledger"))] == [0, 1]


def test_a_worker_after_the_first_iteration_tells_at_once_that_its_ledger_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = book(tmp_path / "run.ledger")
    data.open(SPEC, 1000, round_at(), behind(0)).close()
    (tmp_path / "run.ledger.worker0").mkdir()
    ledger = data.open(SPEC, 1000, round_at(epoch=1, worker=Worker(0, 2, 7), is_first=False), behind(0))
    record(ledger, 0)
    assert caplog.text.count("run.ledger.worker0 cannot be written: Is a directory; name a file in a folder") == 1
    assert caplog.text.count("Training goes on") == 1
    ledger.close()


def test_a_disk_that_hangs_at_the_end_is_told_of_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_go_on, fsync = threading.Event(), os.fsync

    def hang(descriptor: int) -> None:
        may_go_on.wait(60)
        fsync(descriptor)

    monkeypatch.setattr(book_module, "_CLOSE_SECONDS", 0.1)
    ledger = open_at(tmp_path / "run.ledger")
    monkeypatch.setattr(os, "fsync", hang)
    record(ledger, 0)
    ledger.close()
    assert "run.ledger hangs: its last lines may not be written" in caplog.text
    may_go_on.set()
    ledger._thread.join(60)
    assert len(entries(read_ledger(tmp_path / "run.ledger"))) == 1
