"""`penstock plan`: how large the cache must be for a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from penstock.cli.arguments import add_access_options, add_batch_options, amount
from penstock.cli.connection import connected, dataset_of, get_json, parse_address
from penstock.cli.output import set_run, stdout_console
from penstock.prefetch import RANGE_BYTES
from penstock.text import counted, printable, short, size
from penstock.wire.names import dataset_path

_BAR_COLUMNS = 16
_PLANNING_SECONDS = 120.0
_RATES = {
    "tokens": "tokens to train on, such as 300G: gives steps and epochs",
    "target_tokens_per_second": "tokens per second that all ranks take, such as 2M: gives requests and bytes per second",
    "prepare_tokens_per_second": "tokens that are prepared per second (default: measured on some rows)",
}


def configure(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.description = (
        "Counts from the order of an epoch how often blocks are read from the shards, for several sizes of the cache. Finds "
        "the smallest cache that reads no block twice, and the requests and bytes per second at a pace."
    )
    add_batch_options(command)
    for name, text in _RATES.items():
        command.add_argument(f"--{name.replace('_', '-')}", type=amount, metavar="N", help=text)
    command.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_access_options(command)
    set_run(command, run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises the PenstockError that fits the failure."""
    address = parse_address(arguments.address).with_options(arguments)
    amounts = {name: str(max(1, round(given))) for name in _RATES if (given := getattr(arguments, name))}
    with connected(address.server, _PLANNING_SECONDS) as transport:
        path = f"{dataset_path(dataset_of(address, transport))}/plan"
        plan = get_json(transport, path, {**dict(address.query), "epoch": str(address.epoch), **amounts})
    if arguments.json:
        print(json.dumps(plan, indent=2))
        return 0
    console = stdout_console()
    console.print(
        Text.assemble(
            (printable(plan["dataset"]), "bold"), f"  epoch {plan['epoch']}  ", (f"snapshot {plan['snapshot']}", "dim")
        ),
        soft_wrap=True,
    )
    facts = Table.grid(padding=(0, 3, 0, 0))
    for name, text in _facts(plan, arguments.tokens):
        facts.add_row(name, text)
    console.print(facts)
    console.print()
    console.print(_curve(plan))
    console.print()
    for line in _notes(plan):
        console.print(Text(line, "dim"))
    return 0


def _facts(plan: Mapping[str, Any], tokens: float | None) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each line above the curve."""
    num_steps, num_tokens = plan["num_steps"], plan["tokens"] or plan["positions"]
    unit = "tokens" if plan["tokens"] else "tokens and padding"
    yield "epoch", f"{counted(num_steps, 'step')}, {short(num_tokens)} {unit}, {short(num_tokens / num_steps)} a step"
    if tokens:
        yield f"{short(tokens)} tokens", f"{counted(plan['steps_of_tokens'], 'step')}, {plan['epochs_of_tokens']:,.2f} epochs"
    yield "no second read", f"{size(plan['read_once_bytes'])}, with the next window {size(plan['read_ahead_bytes'])}"
    yield "everything", f"{size(plan['everything_bytes'])} for {counted(plan['num_blocks'], 'block')}"
    here = plan["here"]
    yield (
        "this server",
        f"{size(here['cache_bytes'])}: {short(here['reads'])} reads, {size(here['source_bytes'])} of the shards",
    )
    if pace := plan["pace"]:
        num_requests = pace["batches_per_second"] / max(1, RANGE_BYTES // pace["batch_bytes"])
        yield (
            f"at {short(pace['tokens_per_second'])}/s",
            f"{short(pace['steps_per_second'])} steps/s, {short(num_requests)} requests/s, "
            f"{size(pace['bytes_per_second'])}/s to the ranks, {size(pace['source_bytes_per_second'])}/s from the shards",
        )
    prepare = plan["prepare"]
    measured = ", measured on some rows" if prepare["is_measured"] else ""
    yield (
        "prepare",
        f"{_duration(prepare['seconds'])} for {short(prepare['tokens'])} tokens at "
        f"{short(prepare['tokens_per_second'])}/s{measured}",
    )


def _curve(plan: Mapping[str, Any]) -> Table:
    """Return a table of the reads for each size of the cache."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0))
    for title in ("cache", "reads", "again", "hit rate", "from the shards", "next epoch"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("")
    most = max(point["reads"] for point in plan["curve"])
    for point in plan["curve"]:
        is_once = point["cache_bytes"] == plan["read_once_bytes"]
        later = point["later_reads"]
        table.add_row(
            size(point["cache_bytes"]),
            f"{point['reads']:,}",
            f"{point['repeated_reads']:,}",
            f"{point['hit_rate']:.1%}",
            size(point["source_bytes"]),
            "" if later is None else f"{later:,}",
            Text("█" * max(1, round(_BAR_COLUMNS * point["reads"] / most)), "cyan" if is_once else "default"),
        )
    return table


def _notes(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield what limits the figures."""
    if plan["sizes"] == "estimated":
        yield "Sizes of blocks are estimated from a few of them; penstock prepare counts them."
    if plan["num_samples_planned"] < plan["num_samples"]:
        share = plan["num_samples_planned"] / plan["num_samples"]
        yield f"Reads are those of the first {share:.1%} of the epoch, scaled to all of it."


def _duration(seconds: float) -> str:
    """Format a time as seconds, minutes or hours."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.1f} s"
