"""`penstock peek`: one batch as a table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from penstock.cli.arguments import add_access_options, add_batch_options, whole_number
from penstock.cli.batch_view import LineView, SampleView, append_abridged, padding_of, text_of, view
from penstock.cli.connection import connected, curl, dataset_of, get_json, parse_address, url
from penstock.cli.output import set_run, stdout_console
from penstock.spec import Spec
from penstock.text import counted, printable
from penstock.wire.names import batches_path, dataset_path

_MUCH_PADDING = 0.5  # of a sample, or of a batch
_NUMBER_COLUMNS = {"#": 1, "tokens": 6, "pad": 4, "in loss": 7}  # and their widths


def configure(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    command.description = (
        "Shows one batch as a table: each sample's tokens and padding, its rows, and its text, dimmed if it has no loss."
    )
    add_batch_options(command)
    command.add_argument("--step", type=whole_number, metavar="N", help="which batch of the epoch (default: 0)")
    command.add_argument(
        "--lines", type=whole_number, metavar="N", default=4, help="lines of text per row, 0 for all (default: 4)"
    )
    add_access_options(command)
    set_run(command, run)


def run(arguments: argparse.Namespace) -> int:
    """Print the batch. Raises the PenstockError that fits the failure."""
    address = parse_address(arguments.address).with_options(arguments)
    query = dict(address.query)
    with connected(address.server) as transport:
        path = f"{batches_path(dataset_of(address, transport), address.epoch, address.rank)}/{address.step}"
        batch = get_json(transport, path, {**query, "format": "json"})
        # The dataset may grow between the two requests.
        provenance = get_json(transport, f"{path}/provenance", {**query, "snapshot": batch["snapshot"]})
    samples = view(batch, provenance)
    console = stdout_console()
    console.print(_title(batch, query))
    console.print()
    console.print(_table(samples, console, arguments.lines))
    console.print()
    for line in _summary(batch, query, samples, console):
        console.print(line, soft_wrap=not console.is_terminal)
    command = curl(url(address.server, path, {**query, "format": "json"}))
    console.print(Text(printable(command), "dim"), soft_wrap=True)
    return 0


def _title(batch: Mapping[str, Any], query: Mapping[str, str]) -> Text:
    of_ranks = f" of {query['world_size']}" if "world_size" in query else ""
    address = f"  epoch {batch['epoch']}, rank {batch['rank']}{of_ranks}, step {batch['step']}  "
    return Text.assemble((printable(batch["dataset"]), "bold"), address, (f"snapshot {batch['snapshot']}", "dim"))


def _table(samples: Sequence[SampleView], console: Console, num_lines: int) -> Table:
    """Return a table of samples. `num_lines` limits the rows of a sample and the lines of text per row; 0: all."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for title, width in _NUMBER_COLUMNS.items():
        table.add_column(title, justify="right", min_width=width, no_wrap=True)
    table.add_column("text", overflow="fold")
    columns = num_lines * max(20, console.width - sum(_NUMBER_COLUMNS.values()) - 2 * len(_NUMBER_COLUMNS))
    for sample in samples:
        padding = padding_of(sample.lines)
        table.add_row(
            f"{sample.index}",
            f"{sample.num_tokens:,}",
            Text(f"{padding:.0%}", "yellow" if padding >= _MUCH_PADDING else ""),
            Text(f"{sample.num_loss_tokens:,}", "" if sample.num_loss_tokens else "red"),
            Group(*_texts(sample, console, num_lines, columns)),
        )
    return table


def _texts(sample: SampleView, console: Console, num_lines: int, columns: int) -> Iterator[Text]:
    has_several = len(sample.passages) > 1
    for passage in sample.passages[: num_lines or None]:
        yield Text.assemble(
            ("▸ " if has_several else "", "yellow"),
            (f"{passage.side}: " if passage.side else "", "bold"),
            (printable(passage.source) + (f", {passage.num_tokens:,} tokens" if has_several else ""), "cyan"),
            overflow="fold",
        )
        yield text_of(passage.pieces, columns, has_styles=console.color_system is not None)
    if num_lines and len(sample.passages) > num_lines:
        yield Text(f"▸ and {len(sample.passages) - num_lines:,} more; --lines 0 shows all", "yellow")
    for name, value in sample.columns.items():
        line = Text(f"{printable(name)}: ", "cyan", overflow="fold")
        append_abridged(line, str(value), columns, "default")
        yield line


def _summary(
    batch: Mapping[str, Any], query: Mapping[str, str], samples: Sequence[SampleView], console: Console
) -> Iterator[Text]:
    lines = [line for sample in samples for line in sample.lines]
    num_tokens, num_positions = sum(line.num_tokens for line in lines), sum(line.num_positions for line in lines)
    yield Text(
        f"{num_tokens:,} of {num_positions:,} positions are tokens ({padding_of(lines):.0%} padding), "
        f"{sum(sample.num_loss_tokens for sample in samples):,} with loss; {batch['nbytes']:,} bytes"
    )
    for text in _advice(Spec.from_query(query.items()), batch, lines):
        yield Text(text, "yellow")
    if batch["replaced"]:
        quarantine = f"GET {dataset_path(batch['dataset'])}/quarantine lists them"
        yield Text(f"{counted(batch['replaced'], 'unusable row')} replaced by a neighbour: {quarantine}", "yellow")
    if empty := [str(sample.index) for sample in samples if not sample.num_loss_tokens]:
        yield Text(f"no token has loss in sample {', '.join(empty)}: does the prompt fill seq_len?", "red")
    if any(not piece.in_loss for sample in samples for passage in sample.passages for piece in passage.pieces):
        yield Text("dimmed: without loss" if console.color_system else "between ⟦ and ⟧: without loss")


def _advice(spec: Spec, batch: Mapping[str, Any], lines: Sequence[LineView]) -> Iterator[str]:
    """Yield a line for each parameter that cuts rows."""
    names = {name for name, *_ in batch["tensors"]}
    may_pack = "input_ids" in names and "labels" not in names  # neither a preference pair nor an encoder's input
    packing = ": --overflow split, --packing best_fit or concat keeps them" if may_pack else ""
    for limit in dict.fromkeys(line.limit for line in lines if spec.cuts_rows):
        limited = [line for line in lines if line.limit == limit]
        if num_cut := sum(line.num_cut > 0 for line in limited):
            num_lost, num_lines = sum(line.num_cut for line in limited), counted(len(limited), limited[0].noun)
            yield f"{limit} cuts {counted(num_lost, 'token')} off {num_cut} of {num_lines}, and no batch holds them{packing}"
