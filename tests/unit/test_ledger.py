"""The ledger holds what the loop was given, whatever happens to its process, its file or its disk."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ledgers import append, begin_of, behind, line, lines_of, round_at
from penstock import LedgerError, Spec
from penstock.audit.reading import Reading, read_ledger
from penstock.ledger import book as book_module
from penstock.ledger import file as file_module
from penstock.ledger import held
from penstock.ledger.begin import Begin
from penstock.ledger.book import Book, Ledger
from penstock.ledger.names import find_ledgers, ledger_path
from penstock.rank import Worker

SPEC = Spec(snapshot="abc", batch_size=3, skip="samples:0-4")


def book(path: Path, rank: int = 0) -> Book:
    return Book(path, "numbers", rank, 1000)


def digest(step: int) -> str:
    return f"{step * 0x9E3779B97F4A7C15 % 2**64:016x}"


def open_at(path: Path, epoch: int = 0) -> Ledger:
    return book(path).open(SPEC, round_at(epoch=epoch), behind(0))


def record(ledger: Ledger, *steps: int) -> None:
    for step in steps:
        ledger.record(step, digest(step))


def open_files(folder: Path) -> list[Path]:
    """The files in a folder that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder's own, which is closed by now
            found.append(descriptor.readlink())
    return [path for path in found if path.is_relative_to(folder)]


def entries(reading: Reading) -> list[tuple[int, str]]:
    return [(s, f"{d:016x}") for part in reading.parts for s, d in zip(part.steps.tolist(), part.digests.tolist(), strict=True)]


def test_what_is_recorded_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    data = book(path)
    for epoch in (4, 5):
        ledger = data.open(SPEC, round_at(epoch=epoch, step=7, num_loads=2), behind(epoch - 4))
        record(ledger, 7, 8, 10**15)
        if epoch == 4:
            ledger.finish()
        ledger.close()
    reading = read_ledger(path)
    first, second = reading.parts
    assert (first.has_end, second.has_end, reading.damages) == (True, False, [])
    assert entries(reading) == 2 * [(step, digest(step)) for step in (7, 8, 10**15)]
    assert first.begin == Begin(
        launch=first.begin.launch, num_loads=2, iteration=0, dataset="numbers", num_sequences=1000, rank=0,
        epoch=4, step=7, spec=SPEC, time=first.begin.time,
    )  # fmt: skip
    assert (second.begin.epoch, second.begin.iteration, second.begin.launch) == (5, 1, first.begin.launch)


def test_the_file_is_as_it_is_documented(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    ledger = open_at(path)
    record(ledger, 41)
    ledger.finish()
    ledger.close()
    begin, batch, end = path.read_text().splitlines()
    check = begin[-8:]
    assert begin == f"{begin[:-9]} {zlib.crc32(begin[:-9].encode()):08x}"
    assert batch == f"              41 {digest(41)} {zlib.crc32(f'{check}              41 {digest(41)}'.encode()):08x}"
    assert end == f"end {zlib.crc32(f'{check}end'.encode()):08x}"


def test_a_batch_is_in_the_file_before_the_loop_has_it(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    ledger = open_at(path)
    for step in range(3):
        record(ledger, step)
        assert len(entries(read_ledger(path))) == step + 1
    ledger.close()


def test_a_file_that_is_cut_off_anywhere_is_read_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    iteration, later = lines_of(begin_of(), [0, 1, 2], ends=True).encode(), lines_of(begin_of(epoch=1), []).encode()
    whole, first, end = iteration + later, iteration.index(b"\n") + 1, len(iteration)
    for cut in [*range(8), *range(8, first, 97), *range(first, end), *range(end, len(whole), 97)]:
        path.write_bytes(whole[:cut])
        before = entries(read_ledger(path))
        assert before == [(step, f"{step * 64:016x}") for step in range(max(0, min(cut, end) + 1 - first) // 43)]
        ledger = open_at(path)
        record(ledger, 9)
        ledger.close()
        reading = read_ledger(path)
        assert entries(reading) == [*before, (9, digest(9))]
        assert all(damage.is_torn and damage.first == damage.last for damage in reading.damages)
        open_at(path).close()  # once more
        is_whole = cut == 0 or whole[cut - 1 : cut] == b"\n" or whole[cut : cut + 1] == b"\n"
        assert len(reading.damages) == (0 if is_whole or cut == len(whole) else 1)


def test_what_a_file_system_leaves_of_a_write_that_never_came_is_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    for num_batches, whole in enumerate([b"", lines_of(begin_of(), [0]).encode()]):
        path.write_bytes(whole + bytes(4000))
        ledger = open_at(path)
        ledger.close()
        reading = read_ledger(path)
        assert (len(entries(reading)), [d.is_torn for d in reading.damages]) == (num_batches, [True])


def test_every_flipped_bit_is_seen_and_turns_no_batch_into_another(tmp_path: Path) -> None:
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


def test_batches_whose_begin_line_is_lost_belong_to_no_other(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    lines = (lines_of(begin_of(), [0]) + lines_of(begin_of(start=1), [7, 8, 9])).splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[3:]))
    reading = read_ledger(path)
    assert (entries(reading), [(d.first, d.last) for d in reading.damages]) == ([(0, f"{0:016x}")], [(3, 5)])


def test_iterations_at_once_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    data = book(path)
    one, two = (data.open(SPEC, round_at(), behind(0)) for _ in range(2))
    for step in range(3):
        record(one, step)
        record(two, step + 10)
    one.close()
    record(two, 13)
    three = data.open(SPEC, round_at(), behind(0))
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
        one, two = (data.open(SPEC, round_at(epoch=epoch), behind(room)) for epoch in (0, 1))
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
        data.open(SPEC, round_at(), behind(0)).close()
        with monkeypatch.context() as full:
            full.setattr(os, "write", fails_with(errno.ENOSPC, after_bytes=room))
            ledger = data.open(SPEC, round_at(epoch=1, is_first=False), behind(1))
            record(ledger, 0, 1, 2)
            ledger.close()
        ledger = data.open(SPEC, round_at(epoch=2, is_first=False), behind(2))
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
    data.open(SPEC, round_at(), behind(0)).close()
    with monkeypatch.context() as full:
        full.setattr(os, "write", fails_with(errno.ENOSPC))
        ledger = data.open(SPEC, round_at(epoch=1, is_first=False), behind(1))
        record(ledger, 0, 1, 2)
        ledger.close()
    append(path, begin_of(start=1), [7])
    data.open(SPEC, round_at(epoch=2, is_first=False), behind(2)).close()
    assert [part.steps.tolist() for part in read_ledger(path).parts] == [[], [7], []]
    assert f"penstock: 4 lines are not in the ledger {path}\n" in caplog.text


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


def test_a_close_that_fails_is_told_and_leaves_no_number_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, close = tmp_path / "run.ledger", os.close
    data = book(path)
    ledger = data.open(SPEC, round_at(), behind(0))

    def fail(fd: int) -> None:
        close(fd)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as over:
        over.setattr(os, "close", fail)
        ledger.close()
    assert "run.ledger cannot be written: Disk quota exceeded" in caplog.text
    with (tmp_path / "checkpoint.pt").open("wb"):  # which has the number now
        ledger = data.open(SPEC, round_at(epoch=1, is_first=False), behind(1))
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


def test_what_an_iteration_could_not_write_is_written_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.ledger"
    data = book(path)
    data.open(SPEC, round_at(), behind(0)).close()
    with monkeypatch.context() as full:
        full.setattr(os, "write", fails_with(errno.ENOSPC, after_bytes=1000))
        for epoch in (1, 2):
            ledger = data.open(SPEC, round_at(epoch=epoch, is_first=False), behind(epoch))
            record(ledger, *range(9))
            ledger.finish()
            ledger.close()
    assert open_files(tmp_path) == []
    assert f"lines are not in the ledger {path}. They wait for another iteration" in caplog.text
    data.open(SPEC, round_at(epoch=3, is_first=False), behind(3)).close()
    reading = read_ledger(path)
    assert [(part.begin.epoch, len(part.steps), part.has_end) for part in reading.parts] == [
        (0, 0, False), (1, 9, True), (2, 9, True), (3, 0, False),
    ]  # fmt: skip
    assert all(damage.is_torn for damage in reading.damages)
    assert open_files(tmp_path) == []


FREES_THE_DISK = """
import os, sys
from penstock import Spec
from penstock.ledger.book import Book
from penstock.place.progress import Progress
progress = Progress(9)
ledger = Book(sys.argv[1], "numbers", 0, 9).open(Spec(snapshot="abc"), progress.begin(None), progress)
def fail(*_):
    raise OSError(28, "No space left")
write, os.write = os.write, fail
ledger.record(0, "0123456789abcdef")
ledger.close()
os.write = write
"""


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


@pytest.mark.parametrize(
    "name", ["run.ledger", "run-{rank}.ledger", "run.{rank}", "rank{rank}/run.ledger", "[a]*?**/run.ledger"]
)
def test_each_rank_and_each_worker_has_a_file_of_its_own_and_all_are_found(tmp_path: Path, name: str) -> None:
    expected = []
    for rank in (0, 11):
        ledger_path(tmp_path / name, rank).parent.mkdir(exist_ok=True)
        data = book(tmp_path / name, rank)
        for worker in (None, Worker(first=2, stride=3, loader_seed=5)):
            data.open(replace(SPEC, world_size=12), round_at(worker=worker), behind(0)).close()
            path = ledger_path(tmp_path / name, rank, worker.first if worker else None)
            begin = read_ledger(path).parts[0].begin
            assert (begin.rank, begin.worker, begin.num_workers) == (rank, *((2, 3) if worker else (0, 0)))
            assert begin.round == (round_at(worker=worker).name if worker else 0)
            expected.append(path)
    (expected[0].parent / "run.ledger.txt").touch()
    (expected[0].parent / "run-0.ledger.old").touch()
    assert find_ledgers(tmp_path / name) == sorted(set(expected))
    assert len(set(expected)) == 4


def test_a_single_process_writes_to_the_very_file_that_is_named() -> None:
    assert ledger_path("run.ledger", 0) == Path("run.ledger").absolute()
    assert ledger_path("run.ledger", 3, 1) == Path("run.ledger.3.worker1").absolute()


def test_a_process_that_changes_its_folder_goes_on_in_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = book(Path("run.ledger"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    data.open(SPEC, round_at(), behind(0)).close()
    assert len(read_ledger(tmp_path / "run.ledger").parts) == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("notes.txt", "notes.txt is no ledger, and will not be written to: name another file"),
        ("words.txt", "words.txt is no ledger, and will not be written to: name another file"),
        (
            "older.ledger",
            "older.ledger was begun by a penstock whose ledgers are of version 1, and this one writes version 2: no",
        ),
        ("torn.ledger", "torn.ledger was begun by a penstock whose ledgers are of version 3, and"),
        ("none/run.ledger", "cannot be written: No such file or directory"),
        (".", "cannot be written: Is a directory"),
    ],
)
def test_what_cannot_be_a_ledger_is_refused_at_once(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "notes.txt").write_text("begin at the beginning")
    (tmp_path / "words.txt").write_text("begin\nend\n")
    (tmp_path / "older.ledger").write_text('begin {"ledger": 1, "launch": "a"} 01234567\n')
    (tmp_path / "torn.ledger").write_text('beg\nbegin {"ledger": 3, "launch": "a"} 01234567\n')
    before = open_files(tmp_path)
    with pytest.raises(LedgerError, match=message):
        book(tmp_path / name)
    assert open_files(tmp_path) == before
    assert (tmp_path / "notes.txt").read_text() == "begin at the beginning"


HOLDS_IT = """
import sys
from penstock import Spec
from penstock.ledger.book import Book
from penstock.place.progress import Progress
progress = Progress(9)
ledger = Book(sys.argv[1], "numbers", 0, 9).open(Spec(snapshot="abc"), progress.begin(None), progress)
print("open", flush=True)
sys.stdin.read()
"""


def test_two_processes_never_write_to_one_ledger_and_a_killed_one_leaves_it_free(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_IT, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == "open\n"
        with pytest.raises(LedgerError, match="another process writes to the ledger"):
            book(path)
        assert open_files(tmp_path) == []
        other.send_signal(signal.SIGKILL)
    open_at(path).close()
    assert len(read_ledger(path).parts) == 2


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
            with pytest.raises(LedgerError, match="another process writes to the ledger"):
                book(path).open(SPEC, round_at(worker=worker), behind(0))
        end = threading.Timer(0.5, other.kill)
        end.start()
        book(path).open(SPEC, round_at(worker=worker), behind(0)).close()
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


def fails_with(code: int, after_bytes: int = 0) -> Callable[[int, bytes], int]:
    """A write to a disk that takes a little more, and then none."""
    left = [after_bytes]
    real = os.write

    def write(fd: int, content: bytes) -> int:
        if not left[0]:
            raise OSError(code, os.strerror(code))
        taken = real(fd, bytes(content[: left[0]]))
        left[0] -= taken
        return taken

    return write


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
        data.open(SPEC, round_at(), behind(0))
    monkeypatch.undo()
    open_at(tmp_path / "run.ledger").close()


def test_a_full_disk_on_the_way_is_told_once_stops_nothing_and_loses_nothing_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.ledger"
    data = book(path)
    ledger = data.open(SPEC, round_at(), behind(0))
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
    monkeypatch.setattr(file_module, "_MOST_WAITING_BYTES", 100)
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
    data.open(SPEC, round_at(), behind(0)).close()
    (folder / "run.ledger").unlink()
    folder.rmdir()
    ledger = data.open(SPEC, round_at(epoch=1, is_first=False), behind(1))
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
    data.open(SPEC, round_at(), behind(0)).close()
    (tmp_path / "run.ledger.worker0").mkdir()
    ledger = data.open(SPEC, round_at(epoch=1, worker=Worker(0, 2, 7), is_first=False), behind(0))
    record(ledger, 0)
    assert caplog.text.count("run.ledger.worker0 cannot be written: Is a directory; name a file in a folder") == 1
    assert caplog.text.count("Training goes on") == 1
    ledger.close()


def test_the_disk_is_told_to_write_now_and_then_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "_SYNC_SECONDS", 0.01)
    synced, real = threading.Event(), os.fsync

    def fsync(fd: int) -> None:
        real(fd)
        synced.set()

    monkeypatch.setattr(os, "fsync", fsync)
    data = book(tmp_path / "run.ledger")
    assert synced.is_set()  # or a machine that goes down would lose the file with its name
    ledger = data.open(SPEC, round_at(), behind(0))
    for _ in range(3):
        synced.clear()
        assert synced.wait(30)
    monkeypatch.setattr(book_module, "_SYNC_SECONDS", 3600.0)
    before = threading.active_count()
    ledger.close()
    ledger.close()
    assert threading.active_count() == before - 1
    with pytest.raises(ValueError, match="is closed"):
        record(ledger, 0)


def test_a_ledger_of_another_version_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    text = begin_of().to_text()
    for old, new in [
        ('"ledger": 2', '"ledger": 3'),
        ('"seq_len"', '"sequence_length"'),
        ('"rank": 0', '"rank": "0"'),
        ('"step": 0', '"step": -1'),
        ('"num_sequences": 100', '"num_sequences": true'),
        ('"rank": 0', '"rank": 1'),
        ('"num_workers": 0', '"num_workers": 1000000'),
        ("+00:00", ""),
        ('"time": "2025', '"time": "9999'),
        ('"batch_size": 5', '"batch_size": 0'),
        ('"skip": null', '"skip": "5-4"'),
        ('"spec": {', '"spec": {{'),
        ('"spec": {', '"spec": ' + "[" * 100_000),
    ]:
        assert old in text
        path.write_text(line(text.replace(old, new)))
        with pytest.raises(LedgerError, match="Audit it with the penstock that wrote it"):
            read_ledger(path)


def test_what_is_no_ledger_cannot_be_read(tmp_path: Path) -> None:
    for name, content in (
        ("text", b"one\ntwo\n"),
        ("word", b"one"),
        ("bytes", bytes(range(11, 256)) * 40_000),
        ("lines", b"1\n" * 9_000_000),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(LedgerError, match="is no ledger"):
            read_ledger(tmp_path / name)
    with pytest.raises(LedgerError, match="none cannot be read: No such file or directory"):
        read_ledger(tmp_path / "none")


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
