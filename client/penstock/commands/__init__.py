"""The client's command: peek. What a command needs is imported when it runs, so that --help stays quick."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable
from functools import partial

from penstock.commands.arguments import add_spec_options
from penstock.errors import PenstockError

Run = Callable[[argparse.Namespace], int]

_ADDRESS = "http://HOST:PORT/DATASET, or the URL of a batch"


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the client's commands to `penstock`."""
    peek = commands.add_parser(
        "peek",
        help="show what is in a batch",
        description="Shows one batch as a table: the text of every sequence, dimmed where no loss is taken, its tokens and its "
        "padding, and the rows that it comes from.",
        allow_abbrev=False,
    )
    peek.add_argument("address", metavar="ADDRESS", help=_ADDRESS)
    peek.add_argument("--step", type=_count, metavar="N", help="which batch of the epoch (default: 0)")
    peek.add_argument("--epoch", type=_count, metavar="N", help="from 0; each has an order of its own (default: 0)")
    peek.add_argument("--rank", type=_count, metavar="N", help="from 0, below world_size (default: 0)")
    peek.add_argument("--lines", type=_count, metavar="N", default=4, help="lines of text of each row; 0: all (default: 4)")
    add_spec_options(peek)
    peek.set_defaults(run=partial(_run, "peek"))


def _run(name: str, arguments: argparse.Namespace) -> int:
    """Runs a command; what the client raises is one line, without a traceback, and status 2."""
    run = _load()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show Chinese is no reason to fail
    try:
        status = run(arguments)
        sys.stdout.flush()
    except PenstockError as error:
        from penstock.commands.terminal import printable

        print(f"penstock {name}: {printable(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # what reads this, such as head, has seen enough
        # Python would complain when it flushes at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _load() -> Run:
    from penstock.commands.peek import run

    return run


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 16):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number from 0")
    return int(text)
