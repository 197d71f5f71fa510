"""Arguments that commands share. Kept apart from their access to a server, so that --help needs no httpx."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from penstock.spec import as_text, describe

_METAVARS = {"integer": "N", "boolean": "true|false", "string": "TEXT"}


def whole_number(text: str) -> int:
    """Parse an integer >= 0 of the command line. Raises ArgumentTypeError: the text is not one."""
    if not (text.isascii() and text.isdigit() and len(text) <= 16):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not an integer >= 0")
    return int(text)


def amount(text: str) -> float:
    """Parse a number > 0, such as 10, 0.5, 250k or 1.5M. Raises ArgumentTypeError: the text is not one."""
    scale = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}.get(text[-1:])
    try:
        number = float(text[:-1]) * scale if scale else float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e15:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number > 0, such as 10, 0.5 or 250k")
    return number


def add_batch_options(command: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """Add the address, and an option for each parameter of the spec, such as --batch-size for batch_size."""
    command.add_argument("address", metavar="ADDRESS", help="http://HOST:PORT/DATASET, or the URL of a batch")
    command.add_argument("--epoch", type=whole_number, metavar="N", help="which epoch, from 0 (default: 0)")
    command.add_argument("--rank", type=whole_number, metavar="N", help="which rank, from 0 (default: 0)")
    group = command.add_argument_group("parameters of a batch", "the same as in its URL; an option overrides the URL")
    for parameter in describe():
        if parameter["name"] in without:
            continue
        options = parameter.get("options")
        default = "" if parameter["default"] is None else f" (default: {as_text(parameter['default'])})"
        # The values stay text: the spec checks them, with better messages than argparse.
        group.add_argument(
            f"--{parameter['name'].replace('_', '-')}",
            dest=f"spec_{parameter['name']}",
            metavar="|".join(options) if options else _METAVARS[parameter["kind"]],
            help=f"{parameter['doc']}{default}".replace("%", "%%"),
        )


class _SetVariable(argparse.Action):
    """Puts an option into the environment, where each connection of the command finds it, those of RemoteDataset, too."""

    def __call__(self, _: object, __: object, values: str | Sequence[Any] | None, ___: str | None = None) -> None:
        if self.dest == "token_file":
            os.environ.pop("PENSTOCK_TOKEN", None)  # it would come first
        os.environ[f"PENSTOCK_{self.dest.upper()}"] = str(values)


def add_access_options(command: argparse.ArgumentParser) -> None:
    """Add the options for a token and certificates. None takes the token itself: other users of the machine see arguments."""
    group = command.add_argument_group(
        "access",
        "PENSTOCK_TOKEN may have the token, and PENSTOCK_TOKEN_FILE, PENSTOCK_CA and PENSTOCK_CERT the names of these files.",
    )
    for option, text in {
        "--token-file": "file with the token for the server",
        "--ca": "PEM file of the authorities to trust (default: those of the system)",
        "--cert": "PEM file of a client certificate and its key, or CERT,KEY",
    }.items():
        group.add_argument(option, action=_SetVariable, metavar="FILE", help=text)
