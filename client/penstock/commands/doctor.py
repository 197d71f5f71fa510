"""`penstock doctor`: what is wrong between this machine and a server, and what to do about it."""

from __future__ import annotations

import argparse
import sys

from penstock.commands.address import parse_address
from penstock.commands.check import Check
from penstock.commands.checks import checks
from penstock.commands.terminal import BOLD, GREEN, RED, YELLOW, Terminal, printable
from penstock.wording import without_passwords

_STYLES = {"ok": GREEN, "warn": YELLOW, "fail": RED}
_NAME_WIDTH = 10


def run(arguments: argparse.Namespace) -> int:
    """Prints a line a check; 1 if one fails. Raises SpecError: the address is none."""
    address = parse_address(arguments.address)
    terminal = Terminal.of(sys.stdout)
    print(terminal.paint(printable(without_passwords(address.server)), BOLD))
    found = []
    for check in checks(address.server, address.dataset):
        found.append(check)
        for line in _lines(check, terminal):
            print(line)
        sys.stdout.flush()
    failed, warned = (sum(check.level == level for check in found) for level in ("fail", "warn"))
    print(_verdict(failed, warned))
    return 1 if failed else 0


def _lines(check: Check, terminal: Terminal) -> list[str]:
    left = f"  {terminal.paint(check.level.ljust(4), _STYLES[check.level])}  {check.name.ljust(_NAME_WIDTH)}  "
    margin = " " * (2 + 4 + 2 + _NAME_WIDTH + 2)
    text = terminal.paragraph(check.text, margin=len(margin))
    fix = terminal.paragraph(f"-> {check.fix}", BOLD, len(margin)) if check.fix else []
    return [(margin if number else left) + line for number, line in enumerate([*text, *fix])]


def _verdict(failed: int, warned: int) -> str:
    if failed:
        return f"{failed} of these must be mended" + (f", {warned} should be looked at" if warned else "")
    return f"nothing fails; {warned} should be looked at" if warned else "all is well"
