"""Several server processes on one port: a supervisor opens the socket and replaces workers that die.

All workers accept from one listening socket, so the others accept the connections that wait when one dies. Each has its own
catalog. The supervisor imports no large module.
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
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from penstock.cli.output import prepare_streams
from penstock_server.logs import begin_log, complain_at_start
from penstock_server.monitoring.place import Place, shared_folder, unusable
from penstock_server.problems import DatasetInvalid
from penstock_server.settings import Settings, SettingsError

log = logging.getLogger("penstock.workers")

_STOP_SECONDS = 6.0  # after the drain, for responses in progress; a worker itself stops after three
_STEADY_SECONDS = 5.0  # a worker that lived longer is replaced immediately
_MIN_DELAY_SECONDS, _MAX_DELAY_SECONDS = 0.5, 16.0
_PR_SET_PDEATHSIG = 1

# A fork would copy locks of pyarrow and tokenizers, possibly held by threads that the child does not have.
_context = multiprocessing.get_context("spawn")


def serve_with_workers(settings: Settings, listener: socket.socket) -> int:
    """Serve until a stop signal. Return the exit status, nonzero if no worker can serve."""
    with _stop_signals() as stop, shared_folder() as folder:
        # The first worker starts alone: footers are read once, and errors printed once.
        ready, send_ready = _context.Pipe(duplex=False)
        workers = [ServerProcess(settings, listener, Place(folder, 0), send_ready)]
        send_ready.close()
        try:
            if stop in wait([ready, stop]):
                return 0
            try:
                settings = replace(settings, cache_bytes=ready.recv())
            except EOFError:
                return workers[0].report_failed_start()
            workers[0].settings = settings
            workers += [ServerProcess(settings, listener, Place(folder, slot)) for slot in range(1, settings.processes)]
            if settings.tokens or settings.tls_cert:
                signal.signal(signal.SIGHUP, partial(_pass_on, workers))
            while stop not in wait(
                [stop, *(worker.process.sentinel for worker in workers if not worker.due_at)], _wait(workers)
            ):
                for worker in workers:
                    worker.check()
            return 0
        finally:
            _stop(workers, stop, settings.drain_seconds)


class ServerProcess:
    """One server process. If it dies, another takes its place: immediately, or after a delay if it died young.

    `due_at` is the start time of the replacement, by the monotonic clock, and 0.0 while the process is alive. The replacement
    goes on with the counters at its place.
    """

    def __init__(self, settings: Settings, listener: socket.socket, place: Place, ready: Connection | None = None) -> None:
        self.settings, self.due_at, self._place = settings, 0.0, place
        self._listener, self._delay_seconds = listener, _MIN_DELAY_SECONDS
        self._start(ready)

    def _start(self, ready: Connection | None = None) -> None:
        self.process: SpawnProcess = _context.Process(
            target=_serve, args=(self.settings, self._listener, self._place, ready), name="penstock-serve", daemon=True
        )
        self.process.start()
        self._started_at = time.monotonic()

    def check(self) -> None:
        """Notice that the process has died, and start its replacement when that is due."""
        now = time.monotonic()
        if not self.due_at and not self.process.is_alive():
            died_young = now - self._started_at < _STEADY_SECONDS
            delay = self._delay_seconds if died_young else 0.0
            self._delay_seconds = min(2 * self._delay_seconds, _MAX_DELAY_SECONDS) if died_young else _MIN_DELAY_SECONDS
            self.due_at = now + delay
            log.warning(
                "server process %d %s; another starts in %g seconds",
                self.process.pid,
                ending(self.process.exitcode or 0),
                delay,
            )
        if self.due_at and self.due_at <= now:
            try:
                self._start()
                self.due_at = 0.0
            except OSError as error:  # the other workers go on
                log.warning("no process can be started: %s", error.strerror)
                self.due_at = now + self._delay_seconds

    def report_failed_start(self) -> int:
        """Return the exit status of a first worker that could not serve. It has printed why, unless a signal ended it."""
        self.process.join()
        status = self.process.exitcode or 1
        if status < 0:
            complain_at_start(self.settings.log_format, f"the first process {ending(status)} before it could serve.")
        return max(status, 1)


def _pass_on(workers: list[ServerProcess], number: int, _: object) -> None:
    for worker in workers:
        if worker.process.pid and not worker.due_at:
            with suppress(ProcessLookupError):
                os.kill(worker.process.pid, number)


def ending(exit_code: int) -> str:
    """Describe how a process ended; a negative exit code is the signal that ended it."""
    if exit_code >= 0:
        return f"ended with status {exit_code}"
    name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
    return f"was ended by {name}{' (the kernel sends it when memory runs out)' if name == 'SIGKILL' else ''}"


def _wait(workers: list[ServerProcess]) -> float | None:
    """Return the seconds until the next replacement is due; None if all workers are alive."""
    due = [worker.due_at for worker in workers if worker.due_at]
    return max(0.0, min(due) - time.monotonic()) if due else None


def _stop(workers: list[ServerProcess], stop: socket.socket, drain_seconds: float) -> None:
    """Stop the workers. They drain first, unless the signal is SIGINT, or another one follows."""
    for worker in workers:
        worker.process.terminate()
    deadline = time.monotonic() + drain_seconds + _STOP_SECONDS
    num_signals = 0
    while alive := [worker.process for worker in workers if worker.process.is_alive()]:
        ended = wait([stop, *(process.sentinel for process in alive)], max(0.0, deadline - time.monotonic()))
        if stop in ended:
            num_signals += 1
            if stop.recv(1)[0] == signal.SIGINT or num_signals > 1:
                deadline = min(deadline, time.monotonic() + _STOP_SECONDS)
                for process in alive:
                    assert process.pid
                    os.kill(process.pid, signal.SIGINT)  # each ignores it unless it serves; SIGTERM ends it then
        elif not ended:
            break
    for worker in workers:
        worker.process.kill()
        worker.process.join()


@contextmanager
def _stop_signals() -> Iterator[socket.socket]:
    """Yield a socket from which each SIGINT or SIGTERM can be read, a byte that is its number."""
    stop, sender = socket.socketpair()
    with stop, sender:
        sender.setblocking(False)

        def send(number: int, _: object) -> None:
            with suppress(BlockingIOError):
                sender.send(bytes([number]))

        before = {number: signal.signal(number, send) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield stop
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _serve(settings: Settings, listener: socket.socket, place: Place, ready: Connection | None) -> None:
    """Run a worker until a stop signal or the end of its parent. The first one, with `ready`, prints the greeting."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the supervisor sends SIGTERM
    with suppress(AttributeError, OSError):  # Linux kills this process with its parent, even while it is stopped
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    from penstock_server.monitoring.metrics import share_values
    from penstock_server.recipes.encoder_process import fork_nursery
    from penstock_server.serving.server import run

    fork_nursery()
    threading.Thread(target=_end_with_parent, name="penstock-parent", daemon=True).start()
    prepare_streams()
    begin_log(settings.log_format)

    def send_ready(cache_bytes: int) -> None:
        if ready:
            ready.send(cache_bytes)
            ready.close()

    try:
        try:
            share_values(place.folder, place.slot)
        except OSError as error:
            raise unusable(error) from error
        run(settings, listener, is_first=ready is not None, ready=send_ready, place=place)
    except (SettingsError, DatasetInvalid) as error:
        complain_at_start(settings.log_format, error)
        sys.exit(2)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    wait([parent.sentinel])
    os._exit(1)  # immediately: the parent's successor needs the port
