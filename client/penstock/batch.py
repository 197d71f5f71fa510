"""A batch as it travels: what its tensors are called, and how many tokens they hold."""

from __future__ import annotations

from penstock.wire import Alike, Frame

IGNORED = -100  # the label of what is not learned: torch's cross entropy leaves it out
SIDES = ("", "chosen_", "rejected_")  # how tensors' names begin: those of sequences, and of the two of a preference pair
PARTS = ("input_ids", "lengths", "prompt_lengths", "loss_mask", "labels", "label_lengths")  # what may travel of a side
# What a column must not be called: what travels, and what is made of it.
TENSOR_NAMES = {
    *(side + name for side in SIDES for name in (*PARTS, "attention_mask", "position_ids")),
    *("document_starts", "cu_seqlens"),
}


def count_tokens(frame: Frame) -> int:
    """The tokens of a batch without its padding: of prompts and responses, and of both sides of a pair."""
    alike = frame.alike
    if alike.num_tokens is None:
        alike.num_tokens = _num_tokens(alike)
    return alike.num_tokens[frame.number]


def _num_tokens(alike: Alike) -> list[int]:
    lengths = [name for name in (*(f"{side}lengths" for side in SIDES), "label_lengths") if name in alike.names]
    if lengths:
        return [sum(each) for each in zip(*map(alike.totals, lengths), strict=True)]
    ids = alike.arrays["input_ids"]
    return [ids[0].size] * len(ids)  # what has no lengths has no padding
