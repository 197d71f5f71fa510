"""What the commands take: an address, and the spec's parameters as options, from their one declaration in penstock.spec."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.spec import Spec, as_text, describe

if TYPE_CHECKING:  # it imports httpx, and --help is to be quick
    from penstock.commands.address import Address

_METAVARS = {"integer": "N", "boolean": "true|false", "string": "TEXT"}


def add_spec_options(command: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """An option for each parameter of the spec: --batch-size for batch_size, and so on."""
    group = command.add_argument_group("parameters of a batch", "the same as in its URL; an option overrides the URL")
    for parameter in describe():
        if parameter["name"] in without:
            continue
        options = parameter.get("options")
        default = "" if parameter["default"] is None else f" (default: {as_text(parameter['default'])})"
        # The values stay text: the spec itself checks them, with better words than argparse has.
        group.add_argument(
            f"--{parameter['name'].replace('_', '-')}",
            dest=f"spec_{parameter['name']}",
            metavar="|".join(options) if options else _METAVARS[parameter["kind"]],
            help=f"{parameter['doc']}{default}".replace("%", "%%"),
        )


def spec_query(arguments: argparse.Namespace, address: Address) -> dict[str, str]:
    """The parameters that the address or the options give, options first, as a URL's query spells them.

    Raises SpecError: one is unknown or out of its bounds, or they do not go together.
    """
    given = {
        name.removeprefix("spec_"): value
        for name, value in vars(arguments).items()
        if name.startswith("spec_") and value is not None
    }
    pairs = [(name, value) for name, value in address.query if name not in given]
    Spec.from_query([*pairs, *given.items()])
    return {**dict(pairs), **given}


def first_of(option: int | None, inside: int | None) -> int:
    """What an option says, else what the address says, else 0."""
    return option if option is not None else inside or 0


def whole_number(text: str) -> int:
    """Parse an integer >= 0 of the command line. Raises ArgumentTypeError: the text is not one."""
    if not (text.isascii() and text.isdigit() and len(text) <= 16):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 0")
    return int(text)
