"""Starts and ends processes, and measures their CPU time and memory, with all their descendants."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

_TICKS = os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36


class ProcessFailed(Exception):
    """A process failed; the message is its last line of output."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that listens at `address`."""

    address: str
    pid: int


def adopt_orphans() -> None:
    """Make this process adopt descendants whose parent ends, so that their CPU time is not lost."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of all its descendants until now, in seconds."""
    table = _table()
    return sum(table[each][1] for each in (pid, *_below(pid, table)) if each in table)


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process and of its descendants, in bytes."""
    total = own_anonymous_bytes(pid)
    for child in _below(pid, _table()):
        with suppress(FileNotFoundError, ProcessLookupError, ValueError):  # the process has just ended
            total += own_anonymous_bytes(child)
    return total


def own_anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of one process, in bytes."""
    text = Path(f"/proc/{pid}/status").read_text()
    [kilobytes] = re.findall(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE)
    return int(kilobytes) * 1024


def end_below(pid: int) -> None:
    """Kill the descendants of a process."""
    for each in _below(pid, _table()):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def run(command: Sequence[str], *, timeout_seconds: float, environment: Mapping[str, str] | None = None) -> str:
    """Run a command in a new session, and return its stdout.

    Raises ProcessFailed: it failed, or did not end in time. All processes that it started are then killed.
    """
    process = _start(command, environment, subprocess.PIPE)
    try:
        out, errors = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        _kill(process)
        raise ProcessFailed(f"did not end within {timeout_seconds:.0f} seconds") from None
    except BaseException:
        _kill(process)
        raise
    if process.returncode:
        raise ProcessFailed(last_words(errors) or f"ended with status {process.returncode}")
    return out


@contextmanager
def serving(
    command: Sequence[str], *, timeout_seconds: float = 120, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run a server that prints its address, http://..., https://... or grpc://..., on stdout when it is ready.

    Raises ProcessFailed: it ended before it printed an address, or took too long.
    """
    with TemporaryFile("w+") as errors, _start(command, environment, errors) as process:
        try:
            yield Server(_address(process, errors, timeout_seconds), process.pid)
        finally:
            process.terminate()
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                _kill(process)


def _address(process: subprocess.Popen[str], errors: IO[str], timeout_seconds: float) -> str:
    assert process.stdout
    timer = threading.Timer(timeout_seconds, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            if found := re.search(r"(?:https?|grpc)://[^\s/]+:\d+", line):
                return found[0].replace("localhost", "127.0.0.1")
    finally:
        timer.cancel()
    process.wait()
    errors.seek(0)
    raise ProcessFailed(last_words(errors.read()) or f"ended with status {process.returncode} before it served")


def last_words(errors: str) -> str:
    """Return the last line of the error output."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed|NotFound)\b", line)]
    return (named or lines or [""])[-1][:300]


def _start(command: Sequence[str], environment: Mapping[str, str] | None, errors: IO[str] | int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        errors="replace",
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[str]) -> None:
    end_below(process.pid)
    process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream:
            stream.close()


def _table() -> dict[int, tuple[int, float]]:
    """Return, for every process, its parent and the CPU seconds of itself and its ended children."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                stat = Path(entry.path, "stat").read_text()
                # The name, in brackets, may contain blanks and brackets.
                fields = stat[stat.rindex(")") + 2 :].split()
                found[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:15])) / _TICKS
    return found


def _below(pid: int, table: Mapping[int, tuple[int, float]]) -> list[int]:
    found: list[int] = []
    parents = {pid}
    while parents:
        parents = {child for child, (parent, _) in table.items() if parent in parents}
        found += parents
    return found
