"""Advice that follows from the lengths of rows: cut rows lose tokens, and padding wastes a GPU's time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.spec import Spec
from penstock.text import counted

# Share of cut tokens; fewer are probably cut on purpose. In seq2seq also the share of cut lines: a model learns how they end.
_CUT_SHARE = 0.1
_PADDING_SHARE = 0.9  # share of padding in a batch's tokens
_UNLEARNED_SHARE = 0.1  # share of rows
_PAIRS = {f"{side}_{name}" for side in ("chosen", "rejected") for name in ("input_ids", "labels")}


class RowLength(NamedTuple):
    """Tokens of a row before it is cut, of each side of a preference pair; `prompt_tokens` come before the response."""

    sides: tuple[int, ...]
    prompt_tokens: int

    @classmethod
    def of_source(cls, source: Mapping[str, Any]) -> RowLength:
        """Return the length of a row in .../provenance. Raises KeyError, TypeError, ValueError: it has none."""
        sides = (source["side_tokens"] or {"row": source["row_tokens"]}).values()
        return cls(tuple(map(int, sides)), int(source["prompt_tokens"]))


class _Lines(NamedTuple):
    """Lines of a tensor made from rows: their lengths before they are cut to `longest`, which the parameter `limit` sets."""

    noun: str
    plural: str
    limit: str
    longest: int
    lengths: Sequence[int]

    @property
    def sample(self) -> str:
        """Name of these lines in a sentence."""
        return counted(len(self.lengths), f"sampled {self.noun}", f"sampled {self.plural}")


def advice_on_lengths(spec: Spec, rows: Sequence[RowLength], tensors: Collection[str]) -> Iterator[str]:
    """Yield warnings about padding and cuts, for a loop with such rows whose batches have these tensors."""
    for lines in _lines(spec, rows) if rows else []:
        kept = sum(min(length, lines.longest) for length in lines.lengths)
        padding = 1 - kept / max(len(lines.lengths) * lines.longest, 1)
        if spec.pad == "seq_len" and padding > _PADDING_SHARE:
            yield _padding_advice(spec, lines, padding, tensors)
        num_long = sum(length > lines.longest for length in lines.lengths)
        many_are_cut = spec.task == "seq2seq" and num_long > _CUT_SHARE * len(lines.lengths)
        share = 1 - kept / max(sum(lines.lengths), 1)
        if many_are_cut or share > _CUT_SHARE:
            yield _cut_advice(spec, lines, num_long, share, tensors)


def _lines(spec: Spec, rows: Sequence[RowLength]) -> list[_Lines]:
    if not spec.cuts_rows:
        return []
    if spec.task == "causal":
        noun, plural = ("side of a pair", "sides of pairs") if any(len(row.sides) > 1 for row in rows) else ("row", "rows")
        return [_Lines(noun, plural, "seq_len", spec.seq_len, [side for row in rows for side in row.sides])]
    prompts, responses = [row.prompt_tokens for row in rows], [sum(row.sides) - row.prompt_tokens for row in rows]
    return [
        _Lines("prompt", "prompts", "seq_len", spec.seq_len, prompts),
        _Lines("response", "responses", "target_seq_len", spec.target_seq_len or spec.seq_len, responses),
    ]


def _padding_advice(spec: Spec, lines: _Lines, padding: float, tensors: Collection[str]) -> str:
    batch = "a batch" if spec.task == "causal" else f"a batch's {lines.plural}"
    # Passthrough columns need one row per sample, and an encoder's input cannot be packed.
    may_pack = spec.task == "causal" and set(tensors) <= {"input_ids", "attention_mask", "labels", "dataset_index"}
    or_packed = ", or put several into one sample with packing='best_fit'" if may_pack else ""
    mean = sum(lines.lengths) / len(lines.lengths)
    return (
        f"{min(padding, 0.99):.0%} of the tokens of {batch} are padding: the mean of {lines.sample} is {mean:.0f} "
        f"tokens, and each is padded to {lines.limit}={lines.longest:,}. Lower that, or pad only to the longest of a batch, "
        f"with pad='longest'{or_packed}."
    )


def _cut_advice(spec: Spec, lines: _Lines, num_long: int, share: float, tensors: Collection[str]) -> str:
    if spec.task == "seq2seq":
        remedy = f"Whatever ends them is cut off, too. To keep all, raise {lines.limit}."
    elif are_pairs(tensors):
        remedy = "Preference pairs can be neither split nor packed: raise seq_len."
    else:
        remedy = "To keep them, use overflow='split' (several samples of a long row), packing='best_fit' or 'concat'."
    return (
        f"{num_long:,} of {lines.sample} {'is' if num_long == 1 else 'are'} longer than {lines.limit}={lines.longest:,}, and "
        f"{share:.{0 if share >= 0.01 else 1}%} of the tokens of all are in no batch of any epoch. {remedy}"
    )


def advice_on_prompts(spec: Spec, rows: Sequence[RowLength], tensors: Collection[str]) -> Iterator[str]:
    """Yield a warning if many of these rows have no token with loss."""
    num_filled = sum(row.prompt_tokens >= spec.seq_len for row in rows)
    has_loss = spec.task == "seq2seq" or spec.loss_on == "all" or not spec.cuts_rows
    if not has_loss and num_filled > _UNLEARNED_SHARE * len(rows):
        yield (
            f"no token has loss in {num_filled:,} of {counted(len(rows), 'sampled row')}, since their prompts fill "
            f"seq_len={spec.seq_len:,}. {prompt_remedy(tensors)}"
        )


def are_pairs(tensors: Collection[str]) -> bool:
    """Whether batches with these tensors hold preference pairs."""
    return bool(_PAIRS.intersection(tensors))


def prompt_remedy(tensors: Collection[str]) -> str:
    """Return what to do about prompts that fill seq_len. Both sides of such a pair are equal, whatever has a label."""
    if are_pairs(tensors):
        return "Raise it, or leave such rows out with a filter."
    return "Raise it, leave such rows out with a filter, or learn from the prompts, too, with loss_on='all'."
