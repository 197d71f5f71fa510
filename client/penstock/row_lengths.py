"""What follows from how long rows are: cut, most of a document is in no batch; padded, most of a GPU's time is for nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from penstock.spec import Spec
from penstock.wording import counted

_CUT_SHARE = 0.1  # of their tokens; who cuts fewer means to
_PADDING_SHARE = 0.9  # of what is trained on
_UNLEARNED_SHARE = 0.1  # of rows


class RowLength(NamedTuple):
    """The tokens of a row, before it is cut, and how many of them come before its first response."""

    tokens: int
    prompt_tokens: int


class _Lines(NamedTuple):
    """What each row makes one line of a batch of: `noun` names it, `longest` is what it is cut to, by the parameter `limit`."""

    noun: str
    limit: str
    longest: int
    lengths: Sequence[int]

    @property
    def num_cut(self) -> int:
        """The tokens that are cut off."""
        return sum(max(0, length - self.longest) for length in self.lengths)

    @property
    def padding(self) -> float:
        """The share of padding where each line is as long as it may be."""
        return 1 - sum(min(length, self.longest) for length in self.lengths) / max(len(self.lengths) * self.longest, 1)

    @property
    def first(self) -> str:
        """How these are called in a sentence."""
        return f"the epoch's first {counted(len(self.lengths), self.noun)}"


def advice_on_lengths(spec: Spec, rows: Sequence[RowLength], tensors: Collection[str]) -> Iterator[str]:
    """What to tell a loop whose epoch begins with rows of these lengths, and whose batches have these tensors."""
    for lines in _lines(spec, rows):
        if spec.pad == "seq_len" and rows and lines.padding > _PADDING_SHARE:
            yield _of_padding(spec, lines, tensors)
        if lines.num_cut > _CUT_SHARE * sum(lines.lengths):
            yield _of_cuts(spec, lines, tensors)


def _lines(spec: Spec, rows: Sequence[RowLength]) -> list[_Lines]:
    if not spec.cuts_rows:
        return []
    if spec.task == "causal":
        return [_Lines("row", "seq_len", spec.seq_len, [row.tokens for row in rows])]
    prompts, responses = [row.prompt_tokens for row in rows], [row.tokens - row.prompt_tokens for row in rows]
    return [
        _Lines("prompt", "seq_len", spec.seq_len, prompts),
        _Lines("response", "target_len", spec.target_len or spec.seq_len, responses),
    ]


def _of_padding(spec: Spec, lines: _Lines, tensors: Collection[str]) -> str:
    of_batch = "a batch" if spec.task == "causal" else f"a batch's {lines.noun}s"
    # Columns go with rows alone, and what an encoder reads is not packed.
    may_pack = spec.task == "causal" and set(tensors) <= {"input_ids", "attention_mask", "labels", "dataset_index"}
    or_packed = ", or put several into one sequence with packing='best_fit'" if may_pack else ""
    mean = sum(lines.lengths) / len(lines.lengths)
    return (
        f"{int(100 * lines.padding)}% of the tokens of {of_batch} are padding: {lines.first} have {mean:.0f} tokens on "
        f"average, and each is padded to {lines.limit}={lines.longest:,}. Pad only to the longest of a batch with "
        f"pad='longest'{or_packed}."
    )


def _of_cuts(spec: Spec, lines: _Lines, tensors: Collection[str]) -> str:
    if spec.task == "seq2seq":
        way_out = f"To keep them, raise {lines.limit}."
    elif any(name.startswith("chosen_") for name in tensors):
        way_out = "Preference pairs can be neither split nor packed: raise seq_len."
    else:
        way_out = "To keep them, use long_rows='split' (several sequences of a long row), packing='best_fit' or 'concat'."
    num_long = sum(length > lines.longest for length in lines.lengths)
    return (
        f"{num_long:,} of {lines.first} {'is' if num_long == 1 else 'are'} longer than {lines.limit}={lines.longest:,}, and "
        f"{lines.num_cut / sum(lines.lengths):.0%} of the tokens of those first {lines.noun}s are in no batch of any epoch. "
        f"{way_out}"
    )


def advice_on_prompts(spec: Spec, rows: Sequence[RowLength], tensors: Collection[str]) -> Iterator[str]:
    """What to tell a loop that learns nothing from many of these rows."""
    num_filled = sum(row.prompt_tokens >= spec.seq_len for row in rows)
    learns = spec.task == "seq2seq" or spec.loss == "all" or not spec.cuts_rows
    if not learns and num_filled > _UNLEARNED_SHARE * len(rows):
        yield (
            f"nothing is learned from {num_filled:,} of the epoch's first {counted(len(rows), 'row')}, since their prompts "
            f"fill seq_len={spec.seq_len:,}. {way_out_of_prompts(tensors)}"
        )


def way_out_of_prompts(tensors: Collection[str]) -> str:
    """What to do about prompts that fill seq_len. Of a pair both sides are the same then, whatever has a label."""
    if any(name.startswith("chosen_") for name in tensors):
        return "Raise it, or leave such rows out with a filter."
    return "Raise it, leave such rows out with a filter, or learn from the prompts, too, with loss='all'."
