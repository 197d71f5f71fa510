"""A batch as it travels: what its tensors are called, and how many tokens they hold."""

from __future__ import annotations

from typing import NamedTuple

from penstock.wire import Frame, FrameGroup

IGNORED = -100  # label of a token without loss: the default ignore_index of torch's cross entropy
SIDES = ("", "chosen_", "rejected_")  # prefixes of tensor names: a plain sample, and the two sides of a preference pair


class Parts(NamedTuple):
    """The tensors that may travel of one side: the name of each, with the side's before it; "" for one that does not travel."""

    input_ids: str
    lengths: str
    prompt_lengths: str
    loss_mask: str
    labels: str
    label_lengths: str


# No column may be called as a tensor is that travels, or that is made of one.
TENSOR_NAMES = {
    *(side + name for side in SIDES for name in (*Parts._fields, "attention_mask", "position_ids")),
    *("document_starts", "cu_seqlens"),
}


def count_tokens(frame: Frame) -> int:
    """The tokens of a batch without its padding: of prompts and responses, and of both sides of a pair."""
    alike = frame.alike
    if alike.num_tokens is None:
        alike.num_tokens = _num_tokens(alike)
    return alike.num_tokens[frame.number]


def _num_tokens(alike: FrameGroup) -> list[int]:
    lengths = [name for name in (*(f"{side}lengths" for side in SIDES), "label_lengths") if name in alike.names]
    if lengths:
        return [sum(each) for each in zip(*map(alike.totals, lengths), strict=True)]
    ids = alike.arrays["input_ids"]
    return [ids[0].size] * len(ids)  # what has no lengths has no padding
