"""Of several processes one at a time counts the same."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

import pytest

from penstock_server.index import build_lock as turn_module
from penstock_server.index.build_lock import turn

_OTHER = """
import sys
from pathlib import Path
from penstock_server.index import build_lock as module
module._MARK_SECONDS = 0.0
print("asks", flush=True)
with module.turn(*map(Path, sys.argv[1:])) as get_further:
    print("has its turn", flush=True)
    while sys.stdin.readline() == "get further\\n":
        get_further()
        print("has got further", flush=True)
"""


class Clock:
    """Time that passes where somebody sleeps, half the patience each time; so many times the other gets further meanwhile."""

    def __init__(self, other: subprocess.Popen[str], num_steps: int) -> None:
        self.seconds, self.other, self.num_steps = 1000.0, other, num_steps

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.seconds += turn_module._PATIENCE_SECONDS / 2
        if self.num_steps:
            self.num_steps -= 1
            assert self.other.stdin
            assert self.other.stdout
            self.other.stdin.write("get further\n")
            self.other.stdin.flush()
            assert self.other.stdout.readline() == "has got further\n"


def other(*paths: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _OTHER, *map(str, paths)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "asks\n"
    return process


def says_more(process: subprocess.Popen[str]) -> bool:
    assert process.stdout
    with DefaultSelector() as selector:
        selector.register(process.stdout, EVENT_READ)
        return bool(selector.select(0.5))


def end(process: subprocess.Popen[str]) -> str:
    assert process.stdin
    assert process.stdout
    with process, process.stdin, process.stdout:
        process.stdin.write("\n")
        process.stdin.flush()
        return process.stdout.read()


def test_what_another_process_makes_is_waited_for_and_anything_else_is_not(tmp_path: Path) -> None:
    with turn(tmp_path / "a"):
        waits, goes = other(tmp_path / "a"), other(tmp_path / "b")
        assert goes.stdout
        assert goes.stdout.readline() == "has its turn\n"
        end(goes)
        assert not says_more(waits)
    assert end(waits) == "has its turn\n"


def test_a_process_that_is_killed_in_its_turn_gives_it_up(tmp_path: Path) -> None:
    killed = other(tmp_path / "a")
    assert killed.stdout
    assert killed.stdout.readline() == "has its turn\n"
    waits = other(tmp_path / "a")
    assert not says_more(waits)
    killed.kill()
    killed.communicate()
    assert end(waits) == "has its turn\n"


def test_who_fails_in_its_turn_gives_it_up_and_all_turns_keep_one_file_open(tmp_path: Path) -> None:
    num_open = []
    for number in range(3):
        with pytest.raises(ValueError, match="no such shard"), turn(tmp_path / f"{number}"):
            raise ValueError("no such shard")
        # Of this folder alone: what other tests left open may be closed just now.
        num_open.append(sum(opened.resolve().is_relative_to(tmp_path) for opened in Path("/proc/self/fd").iterdir()))
    assert num_open == [1, 1, 1]
    assert end(other(tmp_path / "0")) == "has its turn\n"


def test_without_a_folder_for_locks_nobody_waits(tmp_path: Path) -> None:
    with turn(tmp_path / "missing" / "a") as get_further:
        get_further()
        assert end(other(tmp_path / "missing" / "a")) == "has its turn\n"


def test_who_gets_no_further_is_waited_for_once_and_who_does_as_long_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [tmp_path / name for name in "abc"]
    holder = other(*paths)
    assert holder.stdout
    assert holder.stdout.readline() == "has its turn\n"
    for num_steps in (0, 20):
        clock = Clock(holder, num_steps)
        monkeypatch.setattr(turn_module, "time", clock)
        began_at = clock.seconds
        with turn(*paths):
            waited_seconds = clock.seconds - began_at
        monkeypatch.undo()
        assert waited_seconds == (1 + num_steps / 2) * turn_module._PATIENCE_SECONDS
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [*paths, *paths]
    end(holder)


def test_each_file_is_waited_for_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holders = [other(tmp_path / name) for name in "ab"]
    for holder in holders:
        assert holder.stdout
        assert holder.stdout.readline() == "has its turn\n"

    class Ending(Clock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if holders[0].poll() is None:
                holders[0].kill()
                holders[0].communicate()

    clock = Ending(holders[1], 0)
    monkeypatch.setattr(turn_module, "time", clock)
    began_at = clock.seconds
    with turn(tmp_path / "a", tmp_path / "b"):
        waited_seconds = clock.seconds - began_at
    monkeypatch.undo()
    assert waited_seconds == 1.5 * turn_module._PATIENCE_SECONDS
    end(holders[1])


def test_who_waits_for_one_that_gets_further_gets_further_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a third process, which waits for what it holds, would take it for one that was stopped."""
    paths, marks = [tmp_path / name for name in "ab"], set[int]()
    holder = other(paths[1])
    assert holder.stdout
    assert holder.stdout.readline() == "has its turn\n"

    class Looking(Clock):
        def sleep(self, seconds: float) -> None:
            content = (tmp_path / ".counting").read_bytes().ljust(turn_module._MARKS)
            marks.add(content[turn_module._place(paths[0]) % turn_module._MARKS])
            super().sleep(seconds)

    monkeypatch.setattr(turn_module, "time", Looking(holder, 20))
    with turn(*paths):
        assert len(marks) >= 15
    monkeypatch.undo()
    end(holder)


def test_what_is_there_already_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = other(tmp_path / "a")
    assert holder.stdout
    assert holder.stdout.readline() == "has its turn\n"
    (tmp_path / "a").touch()
    monkeypatch.setattr(time, "sleep", pytest.fail)
    with turn(tmp_path / "a"):
        end(holder)
