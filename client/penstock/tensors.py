"""Tensors of a training step, built from a received frame. Masks and labels are derived here, not sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping
from functools import cached_property, lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils import _pytree

from penstock.errors import SpecError
from penstock.forms import Form, offsets_of, starts_in
from penstock.wire import Address, Frame
from penstock.wire.names import IGNORED, SIDES, Parts

CPU = torch.device("cpu")
DEFAULT_FORM = Form()
Array = TypeVar("Array", npt.NDArray[Any], torch.Tensor)

# Torch has no arithmetic on these types. It has none on uint64 either, but no wider type can hold all its values.
_WIDENED = {"uint16": np.int32, "uint32": np.int64}


class Batch(dict[str, Any]):
    """A batch: tensors, and lists of texts or bytes, by their names.

    address   its dataset, snapshot, epoch, rank and step; None if other code made this batch from another one
    """

    address: Address | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return batch_of, (dict(self), self.address)  # torch.load would refuse what pickle makes of another dict


def batch_of(made: Mapping[str, Any], address: Address | None) -> Batch:
    """Build the batch of an address."""
    batch = Batch(made)
    batch.address = address
    return batch


class _Names(list[str]):
    """Names of a batch's tensors. Trees of two batches are alike if these are, whatever the addresses."""

    address: Address | None = None


def _flatten(batch: Batch) -> tuple[list[Any], _Names]:
    names = _Names(batch)
    names.address = batch.address
    return list(batch.values()), names


def _unflatten(values: Iterable[Any], names: _Names) -> Batch:
    return batch_of(dict(zip(names, values, strict=True)), names.address)


# Without this, torch's tree_map would take a batch for a single value, and torch.load would refuse one that was saved.
_pytree.register_pytree_node(Batch, _flatten, _unflatten)
torch.serialization.add_safe_globals([batch_of, Address])


class Item(NamedTuple):
    """A batch with the address, checksum and number of tokens of its frame. It does not keep the frame's memory."""

    batch: Batch
    address: Address
    digest: str
    num_tokens: int

    @property
    def step(self) -> int:
        """Step of the address."""
        return self.address.step

    @classmethod
    def of(cls, frame: Frame, made: Mapping[str, Any]) -> Item:
        """Build the item of a frame and the tensors made from it."""
        address = frame.address
        return cls(batch_of(made, address), address, frame.digest, frame.num_tokens)


class _All(Container[str]):
    def __contains__(self, name: object) -> bool:
        return True


ALL: Container[str] = _All()  # contains every tensor name


def expand(frame: Frame, *, pin_memory: bool, tensors: Container[str] = ALL, form: Form = DEFAULT_FORM) -> dict[str, Any]:
    """Build the tensors of a batch that are in `tensors`: int64 unless stated otherwise, pinned if `pin_memory`.

    input_ids       [batch_size, width]
    attention_mask  [batch_size, width], 1 on tokens and 0 on padding
    labels          [batch_size, width], the ids of the tokens that have loss and -100 elsewhere; not shifted, as Hugging
                    Face's models expect, unless labels=shifted. In seq2seq batches they are the response's, [batch_size,
                    target width]
    position_ids    [batch_size, width], from 0 in each document and in the padding, if documents are marked (best_fit)
    cu_seqlens      int32 [documents and paddings + 1]: where each begins in the flattened batch, then the size of that

    dataset_index   [batch_size], with dataset_index=1: index of each sample's dataset in RemoteDataset.datasets

    Preference pairs have the first three twice, as chosen_input_ids, rejected_input_ids, ... Passthrough columns keep their
    names and values: tensors [batch_size, ...], and lists of str or bytes. Torch cannot calculate with uint16 and uint32, so
    they become int32 and int64. uint64 stays: convert small numbers with `.to(torch.int64)`.

    A flat batch has no attention_mask: its input_ids, labels and position_ids are [1, tokens], without padding. max_seqlen,
    int64 [], is the longest document, and stays on the host.

    On a GPU, penstock.cuda.unpack builds the same tensors.
    """
    if form != DEFAULT_FORM:
        documents = {name: torch.from_numpy(array) for name, array in form.documents(frame).items()}
        made = form.apply(expand(frame, pin_memory=False), documents)
        wanted = {name: value for name, value in made.items() if name in tensors}
        if not pin_memory:
            return wanted
        return {n: as_tensor(v.numpy(), pin_memory) if isinstance(v, torch.Tensor) else v for n, v in wanted.items()}
    kind = kind_of(frame.group.names)
    arrays, made = received_arrays(frame, kind), dict[str, Any]()
    for side in kind.sides:
        ids, mask, labels = side.names
        if ids in tensors:
            made[ids] = _copied(arrays[side.parts.input_ids], np.int64, pin_memory)
        if mask not in tensors and labels not in tensors:
            continue
        parts = Side(side, arrays, _numbers_of)
        if mask in tensors:
            made[mask], ones = _empty(parts.ids.shape, np.int64, pin_memory)
            ones[...] = 1 if parts.attended is None else parts.attended
        if labels in tensors:
            made[labels], targets = _empty(parts.targets.shape, np.int64, pin_memory)
            targets[...] = parts.targets
            if parts.in_loss is not None:
                np.copyto(targets, IGNORED, where=~parts.in_loss)
    if "cu_seqlens" in arrays:
        offsets = arrays["cu_seqlens"]
        if "cu_seqlens" in tensors:
            made["cu_seqlens"] = as_tensor(offsets, pin_memory)
        if "position_ids" in tensors:
            made["position_ids"], positions = _empty(arrays["input_ids"].shape, np.int64, pin_memory)
            begins = np.repeat(offsets[:-1], np.diff(offsets))
            np.subtract(_numbers(len(begins)), begins, out=positions.reshape(-1))
        if "labels" in tensors:  # the previous document does not predict a document's first token
            made["labels"].numpy().reshape(-1)[offsets[:-1]] = IGNORED
    for name in kind.columns:
        if name in tensors:
            made[name] = as_tensor(arrays[name], pin_memory)
    if frame.group.texts:
        made |= {name: texts for name, texts in frame.texts.items() if name in tensors}
    return made


def names_of(names: Collection[str], form: Form = DEFAULT_FORM) -> list[str]:
    """Return the names of the tensors that `expand` builds from a frame with these tensors."""
    kind = kind_of(tuple(names))
    made = [name for side in kind.sides for name in side.names]
    if form.flat:
        made = ["input_ids", "labels", "position_ids", "cu_seqlens", "max_seqlen"]
    elif "document_starts" in names:
        made += ["cu_seqlens", "position_ids"]
    return [*made, *kind.columns]


class SideNames(NamedTuple):
    """Names of one side: its ids, mask and labels, and the received parts they are built from."""

    names: tuple[str, str, str]
    parts: Parts


class Side(Generic[Array]):
    """Samples of one side, as numpy arrays or torch tensors. `numbers_of(ids)` returns the column numbers, [width].

    ids, targets  [batch_size, width], as received; the targets are mostly the ids
    """

    def __init__(self, side: SideNames, arrays: Mapping[str, Array], numbers_of: Callable[[Array], Array]) -> None:
        self._parts = side.parts
        self._arrays: Mapping[str, Array] = arrays
        self._numbers_of: Callable[[Array], Array] = numbers_of
        self.ids: Array = arrays[side.parts.input_ids]

    @property
    def targets(self) -> Array:
        """Ids to predict."""
        return self._arrays.get(self._parts.labels, self.ids)

    @cached_property
    def attended(self) -> Array | None:
        """Mask of the ids that are no padding, bool; None for all of them."""
        lengths = self._arrays.get(self._parts.lengths)
        return None if lengths is None else self._numbers_of(self.ids) < lengths[:, None]

    @cached_property
    def in_loss(self) -> Array | None:
        """Mask of the targets that have a label, bool; None for all of them."""
        parts, get = self._parts, self._arrays.get
        targets, target_lengths = get(parts.labels), get(parts.label_lengths)
        loss_mask, prompt_lengths = get(parts.loss_mask), get(parts.prompt_lengths)
        if targets is not None and target_lengths is not None:
            return self._numbers_of(targets) < target_lengths[:, None]
        if loss_mask is not None:
            marked: Array = loss_mask != 0
            return marked
        if prompt_lengths is not None:
            response = self._numbers_of(self.ids) >= prompt_lengths[:, None]
            return response if self.attended is None else response & self.attended
        return self.attended


class Kind(NamedTuple):
    """Kind of a batch: the sides of its samples, and its passthrough columns."""

    sides: tuple[SideNames, ...]
    columns: tuple[str, ...]


@lru_cache
def kind_of(names: tuple[str, ...]) -> Kind:
    """Return the kind of a batch whose frame has tensors of these names."""
    sides = tuple(
        SideNames(
            (f"{side}input_ids", f"{side}attention_mask", f"{side}labels"),
            Parts(*(side + name if side + name in names else "" for name in Parts._fields)),
        )
        for side in SIDES
        if f"{side}input_ids" in names
    )
    parts = {part for side in sides for part in side.parts} | {"cu_seqlens", "document_starts"}
    return Kind(sides, tuple(name for name in names if name not in parts))


def received_arrays(frame: Frame, kind: Kind) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that `expand` needs: parts of samples, cu_seqlens, and columns in types that torch has.

    Counts documents and detects padding here, on the CPU: on a GPU this would synchronize.
    """
    arrays = frame.tensors
    for side in kind.sides:
        lengths = side.parts.lengths
        if lengths and frame.total(lengths) == arrays[side.parts.input_ids].size:
            del arrays[lengths]
    if "document_starts" in arrays:
        arrays["cu_seqlens"] = offsets_of(starts_in(arrays))
        del arrays["document_starts"]
    for name in kind.columns:
        if arrays[name].dtype.name in _WIDENED:
            arrays[name] = arrays[name].astype(_WIDENED[arrays[name].dtype.name])
    return arrays


def as_tensor(array: npt.NDArray[Any], pin_memory: bool) -> torch.Tensor:
    """Copy an array to a tensor of the same type."""
    return _copied(array, array.dtype, pin_memory)


def _copied(array: npt.NDArray[Any], dtype: npt.DTypeLike, pin_memory: bool) -> torch.Tensor:
    """Copy an array to a tensor of another type, in one pass."""
    tensor, out = _empty(array.shape, dtype, pin_memory)
    out[...] = array
    return tensor


def _empty(shape: tuple[int, ...], dtype: npt.DTypeLike, pin_memory: bool) -> tuple[torch.Tensor, npt.NDArray[Any]]:
    """Allocate a tensor of a numpy type; return it, and an array over the same memory to write through."""
    if pin_memory:
        torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        # Name the device: the trainer may have changed torch's default.
        tensor = torch.empty(shape, dtype=torch_dtype, device=CPU, pin_memory=True)
        return tensor, tensor.numpy()
    array = np.empty(shape, dtype)  # twice as fast as torch.empty
    return torch.from_numpy(array), array


def _numbers_of(ids: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    return _numbers(ids.shape[1])


@lru_cache(maxsize=8)
def _numbers(count: int) -> npt.NDArray[np.int32]:
    """Return 0, 1, 2, ..., shape [count]; read-only, because all batches share it."""
    # Not setflags: torch.compile may trace this, and does not support it.
    return np.broadcast_to(np.arange(count, dtype=np.int32), count)


def document_mask(batch: Mapping[str, Any], dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """Build a causal attention mask per document, [batch_size, 1, width, width], for models that take a 4-D mask.

    A token may attend to itself and to earlier tokens of its document. With torch.bool the mask is True there, for torch's
    scaled_dot_product_attention. With a floating-point `dtype` it is 0 there and the lowest value elsewhere, to add to scores,
    as eager attention does: an added bool mask would let tokens look ahead. Memory grows with the square of width.

    Raises SpecError: the batch has no position_ids.
    """
    if "position_ids" not in batch:
        raise SpecError("this batch does not mark where documents begin: use packing='best_fit' or mark_documents=True")
    document = (batch["position_ids"] == 0).cumsum(dim=1)
    same = document[:, :, None] == document[:, None, :]
    mask = torch.tril(same)[:, None]
    return mask if dtype == torch.bool else torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
