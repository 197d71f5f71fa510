"""Writes the generated parts of the docs: tables of parameters, metrics and stages, help of the commands, lines of tests.

python docs/generate.py            writes the pages that `main` lists
python docs/generate.py --check    exits with 1 if one of them is not up to date
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from penstock.spec import as_text, describe
from penstock.wire.report import STAGES
from penstock_server.monitoring.gauges import GAUGES
from penstock_server.monitoring.metrics import Metrics

ROOT = Path(__file__).parents[1]
COMMANDS = (
    "serve",
    "token create",
    "token list",
    "token revoke",
    "prepare",
    "store usage",
    "store gc",
    "inspect",
    "import",
    "sample",
    "peek",
    "plan",
    "bench",
    "doctor",
    "audit",
)


def parameters(page: str) -> str:
    """Returns the page with the rows of its table."""
    rows = []
    for parameter in describe():
        default = "" if parameter["default"] is None else f"`{as_text(parameter['default'])}`"
        rows.append(f"| `{parameter['name']}` | {default} | {parameter['doc']} |\n")
    return with_rows(page, rows)


def metrics(page: str) -> str:
    """Returns the page with a row for each metric."""
    infos = [*Metrics().infos, *GAUGES]
    labels = {info.name: ", ".join(f"`{label}`" for label in info.labels) for info in infos}
    return with_rows(page, [f"| `{info.name}` | {info.kind} | {labels[info.name]} | {info.text} |\n" for info in infos])


def stages(page: str) -> str:
    """Returns the page with a row for each stage of a wait."""
    return with_rows(page, [f"| `{stage}` | {text} |\n" for stage, text in STAGES.items()])


def with_rows(page: str, rows: list[str]) -> str:
    """Returns the page with these rows in its table, whose rows begin with code."""
    others = [line for line in page.splitlines(keepends=True) if not line.startswith("| `")]
    at = next(number for number, line in enumerate(others, start=1) if line.startswith("|---"))
    return "".join(others[:at] + rows + others[at:])


def commands(page: str) -> str:
    """Returns the page with the help of each command."""
    sections = [page.partition("\n## ")[0].rstrip("\n")]
    for name in COMMANDS:
        text = subprocess.run(
            [sys.executable, "-m", "penstock", *name.split(), "--help"],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"COLUMNS": "100", "NO_COLOR": "1"},
        ).stdout
        usage, _, rest = text.partition("\nparameters of a batch:")[0].rstrip().partition("\n\n")
        if name in ("peek", "plan", "bench"):  # their usage lists all parameters, too
            usage = f"usage: penstock {name} [options] ADDRESS"
        sections.append(f"## penstock {name}\n\n```text\n{usage}\n\n{rest}\n```")
    return "\n\n".join(sections) + "\n"


def snippets(page: str) -> str:
    """Returns the page with the marked lines of tests: `<!-- from FILE:NAME -->` stands before a block of them."""

    def block(match: re.Match[str]) -> str:
        text = (ROOT / match["file"]).read_text()
        start, end = (f"# --8<-- [{edge}:{match['name']}]\n" for edge in ("start", "end"))
        lines = dedent(text.partition(start)[2].partition(end)[0].rpartition("\n")[0])
        return f"<!-- from {match['file']}:{match['name']} -->\n```{match['language']}\n{lines.strip()}\n```\n"

    fenced = r"<!-- from (?P<file>\S+):(?P<name>\S+) -->\n```(?P<language>\w+)\n.*?```\n"
    return re.sub(fenced, block, page, flags=re.DOTALL)


def main() -> None:
    """Writes the pages, or checks them."""
    is_current = True
    pages = {
        "reference/parameters.md": parameters,
        "reference/metrics.md": metrics,
        "reference/cli.md": commands,
        "guides/monitoring.md": stages,
        "guides/trainers.md": snippets,
    }
    for name, render in pages.items():
        path = Path(__file__).parent / name
        page = path.read_text()
        if (new := render(page)) != page:
            is_current = False
            if "--check" not in sys.argv:
                path.write_text(new)
    if "--check" in sys.argv and not is_current:
        sys.exit("a generated page of docs is not up to date; run: make docs")


if __name__ == "__main__":
    main()
