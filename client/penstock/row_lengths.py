"""What follows from how long rows are: cut, most of a document is in no batch; padded, most of a GPU's time is for nothing."""

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
    """The tokens of a row, before it is cut, of a preference pair those of each side; `prompt_tokens` are before a response."""

    sides: tuple[int, ...]
    prompt_tokens: int

    @classmethod
    def of_source(cls, source: Mapping[str, Any]) -> RowLength:
        """That of a row as .../provenance tells it. Raises KeyError, TypeError, ValueError: it tells something else."""
        sides = (source["side_tokens"] or {"row": source["row_tokens"]}).values()
        return cls(tuple(map(int, sides)), int(source["prompt_tokens"]))


class _Lines(NamedTuple):
    """What rows become, each a line of a tensor: of these lengths, but cut to `longest`, which the parameter `limit` sets."""

    noun: str
    plural: str
    limit: str
    longest: int
    lengths: Sequence[int]

    @property
    def num_cut(self) -> int:
        """The tokens that are cut off."""
        return sum(max(0, length - self.longest) for length in self.lengths)

    @property
    def num_long(self) -> int:
        """The lines that are cut."""
        return sum(length > self.longest for length in self.lengths)

    @property
    def padding(self) -> float:
        """The share of padding where each line is made as long as it may be."""
        return 1 - sum(min(length, self.longest) for length in self.lengths) / max(len(self.lengths) * self.longest, 1)

    @property
    def sample(self) -> str:
        """How these are called in a sentence."""
        return counted(len(self.lengths), f"sampled {self.noun}", f"sampled {self.plural}")


def advice_on_lengths(spec: Spec, rows: Sequence[RowLength], tensors: Collection[str]) -> Iterator[str]:
    """What to tell a loop that is given rows of such lengths, and whose batches have these tensors."""
    for lines in _lines(spec, rows):
        if spec.pad == "seq_len" and rows and lines.padding > _PADDING_SHARE:
            yield _of_padding(spec, lines, tensors)
        many_are_cut = spec.task == "seq2seq" and lines.num_long > _CUT_SHARE * len(lines.lengths)
        if many_are_cut or lines.num_cut > _CUT_SHARE * sum(lines.lengths):
            yield _of_cuts(spec, lines, tensors)


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


def _of_padding(spec: Spec, lines: _Lines, tensors: Collection[str]) -> str:
    of_batch = "a batch" if spec.task == "causal" else f"a batch's {lines.plural}"
    # Passthrough columns need one row per sample, and an encoder's input cannot be packed.
    may_pack = spec.task == "causal" and set(tensors) <= {"input_ids", "attention_mask", "labels", "dataset_index"}
    or_packed = ", or put several into one sample with packing='best_fit'" if may_pack else ""
    mean = sum(lines.lengths) / len(lines.lengths)
    return (
        f"{min(lines.padding, 0.99):.0%} of the tokens of {of_batch} are padding: the mean of {lines.sample} is {mean:.0f} "
        f"tokens, and each is padded to {lines.limit}={lines.longest:,}. Lower that, or pad only to the longest of a batch, "
        f"with pad='longest'{or_packed}."
    )


def _of_cuts(spec: Spec, lines: _Lines, tensors: Collection[str]) -> str:
    if spec.task == "seq2seq":
        remedy = f"Whatever ends them is cut off, too. To keep all, raise {lines.limit}."
    elif are_pairs(tensors):
        remedy = "Preference pairs can be neither split nor packed: raise seq_len."
    else:
        remedy = "To keep them, use overflow='split' (several samples of a long row), packing='best_fit' or 'concat'."
    share = lines.num_cut / sum(lines.lengths)
    return (
        f"{lines.num_long:,} of {lines.sample} {'is' if lines.num_long == 1 else 'are'} longer than "
        f"{lines.limit}={lines.longest:,}, and {share:.{0 if share >= 0.01 else 1}%} of the tokens of all are in no batch of "
        f"any epoch. {remedy}"
    )


def advice_on_prompts(spec: Spec, rows: Sequence[RowLength], tensors: Collection[str]) -> Iterator[str]:
    """What to tell a loop that learns nothing from many of these rows."""
    num_filled = sum(row.prompt_tokens >= spec.seq_len for row in rows)
    learns = spec.task == "seq2seq" or spec.loss_on == "all" or not spec.cuts_rows
    if not learns and num_filled > _UNLEARNED_SHARE * len(rows):
        yield (
            f"no token has loss in {num_filled:,} of {counted(len(rows), 'sampled row')}, since their prompts fill "
            f"seq_len={spec.seq_len:,}. {way_out_of_prompts(tensors)}"
        )


def are_pairs(tensors: Collection[str]) -> bool:
    """Whether batches with these tensors are of preference pairs."""
    return bool(_PAIRS.intersection(tensors))


def way_out_of_prompts(tensors: Collection[str]) -> str:
    """What to do about prompts that fill seq_len. Of a pair both sides are the same then, whatever has a label."""
    if are_pairs(tensors):
        return "Raise it, or leave such rows out with a filter."
    return "Raise it, leave such rows out with a filter, or learn from the prompts, too, with loss_on='all'."
