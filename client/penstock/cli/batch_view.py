"""The contents of a batch for display: samples, the rows they are made of, and which tokens have loss.

`penstock inspect`, of the server's package, displays rows with it, too.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.text import Text

from penstock.text import counted, printable
from penstock.wire.names import IGNORED, SIDES

_MIN_PIECE_COLUMNS = 32


class Piece(NamedTuple):
    """Consecutive tokens, all with loss or all without: their text, or their ids if the server has no tokenizer."""

    text: str
    num_tokens: int
    in_loss: bool


class Passage(NamedTuple):
    """A sample's part of one row, or of one side of a preference pair, which `side` names then."""

    source: str
    side: str
    pieces: Sequence[Piece]

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return sum(piece.num_tokens for piece in self.pieces)


class LineView(NamedTuple):
    """One line of a tensor: its tokens, its tokens plus padding, and the tokens cut off its last row.

    `noun` names its source if that is one row or one side of a row; `limit` is the parameter that cuts it.
    """

    noun: str
    limit: str
    num_tokens: int
    num_positions: int
    num_cut: int


@dataclass(frozen=True, slots=True)
class SampleView:
    """One sample of a batch. It has one line, or one for each side of a pair, or one for encoder and decoder each.

    columns  the passthrough columns of its row
    """

    index: int
    lines: Sequence[LineView]
    num_loss_tokens: int
    passages: Sequence[Passage]
    columns: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return sum(line.num_tokens for line in self.lines)


def padding_of(lines: Sequence[LineView]) -> float:
    """Return the fraction of padding in lines."""
    return 1 - sum(line.num_tokens for line in lines) / max(sum(line.num_positions for line in lines), 1)


def view(batch: Mapping[str, Any], provenance: Mapping[str, Any]) -> list[SampleView]:
    """Build the view of a batch's samples from the server's responses to format=json and .../provenance."""
    num_positions = {name: shape[1] for name, _, shape in batch["tensors"] if len(shape) > 1}
    samples = [sample["sources"] for sample in provenance["samples"]]
    is_mixed = any(source["dataset"] != batch["dataset"] for sources in samples for source in sources)
    return [_sample(facts, sources, num_positions, is_mixed) for facts, sources in zip(batch["samples"], samples, strict=True)]


def _sample(
    facts: Mapping[str, Any], sources: Sequence[Mapping[str, Any]], num_positions: Mapping[str, int], is_mixed: bool
) -> SampleView:
    names = [_source(source, is_mixed) for source in sources]
    ends = [*accumulate(source["stop"] - source["start"] for source in sources)]
    passages, num_loss_tokens = list[Passage](), 0
    for side in SIDES:
        if f"{side}input_ids" in facts:
            mask = [label != IGNORED for label in facts[f"{side}labels"]]  # as the trainer sees it
            num_loss_tokens += sum(mask)
            by_row, start = [list[Piece]() for _ in sources], 0
            for piece in _pieces(facts, side, mask):  # no piece spans two rows
                by_row[bisect_right(ends, start)].append(piece)
                start += piece.num_tokens
            passages += [Passage(name, side.removesuffix("_"), pieces) for name, pieces in zip(names, by_row, strict=True)]
    lines = [*_lines(facts, sources[-1], num_positions)]
    return SampleView(facts["index"], lines, num_loss_tokens, passages, facts.get("columns", {}))


def _lines(facts: Mapping[str, Any], last: Mapping[str, Any], num_positions: Mapping[str, int]) -> Iterator[LineView]:
    def line(name: str, noun: str, limit: str, num_row_tokens: int) -> LineView:
        num_tokens = len(facts[name])
        return LineView(noun, limit, num_tokens, num_positions[name], num_row_tokens - num_tokens)

    if "label_lengths" in facts:
        yield line("input_ids", "prompt", "seq_len", last["prompt_tokens"])
        yield line("labels", "response", "target_seq_len", last["row_tokens"] - last["prompt_tokens"])
    elif sides := last["side_tokens"]:
        yield from (line(f"{side}_input_ids", "side", "seq_len", num_tokens) for side, num_tokens in sides.items())
    else:  # a sample of several rows is not cut before its last row
        yield line("input_ids", "row", "seq_len", len(facts["input_ids"]) - last["stop"] + last["row_tokens"])


def _source(source: Mapping[str, Any], is_mixed: bool) -> str:
    dataset = f"{source['dataset']}: " if is_mixed else ""
    start = f", from token {source['start']:,}" if source["start"] else ""
    return f"{dataset}{source['shard']}, row group {source['row_group']}, row {source['row']:,}{start}"


def _pieces(facts: Mapping[str, Any], side: str, mask: Sequence[bool]) -> Iterator[Piece]:
    """Yield the tokens of one side, cut where rows, turns and the loss begin."""
    ids = facts[f"{side}input_ids"]
    parts = [(len(ids), facts.get(f"{side}text"))] if ids else []
    if "label_lengths" in facts:  # prompt into an encoder, response out of a decoder
        parts = [(len(ids), facts.get("prompt")), (len(facts["labels"]), facts.get("response"))]
        ids, mask = ids + facts["labels"], [False] * len(ids) + [True] * len(facts["labels"])
    elif f"{side}pieces" in facts:
        parts = [(piece["num_tokens"], piece.get("text")) for piece in facts[f"{side}pieces"]]
    elif f"{side}prompt" in facts:
        prompt, response = facts[f"{side}prompt"], facts[f"{side}response"]
        num_prompt = facts.get(f"{side}prompt_lengths", mask.index(True) if True in mask else len(ids))
        parts = [(num_prompt, prompt), (len(ids) - num_prompt, response)] if num_prompt else [(len(ids), prompt + response)]
    end = 0
    for num_tokens, text in parts:
        start, end = end, end + num_tokens
        yield Piece(ids_as_text(ids[start:end]) if text is None else text, num_tokens, any(mask[start:end]))


def ids_as_text(ids: Sequence[int]) -> str:
    """Spell token ids, for datasets without a tokenizer."""
    return " ".join(map(str, ids))


def text_of(pieces: Sequence[Piece], columns: int, *, has_styles: bool) -> Text:
    """Return the text of pieces in about this many columns in all; 0: all of it.

    Each piece keeps its beginning and its end, and the first and last pieces are shown: a long prompt must not hide the
    response. Pieces without loss are dimmed, or stand between ⟦ and ⟧ if the console has no styles.
    """
    text = Text(overflow="fold")
    num_shown = max(2, columns // _MIN_PIECE_COLUMNS) if columns else len(pieces)
    num_first = len(pieces) if len(pieces) <= num_shown else -(-num_shown // 2)
    last = pieces[max(num_first, len(pieces) - num_shown // 2) :]
    share = columns // max(1, num_first + len(last))
    for number, piece in enumerate((*pieces[:num_first], *last)):
        if number == num_first:
            text.append(f" [… {counted(len(pieces) - num_first - len(last), 'more turn')} …] ", "yellow")
        marks = ("", "") if piece.in_loss or has_styles else ("⟦", "⟧")
        text.append(marks[0])
        append_abridged(text, piece.text, share, "" if piece.in_loss else "dim")
        text.append(marks[1])
    return text


def append_abridged(text: Text, addition: str, columns: int, style: str = "") -> None:
    """Append a text, cut in its middle to about this many columns; 0: all of it."""
    shown = printable(addition)
    width = cell_len(shown)
    if not columns or width <= columns:
        text.append(shown, style)
        return
    per_column = len(shown) / width  # wide characters take two columns
    # A part of a token id would read as another id: numbers at the cut are left out.
    head = re.sub(r"\d{1,10}$", "", shown[: int(columns * per_column * 2 / 3)])
    tail = re.sub(r"^\d{1,10}", "", shown[-int(columns * per_column / 3) :])
    text.append(head, style)
    text.append(f" [… {len(shown) - len(head) - len(tail):,} characters …] ", "yellow")
    text.append(tail, style)
