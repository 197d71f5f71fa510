"""Command `penstock token`."""

from __future__ import annotations

import argparse
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from penstock.cli.output import CommandError, complain, report, set_run
from penstock.text import printable

_DURATION = re.compile(r"([0-9]{1,5})([hd])")
_NO_FILE = "no token file is named. Give --tokens FILE, or set PENSTOCK_TOKENS."


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `token` to the commands of `penstock`."""
    parser = commands.add_parser(
        "token",
        help="create, list and revoke the tokens of a server",
        description="Edits the token file of penstock serve --tokens FILE. A running server reloads it within a second.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    create = actions.add_parser(
        "create",
        help="create a token, and print it",
        description="Prints the new token on stdout. Keep it: the file stores only its SHA-256, so it cannot be shown again. "
        "To replace a token, create another, hand it out, then revoke the old one. Both are valid in between.",
    )
    create.add_argument("name", metavar="NAME", help="name of the token, such as team-a, for list, revoke and the page")
    _add_file(create)
    create.add_argument(
        "--datasets",
        metavar="A,B",
        default="*",
        help="datasets that it may read, separated by commas; * matches any characters, as in 'team-a.*' (default: *, all)",
    )
    create.add_argument(
        "--scope",
        choices=["read", "metrics", "admin"],
        default="read",
        help="read: for trainers and the page (default); metrics: only /metrics; admin: both, and loading new data",
    )
    create.add_argument(
        "--expires", metavar="WHEN", default="never", help="90d, 12h, a UTC date such as 2027-06-30, or never (default: never)"
    )
    create.add_argument(
        "--certificate",
        metavar="SUBJECT",
        help="let in a client certificate with this subject, such as CN=trainer,O=team-a, and create no token; see penstock "
        "serve --tls-client-ca",
    )
    set_run(create, _create)

    show = actions.add_parser("list", help="list the tokens", description="Lists name, scope, expiry and datasets of each.")
    _add_file(show)
    set_run(show, _list)

    revoke = actions.add_parser(
        "revoke", help="remove a token", description="Removes a token. Servers refuse it within a second."
    )
    revoke.add_argument("name", metavar="NAME", help="name of the token, as list shows it")
    _add_file(revoke)
    set_run(revoke, _revoke)


def _add_file(command: argparse.ArgumentParser) -> None:
    command.add_argument("--tokens", metavar="FILE", type=Path, help="the token file (default: PENSTOCK_TOKENS)")


def _file(arguments: argparse.Namespace) -> Path:
    path = arguments.tokens or os.environ.get("PENSTOCK_TOKENS")
    if not path:
        raise CommandError(_NO_FILE)
    return Path(path).expanduser()


def _create(arguments: argparse.Namespace) -> int:
    from penstock_server.security.tokens import create_token

    path, datasets = _file(arguments), tuple(filter(None, arguments.datasets.split(",")))
    token = create_token(
        path, arguments.name, datasets, arguments.scope, expiry(arguments.expires), certificate=arguments.certificate
    )
    if token:
        report(token)
        complain(
            "token create",
            f"stored a hash of the token in {path}. Trainers take the token from PENSTOCK_TOKEN or PENSTOCK_TOKEN_FILE.",
        )
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from penstock_server.security.tokens import read_tokens

    rows = [("NAME", "SCOPE", "EXPIRES", "DATASETS")]
    now = datetime.now(UTC)
    for entry in read_tokens(_file(arguments)):
        expires = f"{entry.expires:%Y-%m-%d %H:%M}" if entry.expires else "never"
        is_over = entry.is_expired(now.timestamp())
        name = f"{entry.name} ({entry.certificate})" if entry.certificate else entry.name
        rows.append((name, entry.scope, f"{expires} (expired)" if is_over else expires, ",".join(entry.datasets)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        report(printable("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()))
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    from penstock_server.security.tokens import revoke_token

    revoke_token(_file(arguments), arguments.name)
    return 0


def expiry(text: str) -> datetime | None:
    """Parse an expiry: 90d, 12h, a date, or `never`, which is None. Raises CommandError: it is invalid or in the past."""
    now = datetime.now(UTC).replace(microsecond=0)
    if text == "never":
        return None
    if found := _DURATION.fullmatch(text):
        return now + timedelta(**{"h": {"hours": int(found[1])}, "d": {"days": int(found[1])}}[found[2]])
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise CommandError(f"--expires must be 90d, 12h, a date such as 2027-06-30, or never, not {text!r}") from None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    if when <= now:
        raise CommandError(f"--expires {text} is in the past. Give a later time, or never.")
    return when
