"""`penstock doctor`: what is wrong between this machine and a server, and what to do about it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing

from penstock.commands.address import parse_address
from penstock.commands.check import Check
from penstock.commands.data_checks import check_bandwidth, check_cache, check_datasets
from penstock.commands.machine_checks import check_machine
from penstock.commands.remote import RETRY_SECONDS, get_json, greet
from penstock.commands.server_checks import check_proxies, check_versions, check_way
from penstock.display.stdout import tell
from penstock.display.terminal import BOLD, GREEN, RED, YELLOW, Terminal
from penstock.errors import PenstockError
from penstock.printable import printable
from penstock.text import without_passwords
from penstock.transport.servers import Servers
from penstock.transport.transport import Transport
from penstock.urls import DATASETS

_STYLES = {"ok": GREEN, "warn": YELLOW, "fail": RED}
_NAME_WIDTH = 10


def run(arguments: argparse.Namespace) -> int:
    """Print one line per check; return 1 if one fails. Raises SpecError: the address is invalid."""
    address = parse_address(arguments.address)
    terminal = Terminal.of(sys.stdout)
    tell(terminal.paint(printable(without_passwords(address.server)), BOLD))
    found = []
    for check in checks(address.server, address.dataset):
        found.append(check)
        for line in _lines(check, terminal):
            tell(line)
    failed, warned = (sum(check.level == level for check in found) for level in ("fail", "warn"))
    tell(_verdict(failed, warned))
    return 1 if failed else 0


def checks(server: str, dataset: str | None) -> Iterator[Check]:
    """Everything, or of the data only what concerns one dataset. Each is made when it is asked for."""
    try:
        greeting = greet(server)
    except PenstockError as error:
        yield Check("fail", "server", str(error))
        yield from check_proxies(server)
        yield from check_machine()
        return
    yield check_versions(greeting)
    yield from check_proxies(server)
    yield from check_way(server)
    yield from check_machine()
    with closing(Transport(Servers((server,)), retry_seconds=RETRY_SECONDS, first_contact=True)) as transport:
        try:
            known = get_json(transport, DATASETS)
            yield from check_datasets(transport, known, dataset)
            yield from check_cache(known["datasets"])
            yield from check_bandwidth(server, transport, known, dataset)
        except PenstockError as error:
            yield Check("fail", "data", str(error))


def _lines(check: Check, terminal: Terminal) -> list[str]:
    left = f"  {terminal.paint(check.level.ljust(4), _STYLES[check.level])}  {check.name.ljust(_NAME_WIDTH)}  "
    margin = " " * (2 + 4 + 2 + _NAME_WIDTH + 2)
    text = terminal.paragraph(without_passwords(check.text), margin=len(margin))
    fix = terminal.paragraph(f"-> {check.fix}", BOLD, len(margin)) if check.fix else []
    return [(margin if number else left) + line for number, line in enumerate([*text, *fix])]


def _verdict(failed: int, warned: int) -> str:
    if failed:
        return f"{failed} of these must be mended" + (f", {warned} should be looked at" if warned else "")
    return f"nothing fails; {warned} should be looked at" if warned else "all is well"
