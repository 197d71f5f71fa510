"""Advice that follows from the lengths of rows: cut rows lose tokens, and padding wastes a GPU's time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.spec import Spec

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


def advice_on_lengths(spec: Spec, rows: Sequence[RowLength], tensors: Collection[str]) -> Iterator[str]:
    """Yield warnings about padding and cuts, for a loop with such rows whose batches have these tensors."""
    if not rows:
        return
    if spec.task == "causal":
        noun = "sides of pairs" if any(len(row.sides) > 1 for row in rows) else "rows"
        yield from _advice_on(spec, noun, "seq_len", [side for row in rows for side in row.sides], tensors)
        return
    yield from _advice_on(spec, "prompts", "seq_len", [row.prompt_tokens for row in rows], tensors)
    yield from _advice_on(spec, "responses", "target_seq_len", [sum(row.sides) - row.prompt_tokens for row in rows], tensors)


def _advice_on(spec: Spec, noun: str, limit: str, lengths: list[int], tensors: Collection[str]) -> Iterator[str]:
    """Yield warnings about the lines of a tensor: their lengths before they are cut to the parameter `limit`."""
    longest = getattr(spec, limit) or spec.seq_len
    kept = sum(min(length, longest) for length in lengths)
    padding = 1 - kept / max(len(lengths) * longest, 1)
    if spec.pad == "seq_len" and padding > _PADDING_SHARE:
        # Passthrough columns need one row per sample, and an encoder's input cannot be packed.
        may_pack = spec.task == "causal" and set(tensors) <= {"input_ids", "attention_mask", "labels", "dataset_index"}
        or_packed = ", or put several into one sample with packing='best_fit'" if may_pack else ""
        yield (
            f"{min(padding, 0.99):.0%} of the tokens of a batch's {noun} are padding: the mean of {len(lengths):,} sampled "
            f"{noun} is {sum(lengths) / len(lengths):.0f} tokens, and each is padded to {limit}={longest:,}. Lower that, or "
            f"pad only to the longest of a batch, with pad='longest'{or_packed}."
        )
    num_long = sum(length > longest for length in lengths)
    many_are_cut = spec.task == "seq2seq" and num_long > _CUT_SHARE * len(lengths)
    share = 1 - kept / max(sum(lengths), 1)
    if many_are_cut or share > _CUT_SHARE:
        if spec.task == "seq2seq":
            remedy = f"Whatever ends them is cut off, too. To keep all, raise {limit}."
        elif are_pairs(tensors):
            remedy = "Preference pairs can be neither split nor packed: raise seq_len."
        else:
            remedy = "To keep them, use overflow='split' (several samples of a long row), packing='best_fit' or 'concat'."
        yield (
            f"{num_long:,} of {len(lengths):,} sampled {noun} are longer than {limit}={longest:,}, and {share:.1%} of the "
            f"tokens of all are in no batch of any epoch. {remedy}"
        )


def advice_on_prompts(spec: Spec, rows: Sequence[RowLength], tensors: Collection[str]) -> Iterator[str]:
    """Yield a warning if many of these rows have no token with loss."""
    num_filled = sum(row.prompt_tokens >= spec.seq_len for row in rows)
    has_loss = spec.task == "seq2seq" or spec.loss_on == "all"
    if not has_loss and num_filled > _UNLEARNED_SHARE * len(rows):
        yield (
            f"no token has loss in {num_filled:,} of {len(rows):,} sampled rows, since their prompts fill "
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
