"""Stdout of commands: the terminal may lack characters, and the reader of a pipe may close it."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.text import printable_lines

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_COLUMNS = 100


class OutputFull(PenstockError):
    """A command's output does not fit on the disk."""


def prepare_streams() -> None:
    """Make stdout and stderr accept any text: a limited encoding or a closed stream must not fail a command."""
    for number in range(3):  # otherwise the next file or socket would get a closed stream's number, and receive the output
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.platform != "win32":
        os.set_blocking(1, True)  # a full non-blocking pipe would lose output
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115  # Python sets a closed stdout to None
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def stdout_console() -> Console:
    """Return a console for stdout: colours on a terminal only, 100 columns in a pipe, no markup.

    NO_COLOR turns colours off. So does a notebook cell, which passes for a terminal but does not dim text.
    """
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:  # rich's own would change the exit status
            _discard_stdout()

    is_pipe = not sys.stdout.isatty()
    is_plain = any(map(os.environ.get, ("NO_COLOR", "JPY_PARENT_PID")))
    return _Console(
        color_system=None if is_plain else "auto",
        width=_PIPE_COLUMNS if is_pipe and "COLUMNS" not in os.environ else None,
        markup=False,
        highlight=False,
        emoji=False,
    )


@contextmanager
def allow_closed_pipe() -> Iterator[None]:
    """End the block without an error if the reader of stdout, such as head, closes the pipe.

    Raises OutputFull: stdout is a file on a full disk.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _discard_stdout()
        raise OutputFull(f"the output cannot be written: {error.strerror}") from None


def tell(text: str) -> None:
    """Print a line before the exit status; if the reader has closed the pipe, the command continues."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _discard_stdout()


def report(text: str) -> None:
    """Print progress of a command that continues even if the pipe is closed or the disk is full."""
    try:
        print(printable_lines(text), flush=True)
    except OSError:
        _discard_stdout()


def complain(command: str, text: object) -> None:
    """Print an error of a command on stderr, with control characters escaped: the text may quote user input."""
    print(f"penstock {command}: {printable_lines(str(text))}", file=sys.stderr)


def _discard_stdout() -> None:
    """Discard all further output: otherwise Python would write the rest at exit, and print an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
