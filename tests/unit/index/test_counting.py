"""A background thread counts once; callers get the progress, the result, or the failure."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from unittest.mock import Mock

import pytest

from penstock_server.index import counting as counting_module
from penstock_server.index.counting import Counting, build_lock
from penstock_server.problems import BadRow, IndexFailed, IndexNotReady, OutOfMemory


def test_counting_error_while_reading_is_raised_by_get_alone(tmp_path: Path) -> None:
    counting = Counting("the rows", 1, Mock(side_effect=BadRow("no")), lambda: [tmp_path])
    counting.read()
    assert not counting.is_ready
    with pytest.raises(BadRow):
        counting.get()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (BadRow("no"), BadRow),
        (MemoryError(), OutOfMemory),
        (ZeroDivisionError(), IndexFailed),
    ],
)
def test_counting_raises_its_failure_for_half_a_minute_and_then_starts_again(
    monkeypatch: pytest.MonkeyPatch, fault: Exception, told: type[Exception]
) -> None:
    clock, make = Mock(), Mock(side_effect=[fault, 7])
    monkeypatch.setattr(counting_module, "time", clock)
    monkeypatch.setattr(counting_module, "_PATIENCE_SECONDS", 30.0)
    counting = Counting("the rows", 1, make, list)
    for clock.monotonic.return_value in (0.0, 29.0):
        with pytest.raises(told):
            counting.get()
    assert make.call_count == 1
    clock.monotonic.return_value = 30.0
    assert counting.get() == 7


def test_counting_runs_once_for_all_callers_and_reports_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting_module, "_PATIENCE_SECONDS", 0.0)
    began, go_on, num_made = threading.Event(), threading.Event(), 0

    def make(advance: Callable[[int], None]) -> int:
        nonlocal num_made
        num_made += 1
        advance(1)
        began.set()
        assert go_on.wait(30)
        return 7

    counting = Counting("the rows", 4, make, list)
    with pytest.raises(IndexNotReady):
        counting.get()
    assert began.wait(30)
    for _ in range(2):
        with pytest.raises(IndexNotReady, match=r"the rows .*counted: 1 of 4 blocks are done \(25%\)"):
            counting.get()
    go_on.set()
    while not counting.is_ready:
        time.sleep(0.001)
    assert (counting.get(), num_made) == (7, 1)


@pytest.mark.parametrize(
    ("elapsed", "num_done", "seconds_left", "told"),
    [
        (9.0, 0, None, "the rows are being counted: 0 of 40 blocks"),
        (9.5, 10, 29, "about 0:00:29 left, the rows are being counted: 10 of 40 blocks"),
        (100.0, 4, 900, "about 0:15:00 left,"),
        (4_000.0, 1, 156_000, "about 1 day, 19:20:00 left,"),
    ],
)
def test_index_not_ready_gives_the_time_left_at_the_rate_so_far(
    monkeypatch: pytest.MonkeyPatch, elapsed: float, num_done: int, seconds_left: int | None, told: str
) -> None:
    clock, go_on = Mock(), threading.Event()
    clock.monotonic.return_value = 7.0
    monkeypatch.setattr(counting_module, "time", clock)
    monkeypatch.setattr(counting_module, "_PATIENCE_SECONDS", 0.0)
    counting = Counting("the rows", 40, lambda _: go_on.wait(30), list)
    with pytest.raises(IndexNotReady):
        counting.get()
    clock.monotonic.return_value, counting.num_done = 7.0 + elapsed, num_done
    with pytest.raises(IndexNotReady, match=f"^{told}") as caught:
        counting.get()
    go_on.set()
    assert caught.value.seconds_left == seconds_left


def test_counting_callers_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, go_on, waits = Mock(), threading.Event(), list[float]()
    monkeypatch.setattr(counting_module, "time", clock)
    counting = Counting("the rows", 40, lambda _: go_on.wait(30), list)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", lambda _, seconds: waits.append(seconds))
        for now, num_done in ((0.0, 0), (0.25, 0), (5.0, 1), (30.0, 39)):
            clock.monotonic.return_value, counting.num_done = now, num_done
            with pytest.raises(IndexNotReady):
                counting.get()
    go_on.set()
    assert waits == [1.0, 0.75, 0.0, 0.0]


_OTHER = """
import sys
from pathlib import Path
from penstock_server.index.counting import build_lock
print("waits", flush=True)
with build_lock(*map(Path, sys.argv[1:])):
    print("builds", flush=True)
    sys.stdin.readline()
"""


def other(*paths: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _OTHER, *map(str, paths)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdout
    assert process.stdout.readline() == b"waits\n"
    return process


def is_waiting(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdout
    with DefaultSelector() as selector:
        selector.register(process.stdout, EVENT_READ)
        return not selector.select(0.5)


def end(process: subprocess.Popen[bytes]) -> str:
    output, _ = process.communicate(b"\n", timeout=30)
    return output.decode()


def test_build_lock_waits_for_the_files_that_another_process_makes(tmp_path: Path) -> None:
    with build_lock(tmp_path / "a"):
        waits, goes_on = other(tmp_path / "a"), other(tmp_path / "b")
        assert end(goes_on) == "builds\n"
        assert is_waiting(waits)
    assert end(waits) == "builds\n"


def test_build_lock_ends_with_its_process_and_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such shard"), build_lock(tmp_path / "a"):
        raise ValueError("no such shard")
    killed = other(tmp_path / "a")
    assert killed.stdout
    assert killed.stdout.readline() == b"builds\n"
    waits = other(tmp_path / "a")
    assert is_waiting(waits)
    killed.kill()
    killed.communicate()
    assert end(waits) == "builds\n"


def test_build_lock_does_not_wait_for_an_existing_file_or_without_locks(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    for path in (tmp_path / "a", tmp_path / "missing" / "b"):
        with build_lock(path):
            assert end(other(path)) == "builds\n"


_CROSSWISE = """
import sys, threading
from pathlib import Path
from penstock_server.index.counting import build_lock

def build(path):
    with build_lock(path):
        print("builds", path.name, flush=True)
        sys.stdin.readline()

held, wanted = map(Path, sys.argv[1:])
thread = threading.Thread(target=build, args=[wanted])
with build_lock(held):
    print("holds", flush=True)
    thread.start()
    sys.stdin.readline()
thread.join()
"""


def test_build_lock_waits_when_two_processes_hold_files_crosswise(tmp_path: Path) -> None:
    a, b, has_built = tmp_path / "a", tmp_path / "b", threading.Event()

    def build() -> None:
        with build_lock(b):
            has_built.set()

    with build_lock(a):
        command = [sys.executable, "-c", _CROSSWISE, str(b), str(a)]
        crossing = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert crossing.stdout
        assert crossing.stdout.readline() == b"holds\n"
        threading.Thread(target=build, daemon=True).start()
        assert is_waiting(crossing)
        assert not has_built.is_set()
    assert crossing.stdout.readline() == b"builds a\n"
    assert not has_built.is_set()
    assert crossing.stdin
    crossing.stdin.write(b"\n\n")
    assert has_built.wait(30)
    assert end(crossing) == ""
