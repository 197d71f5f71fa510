"""The console script `penstock`. The server's commands are there where the extra penstock[server] is installed."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from importlib.util import find_spec

from penstock import __version__
from penstock.ending import ExitWithoutTeardown, ends_as_usual, ends_at

_SERVER_COMMANDS = ("serve", "inspect", "prepare", "sample", "import")
_SERVER_NEEDS = ("penstock_server", "fastapi", "pyarrow", "tokenizers", "uvicorn")


def main() -> int:
    """Runs one command; the value is the process's exit status."""
    _read_names_as_utf8()
    leaving = ExitWithoutTeardown()
    try:
        leaving.status = _run_unless_stopped()
    except SystemExit as error:
        leaving.status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    return leaving.status


def _run_unless_stopped() -> int:
    try:  # around most imports, too: Ctrl-C in the first moment would end in a traceback
        from penstock.display.stdout import print_anything

        ends_as_usual()
        print_anything()
        return _run()
    except KeyboardInterrupt:
        ends_at(signal.SIGINT)  # or another Ctrl-C would end a wait for threads with a traceback
        print("penstock: stopped", file=sys.stderr)
        return 130


def _read_names_as_utf8() -> None:
    """Begins anew where Python would read names of files otherwise: pyarrow, recipes and URLs have them as UTF-8."""
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode:
        if sys.stdout:
            os.environ.setdefault("PYTHONIOENCODING", f"{sys.stdout.encoding}:replace")  # the terminal stays what it is
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _run() -> int:
    from penstock.commands import add_commands
    from penstock.display.stdout import OutputFull
    from penstock.text import did_you_mean

    parser = argparse.ArgumentParser(prog="penstock", description="Feeds tokens to GPU trainers; a batch is a URL.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    _add_server_commands(commands)
    add_commands(commands)
    chosen, unknown = parser.parse_known_args()
    if unknown:  # parse_args would tell the usage of `penstock` alone
        command = commands.choices.get(chosen.command, parser)
        hint = did_you_mean(unknown[0].partition("=")[0], re.findall(r"--[a-z-]+", command.format_help()))
        command.error(f"unrecognized arguments: {' '.join(unknown)}.{hint}")
    if not chosen.command:
        parser.print_help(sys.stderr)
        return 2
    try:
        status: int = chosen.run(chosen)
    except OutputFull as error:
        print(f"penstock {chosen.command}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in ("fcntl", "resource"):
            raise
        print(f"penstock {chosen.command} needs Linux or macOS; on Windows use Docker or WSL", file=sys.stderr)
        return 2
    return status


def _add_server_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    if missing := [name for name in _SERVER_NEEDS if find_spec(name) is None]:
        for name in _SERVER_COMMANDS:
            said = (
                f"penstock {name}: the server is not installed here (there is no {', '.join(missing)}): "
                f"pip install 'penstock[server]'"
            )
            needs = "needs the server: pip install 'penstock[server]'"
            # It takes whatever follows: `penstock serve DATA_DIR --port 80` must not hear of an unknown argument instead.
            stub = commands.add_parser(name, help=needs, add_help=False, prefix_chars="\0")
            stub.add_argument("rest", nargs="*")
            stub.set_defaults(run=lambda _, said=said: print(said, file=sys.stderr) or 2)
        return
    # The one place where the client reaches for the server: a command of a person's, never the library.
    from penstock_server.cli import add_commands as add_server_commands

    add_server_commands(commands)
