"""Trainers: processes that run a script as `python script.py` does, and begin in a moment.

Most of a trainer's start are imports. One process makes them, and forks off another for each script, which ends as any
interpreter does.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

_SECONDS = 60.0  # for what takes a moment unless it hangs


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
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

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

    import_module("frozen")
    with socket.socket(fileno=int(sys.argv[1])) as tests:
        script = _next_script(tests)
    if script:
        # In the namespace of the process, as any script: what it leaves there lives until the interpreter's very end.
        exec(compile(script.read_text(), script, "exec"))
