"""Files of a ledger: what is in them, which process writes to which, and what a failing disk leaves."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest

from penstock import LedgerError
from penstock.audit.reading import read_ledger
from penstock.audit.report import audit
from penstock.distributed import LoaderWorker
from penstock.ledger import file as file_module
from penstock.ledger import recorder as recorder_module
from penstock.ledger.begin import Begin
from penstock.ledger.file import find_ledgers, ledger_path
from support.ledgers import (
    SPEC,
    begin_of,
    digest,
    entries,
    fails_with,
    id_of,
    line,
    lines_of,
    open_at,
    open_files,
    pass_at,
    record,
    recorder,
)

HOLDS_IT = """
import sys
from penstock.ledger.recorder import Recorder
held = Recorder(sys.argv[1], "numbers", 0)
print("open", flush=True)
sys.stdin.read()
"""


def test_recorded_batches_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    for epoch in (4, 5):
        opened = recorder(path).open(SPEC, 1000, pass_at(epoch=epoch, step=7))
        assert opened
        record(opened, 7, 8, 10**15)
        if epoch == 4:
            opened.finish()
    reading = read_ledger(path)
    first, second = reading.sections
    assert (first.has_end, second.has_end, reading.damages) == (True, False, [])
    assert entries(reading) == 2 * [(step, digest(step)) for step in (7, 8, 10**15)]
    assert first.begin == Begin(
        run=id_of(0), start=id_of(0), dataset="numbers", num_samples=1000, rank=0, epoch=4, step=7, spec=SPEC,
        time=first.begin.time,
    )  # fmt: skip
    assert (second.begin.epoch, second.begin.start) == (5, id_of(0))


def test_file_is_as_documented(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    opened = open_at(path)
    record(opened, 41)
    opened.finish()
    begin, batch, end = path.read_text().splitlines()
    check = begin[-8:]
    assert begin == f"{begin[:-9]} {zlib.crc32(begin[:-9].encode()):08x}"
    assert batch == f"              41 {digest(41)} {zlib.crc32(f'{check}              41 {digest(41)}'.encode()):08x}"
    assert end == f"end {zlib.crc32(f'{check}end'.encode()):08x}"


def test_batch_is_recorded_before_the_loop_has_it(tmp_path: Path) -> None:
    opened = open_at(tmp_path / "run.ledger")
    for step in range(3):
        record(opened, step)
        assert len(entries(read_ledger(tmp_path / "run.ledger"))) == step + 1


def test_iterations_of_a_process_share_a_file_by_any_path(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    one, two = (open_at(tmp_path / name / "run.ledger", epoch) for epoch, name in enumerate(("real", "link")))
    for step in range(3):
        record(one, step)
        record(two, step + 10)
    two.finish()
    reading = read_ledger(tmp_path / "real" / "run.ledger")
    parts = [(section.steps.tolist(), section.has_end) for section in reading.sections]
    assert (parts, reading.damages) == ([([0, 1, 2], False), ([10, 11, 12], True)], [])


def test_file_truncated_anywhere_is_read_and_appended_to(tmp_path: Path) -> None:
    iteration, later = lines_of(begin_of(), [0, 1, 2], ends=True).encode(), lines_of(begin_of(epoch=1), []).encode()
    whole, first, end = iteration + later, iteration.index(b"\n") + 1, len(iteration)
    for cut in [*range(8), *range(8, first, 97), *range(first, end), *range(end, len(whole), 97)]:
        path = tmp_path / f"{cut}.ledger"
        path.write_bytes(whole[:cut])
        before = entries(read_ledger(path))
        assert before == [(step, f"{step * 64:016x}") for step in range(max(0, min(cut, end) + 1 - first) // 43)]
        record(open_at(path), 9)
        reading = read_ledger(path)
        assert entries(reading) == [*before, (9, digest(9))]
        assert all(damage.is_torn and damage.first == damage.last for damage in reading.damages)
        is_whole = cut == 0 or whole[cut - 1 : cut] == b"\n" or whole[cut : cut + 1] == b"\n"
        assert len(reading.damages) == (0 if is_whole or cut == len(whole) else 1)


def test_zeros_left_by_a_file_system_are_a_torn_line(tmp_path: Path) -> None:
    for num_batches, whole in enumerate([b"", lines_of(begin_of(), [0]).encode()]):
        path = tmp_path / f"{num_batches}.ledger"
        path.write_bytes(whole + bytes(4000))
        open_at(path)
        reading = read_ledger(path)
        assert (len(entries(reading)), [d.is_torn for d in reading.damages]) == (num_batches, [True])


def test_flipped_bit_is_found_and_makes_no_other_batch(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    whole = (lines_of(begin_of(), [0, 1, 2]) + lines_of(begin_of(start=1, step=1), [1], ends=True)).encode()
    path.write_bytes(whole)
    sound = entries(read_ledger(path))
    begins = [number for number in range(len(whole)) if whole.rfind(b"begin", 0, number) > whole.rfind(b"\n", 0, number)]
    for number in sorted(set(range(len(whole))) - set(begins) | set(begins[::23])):
        for bit in range(8):
            path.write_bytes(whole[:number] + bytes([whole[number] ^ 1 << bit]) + whole[number + 1 :])
            reading = read_ledger(path)
            assert reading.damages, (number, bit)
            assert set(entries(reading)) <= set(sound)


def test_batches_without_their_begin_line_belong_to_no_other(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    lines = (lines_of(begin_of(), [0]) + lines_of(begin_of(start=1), [7, 8, 9])).splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[3:]))
    reading = read_ledger(path)
    assert (entries(reading), [(d.first, d.last) for d in reading.damages]) == ([(0, f"{0:016x}")], [(3, 5)])


@pytest.mark.parametrize(("old", "new"), [('"ledger": 4', '"ledger": 3'), ('"seq_len"', '"sequence_length"')])
def test_ledger_of_another_version_is_refused(tmp_path: Path, old: str, new: str) -> None:
    text = begin_of().to_text()
    assert old in text
    (tmp_path / "run.ledger").write_text(line(text.replace(old, new)))
    with pytest.raises(LedgerError, match="Audit it with the penstock that wrote it"):
        read_ledger(tmp_path / "run.ledger")


def test_other_files_are_not_audited(tmp_path: Path) -> None:
    for name, content in (("text", b"one\ntwo\n"), ("bytes", bytes(range(11, 256)) * 40_000)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(LedgerError, match="is no ledger"):
            audit([tmp_path / name])
    with pytest.raises(LedgerError, match="none cannot be read: No such file or directory"):
        audit([tmp_path / "none"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("notes.txt", "notes.txt is no ledger of version 4"),
        ("words.txt", "words.txt is no ledger of version 4"),
        ("older.ledger", "older.ledger is no ledger of version 4"),
        ("none/run.ledger", "cannot be written: No such file or directory"),
        (".", "cannot be written: Is a directory"),
    ],
)
def test_file_that_is_not_a_ledger_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "notes.txt").write_text("begin at the beginning")
    (tmp_path / "words.txt").write_text("begin\nend\n")
    (tmp_path / "older.ledger").write_text('begin {"ledger": 3, "launch": "a"} 01234567\n')
    before = open_files(tmp_path)
    with pytest.raises(LedgerError, match=message):
        recorder(tmp_path / name)
    assert open_files(tmp_path) == before
    assert (tmp_path / "notes.txt").read_text() == "begin at the beginning"


@pytest.mark.parametrize(
    "name", ["run.ledger", "run-{rank}.ledger", "run.{rank}", "rank{rank}/run.ledger", "[a]*?**/run.ledger"]
)
def test_ranks_and_workers_have_separate_files_that_are_found(tmp_path: Path, name: str) -> None:
    expected = [ledger_path(tmp_path / name, rank, worker) for rank in (0, 11) for worker in (None, 2)]
    for path in expected:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (expected[0].parent / "run.ledger.txt").touch()
    (expected[0].parent / "run-0.ledger.old").touch()
    assert find_ledgers(tmp_path / name) == sorted(set(expected))
    assert len(set(expected)) == 4
    assert ledger_path("run.ledger", 3, 1) == Path("run.ledger.3.worker1").absolute()


def test_ledger_is_locked_until_its_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    command = [sys.executable, "-c", HOLDS_IT, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "open\n"
        with pytest.raises(LedgerError, match="another process writes to the ledger"):
            recorder(path)
        assert open_files(tmp_path) == []
        other.send_signal(signal.SIGKILL)
    record(open_at(path), 0)
    assert len(entries(read_ledger(path))) == 1


def test_loader_worker_waits_for_the_one_of_the_last_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.ledger"
    process = os.getpid()
    data = recorder(path)
    monkeypatch.setattr(os, "getpid", lambda: process + 1)  # in the worker's process
    command = [sys.executable, "-c", HOLDS_IT, f"{path}.worker0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "open\n"
        with monkeypatch.context() as impatient:
            impatient.setattr(recorder_module, "_OLD_WORKERS_SECONDS", 0.1)
            with pytest.raises(LedgerError, match="another process writes to the ledger"):
                data.open(SPEC, 1000, pass_at(worker=LoaderWorker(0, 2, 5)))
        end = threading.Timer(0.5, other.kill)
        end.start()
        assert data.open(SPEC, 1000, pass_at(worker=LoaderWorker(0, 2, 5)))
        end.join()
    [section] = read_ledger(tmp_path / "run.ledger.worker0").sections
    assert (section.begin.worker, section.begin.num_workers, section.begin.pass_name) == (0, 2, 1)


def test_file_is_synced_periodically_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, real = threading.Event(), os.fsync

    def fsync(fd: int) -> None:
        real(fd)
        synced.set()

    monkeypatch.setattr(os, "fsync", fsync)
    opened = open_at(tmp_path / "run.ledger")
    assert synced.is_set()  # or a machine that goes down would lose the file with its name
    synced.clear()
    opened.finish()
    assert synced.wait(30)
    monkeypatch.setattr(file_module, "_SYNC_SECONDS", -1.0)
    for step in range(3):
        synced.clear()
        while not synced.wait(0.01):
            record(opened, step)


def test_full_disk_at_the_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = recorder(tmp_path / "run.ledger")
    monkeypatch.setattr(os, "write", fails_with(errno.ENOSPC))
    with pytest.raises(LedgerError, match="run.ledger cannot be written: No space left on device"):
        data.open(SPEC, 1000, pass_at())
    assert data.open(SPEC, 1000, pass_at(is_first=False)) is None
    monkeypatch.undo()
    assert data.open(SPEC, 1000, pass_at())


@pytest.mark.parametrize("room", [0, 3, 20, 43, 60])
def test_lines_lost_to_a_full_disk_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    path = tmp_path / "run.ledger"
    one, two = open_at(path), open_at(path, epoch=1)
    record(one, 0)
    monkeypatch.setattr(os, "write", fails_with(errno.ENOSPC, after_bytes=room))
    record(one, *range(1, 9))
    record(two, 10)
    monkeypatch.undo()
    record(one, 9)
    record(two, 11)
    reading = read_ledger(path)
    num_written = room // 43
    assert [section.steps.tolist() for section in reading.sections] == [[0, *range(1, 1 + num_written), 9], [11]]
    assert (reading.num_lost, all(damage.is_torn for damage in reading.damages)) == (9 - num_written, True)
    assert caplog.text.count("Training goes on") == 1
    assert f"is written again; {9 - num_written} lines are lost" in caplog.text


def test_exception_of_a_signal_handler_tears_no_other_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.ledger"
    opened, real = open_at(path), os.write
    for step, nbytes in enumerate([0, 1, 20, 42, 43] * 3):

        def write(fd: int, content: bytes, nbytes: int = nbytes) -> int:
            real(fd, bytes(content)[:nbytes])
            raise KeyboardInterrupt

        with monkeypatch.context() as interrupted:
            interrupted.setattr(os, "write", write)
            with pytest.raises(KeyboardInterrupt):
                record(opened, step)
        record(opened, 100 + step)
    assert {(100 + step, digest(100 + step)) for step in range(15)} <= set(entries(read_ledger(path)))
    assert all(damage.is_torn for damage in read_ledger(path).damages)


def test_deleted_ledger_is_logged_and_begun_again_by_the_next_dataset(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.ledger"
    opened = open_at(path)
    path.unlink()
    monkeypatch.setattr(file_module, "_SYNC_SECONDS", -1.0)
    deadline = time.monotonic() + 30
    while "was deleted while it was written" not in caplog.text:
        assert time.monotonic() < deadline
        record(opened, 0)
    record(open_at(path), 1)
    assert entries(read_ledger(path)) == [(1, digest(1))]
