"""Tensors: what a training step takes, made from what travelled. Masks and labels are derived here, not sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import SpecError
from penstock.spec import IGNORED
from penstock.wire import Frame

Batch = dict[str, Any]  # tensors, and lists of texts or bytes
T = TypeVar("T")
Array = TypeVar("Array", npt.NDArray[Any], torch.Tensor)

_SIDES = ("", "chosen_", "rejected_")
_PARTS = ("input_ids", "lengths", "prompt_lengths", "loss_mask", "labels", "label_lengths")
# Torch has no arithmetic on these.
_WIDENED = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}


class _All(Container[str]):
    def __contains__(self, name: object) -> bool:
        return True


ALL: Container[str] = _All()  # the tensors of a batch


def expand(frame: Frame, *, pin_memory: bool, columns: Container[str] = ALL) -> Batch:
    """Those of the tensors of a batch that are in `columns`, int64 where nothing else is said, pinned where asked for.

    input_ids       [batch_size, width]
    attention_mask  [batch_size, width], 1 on tokens and 0 on padding
    labels          [batch_size, width], the ids of the tokens that are learned and -100 elsewhere; not shifted, as Hugging
                    Face's models expect. In seq2seq batches they are the response's, [batch_size, target width]
    position_ids    [batch_size, width], from 0 in each document and in the padding, where boundaries travel (best_fit)
    cu_seqlens      int32 [documents and paddings + 1]: where each begins in the flattened batch, and at last its size

    Preference pairs have the first three twice, as chosen_input_ids, rejected_input_ids, ... Columns that travel keep their
    names and types: tensors [batch_size, ...], and lists of str or bytes.
    """
    arrays, made = travelled(frame), Batch()
    for lines in lines_of(arrays, lambda ids: np.arange(ids.shape[1], dtype=np.int32)):
        ids, mask, labels = _names(lines.side)
        if ids in columns:
            made[ids] = copied(lines.ids, torch.int64, pin_memory)
        if mask in columns:
            made[mask] = ones = torch.empty(lines.ids.shape, dtype=torch.int64, pin_memory=pin_memory)
            ones.numpy()[...] = 1 if lines.attended is None else lines.attended
        if labels in columns:
            made[labels] = targets = copied(lines.targets, torch.int64, pin_memory)
            if lines.learned is not None:
                np.putmask(targets.numpy(), ~lines.learned, IGNORED)
    if "cu_seqlens" in arrays:
        borders = arrays["cu_seqlens"]
        if "cu_seqlens" in columns:
            made["cu_seqlens"] = copied(borders, torch.int32, pin_memory)
        if "position_ids" in columns:
            made["position_ids"] = positions = torch.empty(arrays["input_ids"].shape, dtype=torch.int64, pin_memory=pin_memory)
            begins = np.repeat(borders[:-1], np.diff(borders))
            np.subtract(np.arange(len(begins), dtype=np.int32), begins, out=positions.numpy().reshape(-1))
        if "labels" in columns:  # what a document begins with does not follow from the one before it
            made["labels"].numpy().reshape(-1)[borders[:-1]] = IGNORED
    others = {name: array for name, array in columns_of(arrays).items() if name in columns}
    texts = {name: texts for name, texts in frame.texts.items() if name in columns}
    return made | {name: as_tensor(array, pin_memory) for name, array in others.items()} | texts


def names_of(travelling: Collection[str]) -> list[str]:
    """The names of what `expand` makes of a frame with these tensors."""
    made = [name for side in _SIDES if f"{side}input_ids" in travelling for name in _names(side)]
    if "document_starts" in travelling:
        made += ["cu_seqlens", "position_ids"]
    return made + [name for name in columns_of(dict.fromkeys(travelling)) if name != "document_starts"]


def _names(side: str) -> tuple[str, str, str]:
    return f"{side}input_ids", f"{side}attention_mask", f"{side}labels"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines(Generic[Array]):
    """The sequences of one side, as arrays of numpy or of torch.

    ids, targets       [batch_size, width], as they travelled; `targets` are what is learned from, mostly the ids themselves
    attended, learned  bool, of their shapes: which are no padding, and which have a label; None for all of them
    """

    side: str
    ids: Array
    attended: Array | None
    targets: Array
    learned: Array | None


def lines_of(arrays: Mapping[str, Array], numbers_of: Callable[[Array], Array]) -> Iterator[Lines[Array]]:
    """The sequences of a batch, side by side; `numbers_of(ids)` are its columns' numbers, int32 [width]."""
    for side in _SIDES:
        ids, lengths, prompt_lengths, loss_mask, targets, target_lengths = (arrays.get(side + name) for name in _PARTS)
        if ids is None:
            continue
        numbers = numbers_of(ids)
        attended = None if lengths is None else numbers < lengths[:, None]
        learned = attended
        if prompt_lengths is not None:
            response = numbers >= prompt_lengths[:, None]
            learned = response if attended is None else response & attended
        if loss_mask is not None:
            learned = loss_mask != 0
        if targets is not None and target_lengths is not None:
            learned = numbers_of(targets) < target_lengths[:, None]
        yield Lines(side=side, ids=ids, attended=attended, targets=ids if targets is None else targets, learned=learned)


def columns_of(arrays: Mapping[str, T]) -> dict[str, T]:
    """What is no part of the sequences of a batch, but travels beside them."""
    parts = {side + name for side in _SIDES if f"{side}input_ids" in arrays for name in _PARTS} | {"cu_seqlens"}
    return {name: array for name, array in arrays.items() if name not in parts}


def travelled(frame: Frame) -> dict[str, npt.NDArray[Any]]:
    """What `expand` takes of a frame: the parts of sequences, cu_seqlens, and columns of types that torch has.

    How many documents there are, and whether there is padding, is found out here: a GPU that is asked makes everybody wait.
    """
    arrays = dict(frame.tensors)
    for side in _SIDES:
        lengths = arrays.get(f"{side}lengths")
        if lengths is not None and (lengths == arrays[f"{side}input_ids"].shape[1]).all():
            del arrays[f"{side}lengths"]
    if "document_starts" in arrays:
        starts = _unpacked(arrays.pop("document_starts"), arrays["input_ids"].shape[1])
        arrays["cu_seqlens"] = np.append(np.flatnonzero(starts), starts.size).astype(np.int32)
    return arrays | {
        name: array.astype(_WIDENED[array.dtype.name])
        for name, array in columns_of(arrays).items()
        if array.dtype.name in _WIDENED
    }


def as_tensor(array: npt.NDArray[Any], pin_memory: bool) -> torch.Tensor:
    """A copy of an array, of its own type."""
    return copied(array, torch.from_numpy(np.empty(0, array.dtype)).dtype, pin_memory)


def copied(array: npt.NDArray[Any], dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
    """A copy of an array as another type, written in one go."""
    tensor = torch.empty(array.shape, dtype=dtype, pin_memory=pin_memory)
    tensor.numpy()[...] = array
    return tensor


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


def _unpacked(bits: npt.NDArray[Any], width: int) -> npt.NDArray[np.bool_]:
    """Where a document or the padding begins, bool [batch_size, width]; every line begins one."""
    starts = np.unpackbits(bits, axis=1, count=width, bitorder="little").view(np.bool_)
    starts[:, :1] = True
    return starts
