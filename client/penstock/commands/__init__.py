"""The client's commands: peek, bench, doctor, audit. What one needs is imported when it runs, so that --help stays quick."""

from __future__ import annotations

import argparse
import warnings
from functools import partial
from importlib import import_module

from penstock.commands.arguments import add_spec_options, whole_number
from penstock.display.stdout import complain, readers_may_leave
from penstock.errors import PenstockError
from penstock.text import without_passwords

_ADDRESS = "http://HOST:PORT/DATASET, or the URL of a batch"


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the client's commands to `penstock`."""
    peek = commands.add_parser(
        "peek",
        help="show what is in a batch",
        description="Shows one batch as a table: the text of every sample, dimmed where it has no loss, its tokens and its "
        "padding, and the rows that it comes from.",
        allow_abbrev=False,
    )
    peek.add_argument("address", metavar="ADDRESS", help=_ADDRESS)
    peek.add_argument("--step", type=whole_number, metavar="N", help="which batch of the epoch (default: 0)")
    peek.add_argument("--epoch", type=whole_number, metavar="N", help="which epoch, from 0 (default: 0)")
    peek.add_argument("--rank", type=whole_number, metavar="N", help="which rank, from 0 (default: 0)")
    peek.add_argument("--lines", type=whole_number, metavar="N", default=4, help="lines of text a row, 0 for all (default: 4)")
    add_spec_options(peek)
    peek.set_defaults(run=partial(_run, "peek"))

    bench = commands.add_parser(
        "bench",
        help="measure how fast this machine can pull batches",
        description="Pulls batches as a training loop does, and says how many tokens a second this client could feed, and how "
        "long a loop would wait for them.",
        allow_abbrev=False,
    )
    bench.add_argument("address", metavar="ADDRESS", help=_ADDRESS)
    bench.add_argument("--seconds", type=_amount, metavar="N", default=10.0, help="how long to measure (default: 10)")
    bench.add_argument(
        "--target-tokens-per-second",
        type=_amount,
        metavar="N",
        help="tokens a second that the model takes, such as 250k: then measures once more, at that pace",
    )
    bench.add_argument("--epoch", type=whole_number, metavar="N", help="the first epoch to pull (default: 0)")
    bench.add_argument("--rank", type=whole_number, metavar="N", help="which rank, from 0 (default: 0)")
    bench.add_argument(
        "--no-tensors", action="store_true", help="only fetch and check, without torch: the speed of network and server alone"
    )
    bench.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_spec_options(bench, without=("offset",))
    bench.set_defaults(run=partial(_run, "bench"))

    doctor = commands.add_parser(
        "doctor",
        help="find what is wrong between here and a server",
        description="Checks versions, clock, latency, bandwidth, pinned memory, datasets and the block cache, and says what to "
        "do. The exit status is 1 if something fails.",
        allow_abbrev=False,
    )
    doctor.add_argument("address", metavar="ADDRESS", help="http://HOST:PORT, or http://HOST:PORT/DATASET to check only that")
    doctor.set_defaults(run=partial(_run, "doctor"))

    audit = commands.add_parser(
        "audit",
        help="prove that a run left out no sample that was due, and trained on none twice",
        description="Reads the ledgers of a run, of all its ranks and starts, and proves that each sample that was due was "
        "trained on exactly once an epoch, or lists those that were not. It needs no server. The exit status is 0 for a "
        "proof, 1 for none, and 2 if a ledger cannot be read or the server does not answer.",
        allow_abbrev=False,
    )
    audit.add_argument(
        "ledgers", metavar="LEDGER", nargs="+", help="as given to RemoteDataset, for the files of all ranks; or single files"
    )
    audit.add_argument(
        "--assume-fresh-weights",
        action="store_true",
        help="treat a start that loaded no state as one that did: what was trained before beyond its first step is lost",
    )
    audit.add_argument(
        "--server", metavar="URL", action="append", help="also ask this server whether it still gives the same batches"
    )
    audit.add_argument("--spot-check", metavar="N", help="how many batches to ask it for, at random, or 'all' (default: 100)")
    audit.add_argument("--rows", action="store_true", help="ask it which rows the missing batches hold, and list them")
    audit.add_argument("--json", action="store_true", help="print the report as JSON")
    audit.set_defaults(run=partial(_run, "audit"))


def _run(name: str, arguments: argparse.Namespace) -> int:
    """Runs a command; what the client raises is one line, without a traceback, and status 2."""
    command = import_module(f"penstock.commands.{name}")
    # As a line of its own: where in this package a warning comes from is nothing to a person at a terminal.
    warnings.showwarning = lambda message, *_: complain(name, message)
    status: int = 0
    try:
        with readers_may_leave():
            status = command.run(arguments)
    except PenstockError as error:
        complain(name, without_passwords(str(error)))
        return 2
    return status


def _amount(text: str) -> float:
    """A positive number, such as 10, 0.5, 250k or 1.5M."""
    scale = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}.get(text[-1:])
    try:
        amount = float(text[:-1]) * scale if scale else float(text)
    except ValueError:
        amount = 0.0
    if not 0 < amount < 1e15:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0, such as 10, 0.5 or 250k")
    return amount
