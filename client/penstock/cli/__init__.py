"""The console script `penstock`. Each command's module is imported only when it runs, so that --help stays quick."""

from __future__ import annotations

import argparse
import signal
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec

from penstock import __version__
from penstock.ending import ExitWithoutTeardown, ends_as_usual, ends_at

_COMMANDS = {
    "peek": "show what is in a batch",
    "plan": "find how large the cache must be for a run",
    "bench": "measure how fast this machine can pull batches",
    "doctor": "find what is wrong between this machine and a server",
    "audit": "prove from its ledgers that a run trained on every sample exactly once",
}
_SERVER_COMMANDS = ("serve", "inspect", "prepare", "sample", "import", "token")
_SERVER_NEEDS = ("penstock_server", "fastapi", "pyarrow", "tokenizers", "uvicorn")


def main() -> int:
    """Run one command and return the process's exit status."""
    leaving = ExitWithoutTeardown()
    try:  # around most imports, too: Ctrl-C in the first moment would end in a traceback
        from penstock.cli.output import prepare_streams

        ends_as_usual()
        prepare_streams()
        leaving.status = _run()
    except KeyboardInterrupt:
        ends_at(signal.SIGINT)  # otherwise another Ctrl-C would end a wait for threads with a traceback
        print("penstock: stopped", file=sys.stderr)
        leaving.status = 130
    except SystemExit as error:
        leaving.status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    return leaving.status


def _run() -> int:
    from penstock.cli.output import complain

    parser = argparse.ArgumentParser(prog="penstock", description="Feeds tokens to GPU trainers; a batch is a URL.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    name = next(iter(sys.argv[1:]), "")
    missing = [module for module in _SERVER_NEEDS if find_spec(module) is None]
    if missing and name in _SERVER_COMMANDS:
        complain(name, f"the server is not installed ({', '.join(missing)} missing): pip install 'penstock[server]'")
        return 2
    try:
        if missing:
            for command in _SERVER_COMMANDS:
                commands.add_parser(command, help="needs the server: pip install 'penstock[server]'")
        else:
            # The only import of the server in the client: for a command, never for the library.
            from penstock_server.cli import add_commands

            add_commands(commands)
        for command, summary in _COMMANDS.items():
            subparser = commands.add_parser(command, help=summary, allow_abbrev=False)
            if command == name:
                # On one line: the place of a warning in this package is no help. The server's commands run code of users, too.
                warnings.showwarning = lambda message, *_: complain(name, message)
                import_module(f"penstock.cli.{command}").configure(subparser)
        chosen = parser.parse_args()
        if not chosen.command:
            parser.print_help(sys.stderr)
            return 2
        status: int = chosen.run(chosen)
    except ModuleNotFoundError as error:
        if error.name in ("fcntl", "resource"):
            complain(name, "needs Linux or macOS; on Windows use Docker or WSL")
        elif str(error.name).partition(".")[0] == "rich":
            complain(name, "rich is not installed: pip install 'penstock[cli]'")
        else:
            raise
        return 2
    return status
