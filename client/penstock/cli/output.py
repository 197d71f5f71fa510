"""Stdout of commands: the terminal may lack characters, and the reader of a pipe may close it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.text import printable_lines

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_COLUMNS = 100


def prepare_streams() -> None:
    """Let stdout and stderr print any text: a terminal with a limited encoding must not fail a command."""
    os.set_blocking(1, True)  # a full non-blocking pipe would lose output
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
    """End the block without an error if the reader of stdout, such as head, closes the pipe."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()


def report(text: str) -> None:
    """Print lines of a command that continues even if the pipe is closed or the disk is full."""
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
