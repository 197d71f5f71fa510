"""Stdout of commands: the terminal may lack characters, and the reader of a pipe may close it."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import PenstockError
from penstock.printable import printable_lines


class OutputFull(PenstockError):
    """A command's output does not fit on the disk."""


def print_anything() -> None:
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


@contextmanager
def readers_may_leave() -> Iterator[None]:
    """End the block without an error if the reader of stdout, such as head, closes the pipe.

    Raises OutputFull: stdout is a file on a full disk.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _give_stdout_up()
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _give_stdout_up()
        raise OutputFull(f"what is printed cannot be written: {error.strerror}") from None


def tell(text: str) -> None:
    """Print a line before the exit status; if the reader has closed the pipe, the command continues."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _give_stdout_up()


def report(text: str) -> None:
    """Print progress of a command that continues even if the pipe is closed or the disk is full."""
    try:
        print(printable_lines(text), flush=True)
    except OSError:
        _give_stdout_up()


def complain(command: str, text: object) -> None:
    """Print an error of a command on stderr, with control characters escaped: the text may quote user input."""
    print(f"penstock {command}: {printable_lines(str(text))}", file=sys.stderr)


def _give_stdout_up() -> None:
    """Discard all further output: otherwise Python would write the rest at exit, and print an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
