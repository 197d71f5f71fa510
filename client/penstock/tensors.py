"""Tensors: what a training step takes, made from what travelled. Masks and labels are derived here, not sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.wire import Frame

IGNORED = -100  # the label that torch's cross entropy leaves out

Batch = dict[str, torch.Tensor]


def expand(frame: Frame, *, pin_memory: bool) -> Batch:
    """The tensors of a batch, all int64, in pinned host memory where asked for.

    input_ids       [batch_size, width]
    attention_mask  [batch_size, width], 1 on tokens and 0 on padding
    labels          [batch_size, width], the ids of the tokens that are learned and -100 elsewhere; not shifted, as Hugging
                    Face's models expect. In seq2seq batches they are the response's, [batch_size, target width]
    """
    arrays = frame.tensors
    ids = arrays["input_ids"]
    mask = _before(arrays["lengths"], ids) if "lengths" in arrays else np.ones(ids.shape, np.bool_)
    if "labels" in arrays:
        targets = arrays["labels"]
        learned = _before(arrays["label_lengths"], targets)
    else:
        targets, learned = ids, mask
        if "prompt_lengths" in arrays:
            learned = mask & ~_before(arrays["prompt_lengths"], ids)
        if "loss_mask" in arrays:
            learned = arrays["loss_mask"].astype(np.bool_)
    batch = {
        name: torch.empty(a.shape, dtype=torch.int64, pin_memory=pin_memory)
        for name, a in (("input_ids", ids), ("attention_mask", mask), ("labels", targets))
    }
    batch["input_ids"].numpy()[:] = ids
    batch["attention_mask"].numpy()[:] = mask
    labels = batch["labels"].numpy()
    labels[:] = IGNORED
    np.copyto(labels, targets, where=learned)
    return batch


def nbytes(batch: Batch) -> int:
    """The host memory that a batch takes."""
    return sum(tensor.nbytes for tensor in batch.values())


def _before(lengths: npt.NDArray[Any], like: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which columns of each line lie before its length; shape of `like`."""
    return np.arange(like.shape[1]) < lengths[:, None]
