"""Tensors: what a training step takes, made from what travelled. Masks and labels are derived here, not sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import SpecError
from penstock.wire import Frame

IGNORED = -100  # the label that torch's cross entropy leaves out

Batch = dict[str, Any]  # tensors, and lists of texts or bytes

_SIDES = ("", "chosen_", "rejected_")
# Torch has no arithmetic on these.
_WIDENED = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}


def expand(frame: Frame, *, pin_memory: bool) -> Batch:
    """The tensors of a batch, int64 where nothing else is said, in pinned host memory where asked for.

    input_ids       [batch_size, width]
    attention_mask  [batch_size, width], 1 on tokens and 0 on padding
    labels          [batch_size, width], the ids of the tokens that are learned and -100 elsewhere; not shifted, as Hugging
                    Face's models expect. In seq2seq batches they are the response's, [batch_size, target width]
    position_ids    [batch_size, width], from 0 in each document and in the padding, where boundaries travel (best_fit)
    cu_seqlens      int32 [documents and paddings + 1]: where each begins in the flattened batch, and at last its size

    Preference pairs have the first three twice, as chosen_input_ids, rejected_input_ids, ... Columns that travel keep their
    names and types: tensors [batch_size, ...], and lists of str or bytes.
    """
    arrays = dict(frame.tensors)
    batch: dict[str, npt.NDArray[Any]] = {}
    for side in _SIDES:
        if f"{side}input_ids" in arrays:
            batch |= {side + name: array for name, array in _sequences(arrays, side).items()}
    made = {name: _copied(array, torch.int64, pin_memory) for name, array in batch.items()}
    if "document_starts" in arrays:
        starts = _starts(arrays.pop("document_starts"), batch["input_ids"].shape)
        made["position_ids"] = _copied(_positions(starts), torch.int64, pin_memory)
        made["cu_seqlens"] = _copied(np.append(np.flatnonzero(starts), starts.size), torch.int32, pin_memory)
        # What a document begins with does not follow from the one before it.
        made["labels"].numpy()[starts] = IGNORED
    for name, array in arrays.items():
        known = array.astype(_WIDENED.get(str(array.dtype), array.dtype), copy=False)
        made[name] = _copied(known, torch.from_numpy(known[:0].copy()).dtype, pin_memory)
    return made | frame.texts


def count_tokens(frame: Frame) -> int:
    """The tokens of a batch without its padding: of prompts and responses, and of both sides of a pair."""
    arrays = frame.tensors
    lengths = [f"{side}lengths" for side in _SIDES] + ["label_lengths"]
    known = [arrays[name].sum() for name in lengths if name in arrays]
    return int(sum(known)) if known else arrays["input_ids"].size  # what has no lengths has no padding


def document_mask(batch: Batch) -> torch.Tensor:
    """Which tokens may attend to which, bool [batch_size, 1, width, width]: to those before them in their own document.

    For models that take a mask of four dimensions; in memory it is width squared. Raises SpecError: the batch has no
    position_ids.
    """
    if "position_ids" not in batch:
        raise SpecError("this batch does not tell where documents begin: use packing='best_fit' or boundaries='documents'")
    document = (batch["position_ids"] == 0).cumsum(dim=1)
    same = document[:, :, None] == document[:, None, :]
    return torch.tril(same)[:, None]


def nbytes(batch: Batch) -> int:
    """The host memory that a batch takes."""
    return sum(value.nbytes if isinstance(value, torch.Tensor) else sum(map(len, value)) for value in batch.values())


def _sequences(arrays: dict[str, npt.NDArray[Any]], side: str) -> dict[str, npt.NDArray[Any]]:
    """Ids, mask and labels of one feature; what they are made of is taken out of `arrays`."""
    ids, *rest = (arrays.pop(side + name, None) for name in _DERIVED_FROM)
    lengths, prompt_lengths, loss_mask, targets, target_lengths = rest
    assert ids is not None
    mask = np.ones(ids.shape, np.bool_) if lengths is None else _before(lengths, ids)
    if targets is None or target_lengths is None:
        targets, learned = ids, mask
        if prompt_lengths is not None:
            learned = mask & ~_before(prompt_lengths, ids)
        if loss_mask is not None:
            learned = loss_mask.astype(np.bool_)
    else:
        learned = _before(target_lengths, targets)
    labels = np.where(learned, targets.astype(np.int64), IGNORED)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


_DERIVED_FROM = ("input_ids", "lengths", "prompt_lengths", "loss_mask", "labels", "label_lengths")


def _copied(array: npt.NDArray[Any], dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
    tensor = torch.empty(array.shape, dtype=dtype, pin_memory=pin_memory)
    tensor.numpy()[:] = array
    return tensor


def _starts(bits: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Where a document or the padding begins; every line begins one."""
    starts = np.unpackbits(bits, axis=1, count=shape[1], bitorder="little").astype(np.bool_)
    starts[:, :1] = True
    return starts


def _positions(starts: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    at = np.arange(starts.shape[1])
    positions: npt.NDArray[np.int64] = at - np.maximum.accumulate(np.where(starts, at, 0), axis=1)
    return positions


def _before(lengths: npt.NDArray[Any], like: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which columns of each line lie before its length; shape of `like`."""
    return np.arange(like.shape[1]) < lengths[:, None]
