"""One process at a time counts the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

import pytest

from penstock_server.index.counting import build_lock

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


def test_a_process_waits_for_the_files_that_another_makes_and_for_no_others(tmp_path: Path) -> None:
    with build_lock(tmp_path / "a"):
        waits, goes_on = other(tmp_path / "a"), other(tmp_path / "b")
        assert end(goes_on) == "builds\n"
        assert is_waiting(waits)
    assert end(waits) == "builds\n"


def test_a_lock_ends_with_its_process_and_with_an_error(tmp_path: Path) -> None:
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


def test_nothing_waits_for_a_file_that_exists_or_in_a_folder_without_locks(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    for path in (tmp_path / "a", tmp_path / "missing" / "b"):
        with build_lock(path):
            assert end(other(path)) == "builds\n"
