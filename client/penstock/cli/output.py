"""How commands print and end: the terminal may lack characters, and the reader of a pipe may close it."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.text import printable_lines

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_COLUMNS = 100


class CommandError(Exception):
    """A command cannot do what it was asked to do. The message says why."""


def set_run(
    command: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int],
    *errors: type[Exception],
    only_prints: bool = True,
) -> None:
    """Set what a command runs. Its `errors`, PenstockError and CommandError become one line on stderr, and status 2.

    A command that `only_prints` ends without an error when the reader of its output, such as head, closes the pipe.
    """
    name = command.prog.partition(" ")[2]  # such as serve, or token create
    refusals: tuple[type[Exception], ...] = (PenstockError, CommandError, *errors)

    def run_command(arguments: argparse.Namespace) -> int:
        status = 0
        try:
            status = run(arguments)
            if only_prints:
                sys.stdout.flush()
        except BrokenPipeError:
            if not only_prints:  # the pipe may be another one, and the work unfinished
                raise
            _discard_stdout()
        except refusals as error:
            complain(name, error)
            return 2
        return status

    command.set_defaults(run=run_command)


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
