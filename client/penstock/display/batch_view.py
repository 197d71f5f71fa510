"""A batch as a person looks at it: samples, the rows that they are made of, and which tokens of them have loss."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from penstock.batch import IGNORED, SIDES

MUCH_PADDING = 0.5  # of a sample, or of a batch: to be looked at


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens one after the other, all with loss or none: their text, or their ids where the server has no tokenizer."""

    text: str
    num_tokens: int
    in_loss: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """What a sample holds of one row, or of one side of a preference pair, which `side` names then."""

    source: str
    side: str
    pieces: tuple[Piece, ...]

    @property
    def num_tokens(self) -> int:
        """Its tokens."""
        return sum(piece.num_tokens for piece in self.pieces)


class LineView(NamedTuple):
    """One sample of a tensor: its tokens, its tokens plus padding, and the tokens cut off its last row.

    `noun` names its source if that is one row or one side of a row; `limit` is the parameter that cuts it.
    """

    noun: str
    limit: str
    num_tokens: int
    num_positions: int
    num_cut: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceView:
    """One sample of a batch: a line, or one for each side of a pair, or one for an encoder and one for a decoder.

    `columns` is what travels with it.
    """

    index: int
    lines: tuple[LineView, ...]
    num_loss_tokens: int
    passages: tuple[Passage, ...]
    columns: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        """Its tokens."""
        return sum(line.num_tokens for line in self.lines)

    @property
    def padding(self) -> float:
        """The share of padding, from 0 to 1."""
        return padding_of(self.lines)


def padding_of(lines: Sequence[LineView]) -> float:
    """The share of padding in some lines, from 0 to 1."""
    return 1 - sum(line.num_tokens for line in lines) / max(sum(line.num_positions for line in lines), 1)


def view(batch: Mapping[str, Any], provenance: Mapping[str, Any]) -> list[SequenceView]:
    """Build the view of a batch's samples from the server's responses to format=json and .../provenance."""
    shapes = {name: shape for name, _, shape in batch["tensors"]}
    lines = [line["sources"] for line in provenance["samples"]]
    is_mixed = any(source["dataset"] != batch["dataset"] for sources in lines for source in sources)
    return [_sample(facts, sources, shapes, is_mixed) for facts, sources in zip(batch["samples"], lines, strict=True)]


def _sample(
    facts: Mapping[str, Any], sources: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]], is_mixed: bool
) -> SequenceView:
    names = [_named(source, is_mixed) for source in sources]
    lengths = [source["stop"] - source["start"] for source in sources]
    passages: list[Passage] = []
    num_loss_tokens = 0
    for side in SIDES:
        if f"{side}input_ids" not in facts:
            continue
        for name, pieces in zip(names, _by_row(_pieces(facts, side), lengths), strict=True):
            passages.append(Passage(source=name, side=side.removesuffix("_"), pieces=tuple(pieces)))
        num_loss_tokens += sum(_mask(facts, side))
    return SequenceView(
        index=facts["index"],
        lines=tuple(_lines(facts, sources[-1], shapes)),
        num_loss_tokens=num_loss_tokens,
        passages=tuple(passages),
        columns=facts.get("columns", {}),
    )


def _lines(facts: Mapping[str, Any], last: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> Iterator[LineView]:
    def line(name: str, noun: str, limit: str, num_cut: int) -> LineView:
        return LineView(noun, limit, len(facts[name]), shapes[name][1], num_cut)

    if "label_lengths" in facts:
        prompt = last["prompt_tokens"]
        yield line("input_ids", "prompt", "seq_len", prompt - len(facts["input_ids"]))
        yield line("labels", "response", "target_seq_len", last["row_tokens"] - prompt - len(facts["labels"]))
    elif sides := last["side_tokens"]:
        for side, num_tokens in sides.items():
            name = f"{side}_input_ids"
            yield line(name, "side", "seq_len", num_tokens - len(facts[name]))
    else:
        yield line("input_ids", "row", "seq_len", last["row_tokens"] - last["stop"])


def _named(source: Mapping[str, Any], is_mixed: bool) -> str:
    dataset = f"{source['dataset']}: " if is_mixed else ""
    begin = f", from token {source['start']:,}" if source["start"] else ""
    return f"{dataset}{source['shard']}, row group {source['row_group']}, row {source['row']:,}{begin}"


def _pieces(facts: Mapping[str, Any], side: str) -> Iterator[Piece]:
    """The tokens of one side, cut where rows or turns begin and where the loss does."""
    ids = facts[f"{side}input_ids"]
    if "label_lengths" in facts:  # an encoder reads the one, a decoder learns the other
        yield Piece(facts.get("prompt", _spelled(ids)), len(ids), False)
        yield Piece(facts.get("response", _spelled(facts["labels"])), len(facts["labels"]), True)
        return
    mask = _mask(facts, side)
    end = 0
    for num_tokens, text in _lengths_and_texts(facts, side, ids, mask):
        start, end = end, end + num_tokens
        yield Piece(_spelled(ids[start:end]) if text is None else text, num_tokens, any(mask[start:end]))


def _lengths_and_texts(
    facts: Mapping[str, Any], side: str, ids: Sequence[int], mask: Sequence[bool]
) -> Iterator[tuple[int, str | None]]:
    """How many tokens, and their text if it is known."""
    if f"{side}pieces" in facts:
        yield from ((piece["num_tokens"], piece.get("text")) for piece in facts[f"{side}pieces"])
    elif f"{side}prompt" in facts:
        prompt, response = facts[f"{side}prompt"], facts[f"{side}response"]
        num_prompt = facts.get(f"{side}prompt_lengths", mask.index(True) if True in mask else len(ids))
        yield from ((num_prompt, prompt), (len(ids) - num_prompt, response)) if num_prompt else ((len(ids), prompt + response),)
    elif ids:
        yield len(ids), facts.get(f"{side}text")


def _mask(facts: Mapping[str, Any], side: str) -> list[bool]:
    """Which tokens have loss, as the trainer sees it."""
    return [label != IGNORED for label in facts[f"{side}labels"]]


def _by_row(pieces: Iterable[Piece], lengths: Sequence[int]) -> list[list[Piece]]:
    """The pieces of each row of these lengths; no piece is of two rows."""
    ends = [*accumulate(lengths)]
    found: list[list[Piece]] = [[] for _ in lengths]
    at = 0
    for piece in pieces:
        found[bisect_right(ends, at)].append(piece)
        at += piece.num_tokens
    return found


def _spelled(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))
