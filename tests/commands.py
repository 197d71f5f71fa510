"""The command `penstock` as a person runs it: with pipes, or in a terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from rich.console import Console, RenderableType
from rich.padding import Padding

from forks import Fork

SERVER_PACKAGES = ("penstock_server", "fastapi", "pyarrow", "starlette", "tokenizers", "uvicorn")


def penstock(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process that has made its imports before."""
    with closing(Fork(*arguments, environment={**_plain_environment(), **environment})) as process:
        status, out, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(arguments, status, out, errors)


def penstock_without(modules: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Where these cannot be imported."""
    code = f"import sys; sys.modules |= dict.fromkeys({modules!r}); from penstock.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=120, check=False, env=_plain_environment(),
    )  # fmt: skip


def penstock_in_terminal(columns: int, *arguments: str, **environment: str) -> tuple[int, str]:
    """The exit status, and all that the terminal got."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    command = [sys.executable, "-m", "penstock", *arguments]
    env = {**_plain_environment(), "TERM": "xterm-256color", **environment}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=env)
    os.close(terminal)
    received = bytearray()
    with os.fdopen(reader, "rb", buffering=0) as screen:
        while True:
            try:
                chunk = screen.read(65536)
            except OSError:  # how Linux tells that the other end is closed
                break
            if not chunk:
                break
            received += chunk
    return process.wait(60), received.decode()


def printed(make: Callable[[Console], Iterable[RenderableType]]) -> str:
    """The plain text that a console of 80 columns gets."""
    file = io.StringIO()
    console = Console(file=file, width=80, color_system=None, markup=False, highlight=False)
    for line in make(console):
        console.print(line, soft_wrap=not isinstance(line, Padding))
    return file.getvalue()


def _plain_environment() -> dict[str, str]:
    unwanted = ("COLUMNS", "LINES", "NO_COLOR", "TERM", "RANK", "WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if name not in unwanted}
