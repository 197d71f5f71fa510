"""`penstock peek`: one batch as a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.commands.address import parse_address, url
from penstock.commands.arguments import first_of, spec_query
from penstock.commands.remote import connected, dataset_of, get_json
from penstock.display.batch_view import MUCH_PADDING, LineView, SequenceView, padding_of, view
from penstock.display.table import table
from penstock.display.terminal import BOLD, DIM, RED, YELLOW, Terminal
from penstock.printable import printable
from penstock.spec import Spec
from penstock.text import counted, without_passwords
from penstock.urls import batches_path, dataset_path


def run(arguments: argparse.Namespace) -> int:
    """Print the batch. Raises the PenstockError that fits the failure."""
    address = parse_address(arguments.address)
    query = spec_query(arguments, address)
    epoch, rank = first_of(arguments.epoch, address.epoch), first_of(arguments.rank, address.rank)
    step = first_of(arguments.step, address.step)
    with connected(address.server) as transport:
        path = f"{batches_path(dataset_of(address, transport), epoch, rank)}/{step}"
        batch = get_json(transport, path, {**query, "format": "json"})
        # Of the same data, also where the dataset grows between the two requests.
        provenance = get_json(transport, f"{path}/provenance", {**query, "snapshot": batch["snapshot"]})
    samples = view(batch, provenance)
    terminal = Terminal.of(sys.stdout)
    for line in (
        *_head(batch, query, terminal),
        "",
        *table(samples, terminal, arguments.lines),
        "",
        *_foot(batch, query, samples, terminal),
        terminal.paint(_curl(address.server, path, {**query, "format": "json"}), DIM),
    ):
        print(line)
    return 0


def _curl(server: str, path: str, query: dict[str, str]) -> str:
    """The command that fetches the batch. A password in the address is left out: terminals and logs keep what is printed."""
    shown = without_passwords(server)
    login = "" if shown == server else "-u NAME:PASSWORD "
    return f"curl {login}'{url(shown, path, query)}'"


def _head(batch: Mapping[str, Any], query: Mapping[str, str], terminal: Terminal) -> Iterator[str]:
    world_size = f" of {query['world_size']}" if "world_size" in query else ""
    yield (
        f"{terminal.paint(printable(batch['dataset']), BOLD)}  epoch {batch['epoch']}, rank {batch['rank']}{world_size}, "
        f"step {batch['step']}  {terminal.paint('snapshot ' + batch['snapshot'], DIM)}"
    )


def _foot(
    batch: Mapping[str, Any], query: Mapping[str, str], samples: Sequence[SequenceView], terminal: Terminal
) -> Iterator[str]:
    lines = [line for sample in samples for line in sample.lines]
    tokens, positions = sum(line.num_tokens for line in lines), sum(line.num_positions for line in lines)
    in_loss = sum(s.num_loss_tokens for s in samples)
    yield (
        f"{tokens:,} of {positions:,} positions are tokens ({padding_of(lines):.0%} padding), {in_loss:,} with loss; "
        f"{batch['nbytes']:,} bytes"
    )
    spec = Spec.from_query(query.items())
    can_be_packed = _can_be_packed(batch)
    for limit, own in _by_limit(lines).items():
        if padding_of(own) >= MUCH_PADDING and spec.packing == "rows" and spec.pad == "seq_len":
            packings = ", or --packing best_fit or concat" if can_be_packed else ""
            option = f"--{limit.replace('_', '-')}"
            yield from terminal.paragraph(f"for less padding use a smaller {option}, or --pad longest{packings}", YELLOW)
        if spec.cuts_rows and (num_cut := sum(line.num_cut > 0 for line in own)):
            lost, of_lines = counted(sum(line.num_cut for line in own), "token"), counted(len(own), own[0].noun)
            packings = ": --overflow split, --packing best_fit or concat keeps them" if can_be_packed else ""
            told = f"{limit} cuts {lost} off {num_cut} of {of_lines}, and no batch holds them{packings}"
            yield from terminal.paragraph(told, YELLOW)
    if batch["replaced"]:
        named = f"GET {dataset_path(batch['dataset'])}/quarantine lists them"
        stand = f"{batch['replaced']} of these samples stand in for rows that cannot be used"
        yield from terminal.paragraph(f"{stand}: {named}", YELLOW)
    if empty := [str(s.index) for s in samples if not s.num_loss_tokens]:
        which = f"sample{'s' * (len(empty) > 1)} {', '.join(empty)}"
        yield from terminal.paragraph(f"no token has loss in {which}: does the prompt fill seq_len?", RED)
    if any(not piece.in_loss for s in samples for passage in s.passages for piece in passage.pieces):
        dimmed = terminal.paint("dimmed", DIM) if terminal.has_colours else "between ⟦ and ⟧"
        yield f"{dimmed}: no loss is taken there"


def _by_limit(lines: Sequence[LineView]) -> dict[str, list[LineView]]:
    found: dict[str, list[LineView]] = {}
    for line in lines:
        found.setdefault(line.limit, []).append(line)
    return found


def _can_be_packed(batch: Mapping[str, Any]) -> bool:
    """Neither preference pairs nor encoder-decoder batches are streams of tokens."""
    names = {name for name, *_ in batch["tensors"]}
    return "input_ids" in names and "labels" not in names
