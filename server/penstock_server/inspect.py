"""Inspection of a dataset and of the tokens of its rows, for people and without a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from penstock.cli.batch_view import Piece, ids_as_text, text_of
from penstock.text import counted, printable, size
from penstock.wire.names import SIDES
from penstock_server.catalog.dataset import OpenSnapshot
from penstock_server.catalog.describe import describe_dataset, lengths_told, rows_held_out, summary
from penstock_server.catalog.snapshot import Snapshot
from penstock_server.catalog.warnings import describe_splits
from penstock_server.lookup import show_row

_MARGIN = 6


def inspect(opened: OpenSnapshot, rows: range, console: Console, num_lines: int) -> Iterator[RenderableType]:
    """Describe a dataset in a few lines, then each of these rows in about `num_lines` lines of text; 0 means all lines.

    Rows beyond the last are skipped. Raises RowOutOfRange: the dataset has none of the rows.
    Raises the errors of a block that cannot be read.
    """
    name, recipe = summary(opened)
    yield Text(printable(name), "bold")
    yield printable(f"  {recipe}")
    yield f"  splits: {_splits(opened.snapshot)}"
    facts = describe_dataset(opened)
    yield f"  {_sizes(facts)}"
    if prepared := facts["prepared"]:
        yield f"  prepared: the store has {counted(prepared['row_groups'], 'row group')} and all counts"
    if facts["tokens"]:
        told = {"row": facts["row_tokens"], "prompt": facts["prompt_tokens"], "response": facts["response_tokens"]}
        yield from (f"  {line}" for line in lengths_told({name: tokens for name, tokens in told.items() if tokens}))
    for row in rows[: max(1, opened.snapshot.num_rows - rows.start)]:
        yield from _row(show_row(opened, row), console, num_lines)
    yield ""


def _splits(snapshot: Snapshot) -> str:
    """Describe the rule for splits, and how much is held out."""
    held_out = f"{snapshot.validation:.3g} of the rows held out for validation by hash"
    if snapshot.split_rule == "hash":
        return held_out
    by_name = f"by the names of the shards: {describe_splits(snapshot.shard_splits)}"
    return f"{by_name}; of train, {held_out}" if snapshot.validation else by_name


def _sizes(facts: Mapping[str, Any]) -> str:
    tokens = "tokens not counted yet: penstock prepare does"
    if facts["prepared"]:
        tokens = counted(facts["tokens"], "token")
    if splits := facts["splits"]:
        held_out = {split: counts["rows"] for split, counts in splits.items() if split != "train"}
        tokens = f"{counted(facts['tokens'], 'token')}; {rows_held_out(held_out)}"
    blocks = counted(facts["blocks"], "block")
    return f"{size(facts['size_bytes'])} in files; {blocks}, about {size(facts['blocks_bytes'])} in the cache; {tokens}"


def _row(facts: Mapping[str, Any], console: Console, num_lines: int) -> Iterator[RenderableType]:
    place = f"{facts['shard']}, row group {facts['row_group']}, row {facts['row_in_group']:,}"
    split = f", split={facts['split']}" if "split" in facts else ""
    yield printable(f"  row {facts['row']:,}: {place}{split}")
    if "filtered_by" in facts:
        yield Text(printable(f"    left out by {facts['filtered_by']}"), "yellow")
    if "bad" in facts:
        yield Text(printable(f"    cannot be used: {facts['bad']}"), "red")
    for side in SIDES:
        if f"{side}tokens" in facts:
            pieces = _pieces(facts, side)
            named = f"{side.removesuffix('_')}: " if side else ""
            yield f"    {named}{counted(facts[f'{side}num_tokens'], 'token')}, {facts[f'{side}num_loss_tokens']:,} with loss"
            yield _indented(pieces, console, num_lines)
    for name, value in facts.get("columns", {}).items():
        yield _indented([Piece(f"{name}: {value}", 0, True)], console, num_lines)


def _pieces(facts: Mapping[str, Any], side: str) -> list[Piece]:
    """Return the turns of a row, or the whole row as one piece if it has no turns. Without a tokenizer they are ids."""
    ids = facts[f"{side}tokens"]
    whole = {"in_loss": True, "num_tokens": len(ids), "text": facts.get(f"{side}text")}
    pieces, end = [], 0
    for turn in facts.get(f"{side}turns", [whole]):
        start, end = end, end + turn["num_tokens"]
        text = turn.get("text")
        pieces.append(Piece(ids_as_text(ids[start:end]) if text is None else text, turn["num_tokens"], turn["in_loss"]))
    if more := facts[f"{side}num_tokens"] - end:  # of very many tokens or turns only the first are shown
        pieces.append(Piece(" ...", more, False))
    return pieces


def _indented(pieces: Sequence[Piece], console: Console, num_lines: int) -> Padding:
    columns = num_lines * (console.width - _MARGIN)
    return Padding.indent(text_of(pieces, columns, has_styles=console.color_system is not None), _MARGIN)
