"""The console script `penstock`. The server's commands are there where the extra penstock[server] is installed."""

from __future__ import annotations

import argparse
import sys

from penstock import __version__


def main() -> int:
    """Runs one command; the value is the process's exit status."""
    try:
        return _run()
    except KeyboardInterrupt:
        print("penstock: stopped", file=sys.stderr)
        return 130


def _run() -> int:
    parser = argparse.ArgumentParser(prog="penstock", description="Feeds tokens to GPU trainers; a batch is a URL.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    try:
        # The one place where the client reaches for the server: a command of a person's, never the library.
        from penstock_server.cli import add_commands

        add_commands(commands)
    except ImportError as error:
        for name in ("serve", "prepare", "sample", "import"):
            missing = f"penstock {name}: the server is not installed here ({error}): pip install 'penstock[server]'"
            commands.add_parser(name, help="needs the server: pip install 'penstock[server]'").set_defaults(
                run=lambda _, missing=missing: print(missing, file=sys.stderr) or 2
            )
    chosen = parser.parse_args()
    if not hasattr(chosen, "run"):
        parser.print_help(sys.stderr)
        return 2
    status: int = chosen.run(chosen)
    return status


if __name__ == "__main__":
    sys.exit(main())
