"""Iterations, processes and threads that write to one ledger."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from ledger_files import SPEC, book, digest, entries, fails_with, open_at, open_files, record
from ledgers import append, begin_of, behind, round_at
from penstock import LedgerError
from penstock.audit.reading import read_ledger
from penstock.distributed import Worker
from penstock.ledger import file as file_module
from penstock.ledger import held
from penstock.ledger import recorder as book_module

HOLDS_IT = """
import sys
from penstock import Spec
from penstock.ledger.recorder import Recorder
from penstock.state.progress import Progress
progress = Progress(9)
ledger = Recorder(sys.argv[1], "numbers", 0).open(Spec(snapshot="abc"), 9, progress.begin(None), progress)
print("open", flush=True)
sys.stdin.read()
"""


def test_iterations_at_once_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    data = book(path)
    one, two = (data.open(SPEC, 1000, round_at(), behind(0)) for _ in range(2))
    for step in range(3):
        record(one, step)
        record(two, step + 10)
    one.close()
    record(two, 13)
    three = data.open(SPEC, 1000, round_at(), behind(0))
    two.finish()
    two.close()
    three.close()
    reading = read_ledger(path)
    parts = [(part.steps.tolist(), part.has_end) for part in reading.parts]
    assert parts == [([0, 1, 2], False), ([10, 11, 12, 13], True), ([], False)]
    assert reading.damages == []


def test_what_waits_in_memory_is_written_in_its_order_though_iterations_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.ledger"
    data = book(path)
    for room in (0, 20, 43, 60, 700, 800):  # lines and begin lines are cut off anywhere
        one, two = (data.open(SPEC, 1000, round_at(epoch=epoch), behind(room)) for epoch in (0, 1))
        record(two, 10)
        with monkeypatch.context() as full:
            full.setattr(os, "write", fails_with(errno.ENOSPC, after_bytes=room))
            for step in (0, 1):
                record(one, step)
                record(two, step + 11)
        record(two, 13)
        record(one, 2)
        for ledger in (one, two):
            ledger.close()
        reading = read_ledger(path)
        assert [part.steps.tolist() for part in reading.parts[-2:]] == [[0, 1, 2], [10, 11, 12, 13]]
        assert reading.damages == []
    assert "not in the ledger" not in caplog.text


def test_a_line_whose_newline_alone_is_not_written_is_not_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = len(begin_of(batch_size=3, skip="samples:0-4").to_text())
    for room in (*range(begin - 9, begin + 60), *range(begin + 90, begin + 150)):  # one of these is behind the begin line
        path = tmp_path / f"{room}.ledger"
        data = book(path)
        data.open(SPEC, 1000, round_at(), behind(0)).close()
        with monkeypatch.context() as full:
            full.setattr(os, "write", fails_with(errno.ENOSPC, after_bytes=room))
            ledger = data.open(SPEC, 1000, round_at(epoch=1, is_first=False), behind(1))
            record(ledger, 0, 1, 2)
            ledger.close()
        ledger = data.open(SPEC, 1000, round_at(epoch=2, is_first=False), behind(2))
        record(ledger, 3)
        ledger.close()
        reading = read_ledger(path)
        assert [part.steps.tolist() for part in reading.parts] == [[], [0, 1, 2], [3]]
        assert all(damage.is_torn for damage in reading.damages)


def test_what_waits_is_lost_where_another_process_has_written_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would pass for what this process did later."""
    path = tmp_path / "run.ledger"
    data = book(path)
    data.open(SPEC, 1000, round_at(), behind(0)).close()
    with monkeypatch.context() as full:
        full.setattr(os, "write", fails_with(errno.ENOSPC))
        ledger = data.open(SPEC, 1000, round_at(epoch=1, is_first=False), behind(1))
        record(ledger, 0, 1, 2)
        ledger.close()
    append(path, begin_of(start=1), [7])
    data.open(SPEC, 1000, round_at(epoch=2, is_first=False), behind(2)).close()
    assert [part.steps.tolist() for part in read_ledger(path).parts] == [[], [7], []]
    assert f"4 lines are not in the ledger {path}\n" in caplog.text


@pytest.mark.parametrize("asks", ["the next iteration", "the interpreter's exit"])
def test_where_all_that_waits_is_lost_nothing_stops_and_what_comes_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    path = tmp_path / "run.ledger"
    data = book(path)
    data.open(SPEC, 1000, round_at(), behind(0)).close()
    monkeypatch.setattr(file_module, "_MAX_WAITING_BYTES", 60)
    with monkeypatch.context() as full:
        full.setattr(os, "write", fails_with(errno.ENOSPC))
        ledger = data.open(SPEC, 1000, round_at(epoch=1, is_first=False), behind(1))
        record(ledger, *range(9))
        ledger.close()
    append(path, begin_of(start=1), [7])
    if asks == "the interpreter's exit":
        held._write_what_waits()
    ledger = data.open(SPEC, 1000, round_at(epoch=2, is_first=False), behind(2))
    record(ledger, 0, 1)
    ledger.close()
    assert [part.steps.tolist() for part in read_ledger(path).parts] == [[], [7], [0, 1]]


def test_an_exception_of_a_signals_handler_writes_no_line_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.ledger"
    ledger, real = open_at(path), os.write
    for step, nbytes in enumerate([0, 1, 20, 42, 43] * 3):

        def write(fd: int, content: bytes, nbytes: int = nbytes) -> int:
            real(fd, bytes(content)[:nbytes])
            raise KeyboardInterrupt

        with monkeypatch.context() as interrupted:
            interrupted.setattr(os, "write", write)
            with pytest.raises(KeyboardInterrupt):
                record(ledger, step)
    ledger.close()
    assert entries(read_ledger(path)) == [(step, digest(step)) for step in range(15)]
    assert read_ledger(path).damages == []


def test_paths_of_one_file_are_one_ledger(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    one, two = (open_at(tmp_path / name / "run.ledger", epoch) for epoch, name in enumerate(("real", "link")))
    for step in range(3):
        record(one, step)
        record(two, step)
    one.close()
    two.close()
    reading = read_ledger(tmp_path / "real" / "run.ledger")
    assert ([part.steps.tolist() for part in reading.parts], reading.damages) == ([[0, 1, 2]] * 2, [])


def test_a_ledger_that_is_collected_while_its_thread_is_in_anothers_way_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = open_at(tmp_path / "run.ledger"), open_at(tmp_path / "run.ledger")
    with one._file._writing:
        two.close()
        assert two.is_closed
    two._thread.join(30)
    assert not two._thread.is_alive()
    record(one, 0)
    one.close()
    assert "hangs" not in caplog.text


def test_two_processes_never_write_to_one_ledger_and_a_killed_one_leaves_it_free(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_IT, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == "open\n"
        with pytest.raises(LedgerError, match=f"another process, {other.pid}, writes to the ledger"):
            book(path)
        assert open_files(tmp_path) == []
        other.send_signal(signal.SIGKILL)
    open_at(path).close()
    assert len(read_ledger(path).parts) == 2


def test_a_ledger_that_this_process_has_read_is_locked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.ledger"
    ledger = open_at(path)
    path.read_text()  # and closed, which gives up all locks of this process on it
    ledger._file.sync()
    holder = [sys.executable, "-c", HOLDS_IT, str(path)]
    refused = subprocess.run(holder, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert f"another process, {os.getpid()}, writes to the ledger" in refused.stderr
    path.read_text()
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "open\n"
        for _ in range(2):
            ledger._file.sync()
        other.communicate("")
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert f"another process writes to the ledger {path}, too" in caplog.text
    ledger.close()


@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded, says Python 3.12
def test_a_fork_opens_a_ledger_though_a_thread_was_at_one_when_it_was_made(tmp_path: Path) -> None:
    with held._files_lock:
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            open_at(tmp_path / "run.ledger").close()
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_loader_worker_waits_for_one_of_the_epoch_before_that_is_about_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.ledger"
    worker = Worker(first=0, stride=2, loader_seed=5)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_IT, f"{path}.worker0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == "open\n"
        with monkeypatch.context() as impatient:
            impatient.setattr(book_module, "_OLD_WORKERS_SECONDS", 0.1)
            with pytest.raises(LedgerError, match=f"another process, {other.pid}, writes to the ledger"):
                book(path).open(SPEC, 1000, round_at(worker=worker), behind(0))
        end = threading.Timer(0.5, other.kill)
        end.start()
        book(path).open(SPEC, 1000, round_at(worker=worker), behind(0)).close()
        end.join()
    assert len(read_ledger(tmp_path / "run.ledger.worker0").parts) == 2


def test_a_file_stays_locked_until_the_last_iteration_over_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"

    def is_locked() -> bool:
        """For another process."""
        code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        return subprocess.run([sys.executable, "-c", code, path], stderr=subprocess.DEVNULL, check=False).returncode != 0

    first, second = open_at(path), open_at(path)
    second.close()
    assert is_locked()
    book(path)
    assert is_locked()
    first.close()
    assert not is_locked()


def test_a_ledger_may_be_closed_by_its_own_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which Python may collect the iterator that has it."""
    opened, fsync = threading.Event(), os.fsync

    def collect(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert opened.wait(30)
            ledger.close()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", collect)
    before = threading.active_count()
    ledger = open_at(tmp_path / "run.ledger")
    opened.set()
    while threading.active_count() > before:
        time.sleep(0.01)
    assert ledger.is_closed


def test_a_ledger_that_was_closed_is_not_kept_until_the_interpreter_exits(tmp_path: Path) -> None:
    ledger = open_at(tmp_path / "run.ledger")
    ledger.close()
    first = weakref.ref(ledger)
    ledger = open_at(tmp_path / "run.ledger", epoch=1)
    ledger.close()
    gc.collect()
    assert first() is None
