"""What a command prints to: a terminal that may not take every letter, or a reader that may leave."""

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
    """A command has printed more than there is room for."""


def print_anything() -> None:
    """From now on stdout and stderr take anything: a terminal without Chinese, or none at all, is no reason to fail."""
    for number in range(3):  # of one that is closed the next file or socket has the number, and what is printed would go there
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.platform != "win32":
        os.set_blocking(1, True)  # a pipe that does not wait would lose what comes while it is full
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115  # a stdout that is closed is None
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextmanager
def readers_may_leave() -> Iterator[None]:
    """What reads stdout, such as head, may have seen enough: the block then ends, and that is no error.

    Raises OutputFull: it is a file, and its disk is full.
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
    """Prints what the exit status of a command sums up: where its reader has left, it goes on to that all the same."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _give_stdout_up()


def report(text: str) -> None:
    """Prints what a command does that goes on with it where nobody can read of it any more: a pipe is left, a disk is full."""
    try:
        print(printable_lines(text), flush=True)
    except OSError:
        _give_stdout_up()


def complain(command: str, text: object) -> None:
    """Prints on stderr what a command has to say of what people named: nothing of it that a terminal would obey."""
    print(f"penstock {command}: {printable_lines(str(text))}", file=sys.stderr)


def _give_stdout_up() -> None:
    """From now on what is printed goes nowhere: Python would write the rest of it at its exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
