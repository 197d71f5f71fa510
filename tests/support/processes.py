"""Processes that start quickly, and what they must not leave behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from typing import Any

from penstock.cli import main

_CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [
    "anyio._backends._asyncio",
    "penstock.cli",
    "penstock.cli.bench",
    "penstock.dataset",
    "penstock_server.app",
    "penstock_server.cli",
    "penstock_server.prepare",
    "penstock_server.importing.run",
    "penstock_server.sample",
    "penstock_server.serving.server",
    "pydantic.dataclasses",
    "pydantic.v1",  # FastAPI imports it for its first route
    "uvicorn.lifespan.off",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.httptools_impl",
]
_CONTEXT.set_forkserver_preload(PRELOADED)
_SECONDS = 60.0  # for what takes a moment unless it hangs
MIB = 1 << 20


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until this holds; fail after so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.01)


def put_result(queue: SimpleQueue[Any], function: Callable[..., object], *arguments: object) -> None:
    """Put what a function returns into a queue, from a process that multiprocessing has started."""
    queue.put(function(*arguments))


def with_support() -> dict[str, str]:
    """The environment of a new process of Python that imports `support`: pytest puts it on sys.path alone."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": paths.rstrip(os.pathsep)}


class Fork:
    """The command `penstock`, or a script of Python's, with pipes for stdin and stdout and a file for stderr.

    Its working directory is `folder`. With `terminal`, the descriptor of one, stdin, stdout and stderr are that.
    """

    def __init__(
        self,
        *arguments: str | Path,
        script: Path | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        terminal: int | None = None,
    ) -> None:
        self._errors = TemporaryFile()  # noqa: SIM115
        (to_read, into), (out, to_write) = _CONTEXT.Pipe(duplex=False), _CONTEXT.Pipe(duplex=False)
        with to_read, into, out, to_write, Connection(os.dup(self._errors.fileno()), readable=False) as errors:
            argv = [str(script or "penstock"), *map(str, arguments)]
            streams = [stream.fileno() if terminal is None else terminal for stream in (to_read, to_write, errors)]
            duplicates = [Connection(os.dup(descriptor)) for descriptor in streams]
            command = (argv, script, dict(environment or os.environ), folder, *duplicates)
            self._process = _CONTEXT.Process(target=_run_fork, args=command)
            self._process.start()
            for duplicate in duplicates:
                duplicate.close()
            self.stdin, self.stdout = os.fdopen(os.dup(into.fileno()), "w"), os.fdopen(os.dup(out.fileno()))
        assert self._process.pid
        self.pid = self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def is_alive(self) -> bool:
        """Whether it runs; fails with its stderr if it has ended."""
        assert self._process.exitcode is None, self.errors()
        return True

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


def _run_fork(
    argv: list[str], script: Path | None, environment: dict[str, str], folder: Path | None, *streams: Connection
) -> None:
    gc.freeze()  # a collection would write to, and so copy, all that the imports left
    os.setpgid(0, 0)
    multiprocessing.set_start_method(None, force=True)  # that of Python again, not the one that it was started by
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR may be another one
    os.chdir(folder or ".")
    sys.argv[:] = argv
    if script:
        runpy.run_path(str(script), run_name="__main__")
    else:
        sys.exit(main())


class Trainer:
    """A script that runs: `listen` gives its next line, `tell` gives it one, `end` waits for its exit."""

    def __init__(self, forks: socket.socket, script: Path) -> None:
        self._forks = forks
        (their_in, our_in), (our_out, their_out), (our_err, their_err) = os.pipe(), os.pipe(), os.pipe()
        socket.send_fds(forks, [os.fsencode(script)], [their_in, their_out, their_err])
        self.pid = int(forks.recv(64))
        for descriptor in (their_in, their_out, their_err):
            os.close(descriptor)
        self._in, self._err = os.fdopen(our_in, "w"), os.fdopen(our_err)
        self._out = os.fdopen(our_out, "rb", buffering=0)  # `select` does not see what a buffer took

    def listen(self) -> str:
        """The next line that it prints."""
        assert select.select([self._out], [], [], _SECONDS)[0], "the trainer hangs"
        return self._out.readline().decode().rstrip("\n")

    def tell(self, line: str = "") -> None:
        """Gives it a line to read."""
        print(line, file=self._in, flush=True)

    def end(self) -> tuple[int, str, str]:
        """Its exit status, negative for a signal, and what it wrote meanwhile to stdout and stderr. Kills one that hangs."""
        self._forks.send(str(self.pid).encode())
        exits = bool(select.select([self._forks], [], [], _SECONDS)[0])
        if not exits:
            os.kill(self.pid, signal.SIGKILL)
        status = int(self._forks.recv(64))
        with self._in, self._out, self._err:
            out, err = self._out.read().decode(), self._err.read()
        assert exits, f"the trainer did not exit:\n{out}{err}"
        return status, out, err


class Trainers:
    """Runs scripts, several at a time. Warnings are errors in them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._num_scripts = folder, 0
        self._forks, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            # Who forks beside threads is warned by Python 3.12.
            command = [sys.executable, "-W", "error", "-W", "ignore:This process", __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=with_support())

    def run(self, code: str) -> Trainer:
        """Runs what is to be the text of a script."""
        script = self._folder / f"trainer{self._num_scripts}.py"
        self._num_scripts += 1
        script.write_text(code)
        return Trainer(self._forks, script)

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, *_: object) -> None:
        self._forks.close()
        self._process.wait(_SECONDS)


def _next_script(tests: socket.socket) -> Path | None:
    """In a process that was forked off, the script that it is to run. In the one that forks None, when there are no more."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(tests, 4096, 3)
        if not message:
            return None
        if not descriptors:
            _, status = os.waitpid(int(message), 0)
            tests.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        child = os.fork()
        if child == 0:
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            return Path(os.fsdecode(message))
        for descriptor in descriptors:
            os.close(descriptor)
        tests.send(str(child).encode())


if __name__ == "__main__":
    from penstock import RemoteDataset  # noqa: F401 (it imports torch)

    gc.freeze()  # else each fork would write to, and so copy, all that the imports left
    with socket.socket(fileno=int(sys.argv[1])) as tests:
        script = _next_script(tests)
    if script:
        # In the namespace of the process, as any script: what it leaves there lives until the interpreter's very end.
        exec(compile(script.read_text(), script, "exec"))


def held() -> Counter[str]:
    """The names of the threads, and the sockets as the system numbers them."""
    return Counter(thread.name for thread in threading.enumerate()) + Counter(_sockets())


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if a thread or a socket is there afterwards that was not there before."""
    before = held()
    yield
    left = held() - before
    assert not left, f"left: {', '.join(sorted(left))}"


def _sockets() -> Iterator[str]:
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder's own, which is closed by now
            if (target := str(descriptor.readlink())).startswith("socket:"):
                yield target


def anonymous_bytes(pid: int) -> int:
    [kib] = re.findall(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(kib) * 1024


class Watch:
    """The most anonymous memory that a process had while it was watched."""

    def __init__(self, pid: int) -> None:
        self.first = self.peak = anonymous_bytes(pid)
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(0.005):
            self.peak = max(self.peak, anonymous_bytes(self._pid))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def without_process(line: str) -> str:
    """The line without the rank and the host in it: another test of this process may have named a rank."""
    return re.sub(r"^penstock: (rank \d+ )?on \S+: ", "penstock: ", line)
