"""Forms of a batch's tensors beside the default: shifted labels, padding on the left, all samples in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import SpecError
from penstock.spec import Spec
from penstock.wire import Frame
from penstock.wire.names import IGNORED, SIDES


class Form(NamedTuple):
    """Form of the tensors.

    shifted    labels[i] is the token after input_ids[i]; a received line has one token more than the inputs
    flat       all tokens without padding in one line, [1, tokens]
    pads_left  padding comes before the tokens
    """

    shifted: bool = False
    flat: bool = False
    pads_left: bool = False

    @classmethod
    def of(cls, spec: Spec, pad_side: object, flatten: object) -> Self:
        """Build the form of a dataset's parameters. Raises SpecError: they are wrong, or batches of the spec cannot have it."""
        if pad_side not in ("right", "left"):
            raise SpecError(f'pad_side must be "right" or "left", not {pad_side!r}', ("pad_side",))
        if not isinstance(flatten, bool):
            raise SpecError(f"flatten must be true or false, not {flatten!r}", ("flatten",))
        if pad_side == "left" and (flatten or spec.packing != "rows" or spec.task != "causal"):
            raise SpecError("pad_side='left' needs packing='rows', task='causal' and no flatten", ("pad_side",))
        if flatten and spec.task != "causal":
            raise SpecError("flatten needs task='causal': a response is a line beside its prompt", ("flatten", "task"))
        return cls(shifted=spec.labels == "shifted", flat=flatten, pads_left=pad_side == "left")

    def documents(self, frame: Frame) -> dict[str, npt.NDArray[Any]]:
        """Find the documents of the finished tensors, on the host: on a GPU this would synchronize. Empty if none are marked.

        cu_seqlens   int32 [documents + 1]: where each begins among the finished tokens, then their number
        max_seqlen   int64 [], if flat: the longest of them
        kept_tokens  int64 [tokens], if flat: the places of the tokens that are no padding
        """
        arrays, found = frame.tensors, dict[str, npt.NDArray[Any]]()
        if "document_starts" not in arrays and not self.flat:
            return found
        starts = starts_in(arrays)[:, : -1 if self.shifted else None]
        if self.flat:
            kept = np.ones_like(starts)
            if "lengths" in arrays:
                kept = np.arange(starts.shape[1], dtype=np.int32) < arrays["lengths"][:, None]
            starts = starts[kept]
            longest = np.diff(np.flatnonzero(starts), append=starts.size).max()
            found = {"kept_tokens": np.flatnonzero(kept), "max_seqlen": np.array(longest, np.int64)}
        return found | {"cu_seqlens": offsets_of(starts)}

    def apply(self, batch: Mapping[str, Any], documents: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Bring the tensors of a batch of the default form into this one. It never synchronizes with a GPU."""
        made = {**batch, **documents}
        for names in ((f"{side}input_ids", f"{side}attention_mask", f"{side}labels") for side in SIDES):
            if names[0] not in made:
                continue
            ids, mask, labels = (made[name] for name in names)
            if self.shifted:
                ids, mask, labels = ids[:, :-1], mask[:, :-1], labels[:, 1:]
            if self.pads_left:
                width = ids.shape[1]
                columns = (torch.arange(width, device=ids.device) + mask.sum(dim=1, keepdim=True)) % width
                ids, mask, labels = (lines.gather(1, columns) for lines in (ids, mask, labels))
            made |= zip(names, (ids, mask, labels), strict=True)
        if self.shifted and "position_ids" in made:
            made["position_ids"] = made["position_ids"][:, :-1]
        if self.flat:
            made |= self._flattened(made)
            del made["kept_tokens"], made["attention_mask"]
        return {name: value.contiguous() if isinstance(value, torch.Tensor) else value for name, value in made.items()}

    def _flattened(self, made: Mapping[str, Any]) -> dict[str, Any]:
        kept, offsets = made["kept_tokens"], made["cu_seqlens"]
        ids, labels = (made[name].reshape(-1)[kept][None] for name in ("input_ids", "labels"))
        begins = torch.repeat_interleave(offsets[:-1], offsets.diff(), output_size=len(kept))
        positions = (torch.arange(len(kept), device=kept.device) - begins)[None]
        if not self.shifted:  # the previous document does not predict a document's first token
            labels.masked_fill_(positions == 0, IGNORED)
        return {"input_ids": ids, "labels": labels, "position_ids": positions}


def starts_in(arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
    """Return the starts of documents and padding, bool [batch_size, received width]; each sample begins one."""
    size, width = arrays["input_ids"].shape
    if "document_starts" in arrays:
        starts = np.unpackbits(arrays["document_starts"], axis=1, count=width, bitorder="little").view(np.bool_)
    else:
        starts = np.zeros((size, width), np.bool_)
    starts[:, :1] = True
    return starts


def offsets_of(starts: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Return where documents begin in the flattened starts, then their size: int32 [documents + 1]."""
    begins = np.flatnonzero(starts)
    offsets = np.empty(len(begins) + 1, np.int32)
    offsets[:-1], offsets[-1] = begins, starts.size
    return offsets
