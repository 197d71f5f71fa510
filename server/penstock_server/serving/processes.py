"""Supervisor of several server processes on one port: it opens the socket and restarts processes that die.

Each process has a separate catalog. All accept from one socket, so another process takes the waiting connections of a process
that dies. The supervisor imports no large module.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from penstock.cli.output import prepare_streams
from penstock_server.logs import begin_log
from penstock_server.problems import DatasetInvalid
from penstock_server.serving.accepting import WorkerSlot
from penstock_server.settings import Settings, SettingsError

log = logging.getLogger("penstock.processes")

_GRACE_SECONDS = 6.0  # for responses being sent; a process itself stops after three
_PR_SET_PDEATHSIG = 1
_STEADY_SECONDS = 5.0  # a process that served for longer than this is replaced at once
_SILENT_SECONDS = 10.0  # after this long without a heartbeat, a process is logged as hung
_FIRST_DELAY_SECONDS, _MAX_DELAY_SECONDS = 0.5, 16.0

# A fork would copy locks of pyarrow and tokenizers, possibly held by threads that the child does not have.
_context = multiprocessing.get_context("spawn")


def serve_with_several(settings: Settings, listener: socket.socket) -> int:
    """Serves until a stop signal. Returns the exit status, nonzero if no process can start."""
    begin_log(tells_news=False)
    with _stop_signals() as stop:
        began, begins = _context.Pipe(duplex=False)
        seats = WorkerSlot.of(settings.processes)
        first = _Child.start(settings, listener, seats[0], begins)  # alone: footers are read once, errors printed once
        begins.close()
        children = [first]
        try:
            if stop in wait([began, stop]):
                return 0
            try:
                settings = replace(settings, cache_bytes=began.recv())
            except EOFError:
                first.process.join()
                status = first.process.exitcode or 1
                if status > 0:
                    return status
                print(  # the process could not print an error itself
                    f"penstock serve: the first process {_how_it_ended(status)}, before it could serve, so nothing is served.",
                    file=sys.stderr,
                )
                return 1
            children += [_Child.start(settings, listener, seat) for seat in seats[1:]]
            while not _is_told_to_stop(stop, children):
                children = [child.followed(settings, listener).watched() for child in children]
            return 0
        finally:
            _end(children)


@dataclass(frozen=True, slots=True)
class _Child:
    """A server process. If it dies after it has served for a while, a replacement starts at once.

    delay_seconds  delay of the replacement if this process dies soon after its start
    follows_at     start time of the replacement, by the monotonic clock; None while this process appears alive
    is_silent      whether the process has been logged as hung
    """

    process: SpawnProcess
    seat: WorkerSlot
    started_at: float
    delay_seconds: float = _FIRST_DELAY_SECONDS
    follows_at: float | None = None
    is_silent: bool = False

    @staticmethod
    def start(settings: Settings, listener: socket.socket, seat: WorkerSlot, begins: Connection | None = None) -> _Child:
        arguments = (settings, listener, seat, begins)
        process = _context.Process(target=_serve, args=arguments, name="penstock-serve", daemon=True)
        process.start()
        return _Child(process, seat, time.monotonic())

    def followed(self, settings: Settings, listener: socket.socket) -> _Child:
        """Returns a replacement for a dead process when its delay has passed; until then this process."""
        if self.process.is_alive():
            return self
        died = self if self.follows_at else self._died()
        assert died.follows_at
        return died if time.monotonic() < died.follows_at else died._replaced(settings, listener)

    def watched(self) -> _Child:
        """Logs when the process starts or stops hanging: it is alive and has served, but sends no heartbeat."""
        is_silent = not self.follows_at and self.started_at < self.seat.told_at < time.monotonic() - _SILENT_SECONDS
        if is_silent and not self.is_silent:
            log.warning(
                "server process %d hangs, or was stopped: it has done nothing for %d seconds. The others take its connections; "
                "if it stays so, kill it, and another takes its place.", self.process.pid, _SILENT_SECONDS,
            )  # fmt: skip
        elif self.is_silent and not is_silent:
            log.warning("server process %d is back", self.process.pid)
        return replace(self, is_silent=is_silent)

    def _died(self) -> _Child:
        now = time.monotonic()
        has_served = self.seat.told_at - self.started_at > _STEADY_SECONDS
        delay = 0.0 if has_served else self.delay_seconds
        log.warning(
            "server process %d %s; another takes its place%s",
            self.process.pid,
            _how_it_ended(self.process.exitcode or 0),
            f" in {delay:g} seconds" if delay else "",
        )
        longer = min(2 * self.delay_seconds, _MAX_DELAY_SECONDS) if delay else _FIRST_DELAY_SECONDS
        return replace(self, delay_seconds=longer, follows_at=now + delay, is_silent=False)

    def _replaced(self, settings: Settings, listener: socket.socket) -> _Child:
        try:
            return replace(_Child.start(settings, listener, self.seat), delay_seconds=self.delay_seconds)
        except OSError as error:  # the other processes go on
            log.warning("no process could be started: %s", error.strerror)
            return replace(self, started_at=time.monotonic(), follows_at=None)


def _how_it_ended(exit_code: int) -> str:
    """Describes how a process ended; a negative exit code is the signal that ended it."""
    if exit_code >= 0:
        return f"ended with status {exit_code}"
    name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
    return f"was ended by {name}{', as the kernel does where memory runs out' if name == 'SIGKILL' else ''}"


def _is_told_to_stop(stop: socket.socket, children: list[_Child]) -> bool:
    """Waits until a stop signal (True), or until a process dies, is due for replacement, or is due for a check (False)."""
    due = [child.follows_at for child in children if child.follows_at]
    seconds = max(0.0, min(_SILENT_SECONDS, *(at - time.monotonic() for at in due))) if due else _SILENT_SECONDS
    return stop in wait([stop, *(child.process.sentinel for child in children if not child.follows_at)], seconds)


def _end(children: list[_Child]) -> None:
    for child in children:
        child.process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for child in children:
        child.process.join(max(0.0, deadline - time.monotonic()))
        child.process.kill()
        child.process.join()


@contextmanager
def _stop_signals() -> Iterator[socket.socket]:
    """Yields a socket that becomes readable on SIGINT or SIGTERM."""
    stop, told = socket.socketpair()
    with stop, told:
        told.setblocking(False)

        def tell(*_: object) -> None:
            with suppress(BlockingIOError):
                told.send(b"!")

        before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield stop
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _serve(settings: Settings, listener: socket.socket, seat: WorkerSlot, begins: Connection | None) -> None:
    """Runs a server process until a stop signal or the end of its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the supervisor sends SIGTERM
    _die_with_parent()
    threading.Thread(target=_end_with_parent, name="penstock-parent", daemon=True).start()
    prepare_streams()
    from penstock_server.serving.serve import run

    def begin(cache_bytes: int) -> None:
        if begins:
            begins.send(cache_bytes)
            begins.close()

    try:
        run(settings, listener, greet=begins is not None, begin=begin, seat=seat)
    except (SettingsError, DatasetInvalid) as error:
        print(f"penstock serve: {error}", file=sys.stderr)
        sys.exit(2)


def _die_with_parent() -> None:
    """Asks Linux to kill this process with its parent even while stopped; otherwise it would keep the port."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    wait([parent.sentinel])
    os._exit(1)  # at once: the parent's successor needs the port
