"""Processes that start in a moment: forks of one process that has made the imports.

Most of a start are imports: more than a second of a server, more than two of what needs torch. A fork is a process of its own
all the same, with its own sockets, signals, environment and exit status.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer

from penstock.cli import main

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "anyio._backends._asyncio",
        "penstock.cli",
        "penstock.cli.bench",
        "penstock.dataset",
        "penstock_server.app",
        "penstock_server.cli",
        "penstock_server.prepare",
        "penstock_server.importing.run",
        "penstock_server.opening",
        "penstock_server.sample",
        "penstock_server.serving.server",
        "pydantic.dataclasses",
        "pydantic.v1",  # FastAPI imports it for its first route
        "uvicorn.lifespan.off",
        "uvicorn.loops.uvloop",
        "uvicorn.protocols.http.httptools_impl",
        "frozen",
    ]
)


class Fork:
    """The command `penstock`, or a script of Python's, with pipes for stdin and stdout and a file for stderr."""

    def __init__(
        self, *arguments: str | Path, script: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._errors = TemporaryFile()  # noqa: SIM115
        (to_read, into), (out, to_write) = _CONTEXT.Pipe(duplex=False), _CONTEXT.Pipe(duplex=False)
        with to_read, into, out, to_write, Connection(os.dup(self._errors.fileno()), readable=False) as errors:
            argv = [str(script or "penstock"), *map(str, arguments)]
            command = (argv, script, dict(environment or os.environ), to_read, to_write, errors)
            self._process = _CONTEXT.Process(target=_run, args=command)
            self._process.start()
            self.stdin, self.stdout = os.fdopen(os.dup(into.fileno()), "w"), os.fdopen(os.dup(out.fileno()))
        assert self._process.pid
        self.pid = self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL: no chance to say goodbye. It is gone, and its ports are free."""
        self._process.kill()
        self._process.join()

    def communicate(self, timeout: float) -> tuple[int, str, str]:
        """Exit status, stdout and stderr, once it has ended by itself, or was killed after so many seconds.

        With all that it started: whoever of them lives on holds its stdout open.
        """
        timer = Timer(timeout, os.killpg, (self.pid, signal.SIGKILL))
        timer.start()
        self.stdin.close()
        with self.stdout:
            out = self.stdout.read()
        self._process.join()
        timer.cancel()
        status = self._process.exitcode
        assert status is not None
        return status, out, self.errors()

    def errors(self) -> str:
        """What it has written to stderr."""
        return os.pread(self._errors.fileno(), 1 << 24, 0).decode()

    def close(self) -> None:
        """Kills it if it lives."""
        self.kill()
        self.stdin.close()
        self.stdout.close()
        self._errors.close()


def _run(argv: list[str], script: Path | None, environment: dict[str, str], *streams: Connection) -> None:
    os.setpgid(0, 0)
    multiprocessing.set_start_method(None, force=True)  # that of Python again, not the one that it was started by
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = argv
    if script:
        runpy.run_path(str(script), run_name="__main__")
    else:
        sys.exit(main())
