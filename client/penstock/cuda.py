"""Batches on a GPU: bodies in pinned memory, copied on a side stream and expanded there, one batch ahead."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.distributed import LoaderWorker
from penstock.errors import PenstockError, SpecError
from penstock.forms import Form
from penstock.http import MAX_BUFFER
from penstock.prefetch import Prefetch
from penstock.tensors import ALL, CPU, DEFAULT_FORM, Batch, Item, Side, as_tensor, kind_of, received_arrays
from penstock.text import counted
from penstock.wire import Frame
from penstock.wire.names import IGNORED


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """Device of the loop's batches, and whether their host memory is pinned."""

    device: torch.device
    pin_memory: bool


def check_device(device: str | int | torch.device | None) -> torch.device | None:
    """Return the torch device; None leaves batches in host memory, pinned if there is a GPU.

    Raises SpecError: the device is invalid, or this machine does not have it.
    """
    if device is None:
        return None
    try:
        chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError):
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise SpecError(f"device must be 'cpu', or a GPU such as 'cuda' or 'cuda:1', not {device!r}", ("device",))
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise SpecError(
            f"device={device!r}, but torch sees {counted(torch.cuda.device_count(), 'GPU')} here. Install a torch with CUDA, "
            f"check CUDA_VISIBLE_DEVICES, or leave device out: batches then lie in host memory.",
            ("device",),
        )
    return chosen


def find_destination(device: torch.device | None, worker: LoaderWorker | None) -> Destination:
    """Return the destination of batches for an iteration in this process. 'cuda' is the current GPU.

    Raises PenstockError: a loader worker cannot yield batches on a GPU.
    """
    is_cuda = device is not None and device.type == "cuda"
    if worker:
        if is_cuda:
            raise PenstockError(
                f"DataLoader workers cannot give batches on device={str(device)!r}: a GPU belongs to the process of the loop. "
                f"Iterate over the dataset itself, or with num_workers=0, or leave device out."
            )
        return Destination(device=CPU, pin_memory=False)  # a DataLoader pins its workers' batches
    if device is None:
        # A fork of a process that has used the GPU can neither use it nor pin memory.
        return Destination(device=CPU, pin_memory=torch.cuda.is_available() and not torch.cuda._is_in_bad_fork())
    if not is_cuda:
        return Destination(device=CPU, pin_memory=False)
    index = torch.cuda.current_device() if device.index is None else device.index
    return Destination(device=torch.device("cuda", index), pin_memory=True)


def allocate_pinned(gpu: torch.device, nbytes: int) -> memoryview:
    """Allocate pinned memory for a GPU. Torch reuses it once no reference and no running copy to a GPU is left.

    It takes the next power of two of bytes, and torch never frees it: so memory above MAX_BUFFER is not pinned. Raises what
    torch raises if no memory is left.
    """
    if nbytes > MAX_BUFFER:
        return memoryview(bytearray(nbytes))
    # A new thread uses GPU 0: every rank that has not used its GPU yet would take some memory there.
    with torch.cuda.device(gpu):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy().data


def tensor_over(array: npt.NDArray[Any]) -> torch.Tensor | None:
    """Return a tensor over an array's memory if a tensor owns it; None otherwise, or if torch cannot view it.

    Torch tracks by a tensor's storage which pinned memory a copy reads from. It does not for a tensor made from an array: the
    next body would overwrite bytes that are still to be copied.
    """
    owner: Any = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if not isinstance(owner, torch.Tensor) or not array.flags.c_contiguous:
        return None
    begin = array.ctypes.data - owner.data_ptr()
    if begin % array.itemsize:
        return None
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return owner[begin : begin + array.nbytes].view(dtype).view(array.shape)


def pack(frame: Frame, *, pin_memory: bool, tensors: Container[str] = ALL) -> dict[str, Any]:
    """Return the received arrays that `tensors` need, as tensors over the receive buffer if torch can copy from it.

    Otherwise, for example after a proxy, they are copies, pinned if `pin_memory`.
    """
    kind = kind_of(frame.group.names)
    arrays = received_arrays(frame, kind)
    unneeded = {name for name in kind.columns if name not in tensors}
    texts = {name: texts for name, texts in frame.texts.items() if name in tensors}
    return {name: _on_host(array, pin_memory) for name, array in arrays.items() if name not in unneeded} | texts


def _on_host(array: npt.NDArray[Any], pin_memory: bool) -> torch.Tensor:
    received = tensor_over(array)
    return as_tensor(array, pin_memory) if received is None else received


def unpack(packed: Mapping[str, Any], tensors: Container[str] = ALL) -> dict[str, Any]:
    """Expand packed tensors on their device, as penstock.tensors.expand does. It never synchronizes with a GPU."""
    kind, made = kind_of(tuple(packed)), dict[str, Any]()
    for side in kind.sides:
        parts = Side(side, packed, lambda ids: torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device))
        ids, labels = (tensor.to(torch.int64, copy=True) for tensor in (parts.ids, parts.targets))
        mask = torch.ones_like(ids) if parts.attended is None else parts.attended.to(torch.int64)
        if parts.in_loss is not None:
            labels.masked_fill_(~parts.in_loss, IGNORED)
        made.update(zip(side.names, (ids, mask, labels), strict=True))
    if "cu_seqlens" in packed:
        offsets, ids = packed["cu_seqlens"], made["input_ids"]
        # Without output_size torch would synchronize with the GPU to learn it.
        begins = torch.repeat_interleave(offsets[:-1], offsets.diff(), output_size=ids.numel())
        positions = (torch.arange(ids.numel(), device=ids.device) - begins).view(ids.shape)
        made["labels"].masked_fill_(positions == 0, IGNORED)
        made |= {"position_ids": positions, "cu_seqlens": offsets}
    made |= {name: packed[name] for name in kind.columns}
    return {name: value for name, value in made.items() if name in tensors}


class OnDevice:
    """Iterator over batches that are copied to a device and expanded there, one batch ahead of the loop.

    On a GPU the copy overlaps with the loop's computation. The loop's stream waits for the copy; the loop itself does not.
    """

    def __init__(
        self, frames: Prefetch[Frame], device: torch.device, tensors: Container[str] = ALL, form: Form = DEFAULT_FORM
    ) -> None:
        self._frames, self._device, self._tensors, self._form = frames, device, tensors, form
        self._stream = _side_stream(device) if device.type == "cuda" else None
        self._ahead: Item | Exception | None = None

    def __iter__(self) -> OnDevice:
        return self

    def __next__(self) -> Item:
        item, self._ahead = self._ahead or self._send(next(self._frames)), None
        if isinstance(item, Exception):
            raise item
        if self._stream:
            self._hand_over(item.batch, self._stream)
        # Only now: earlier, the loop's stream would wait for the next batch's copy, too.
        if self._frames.has_next:
            try:
                self._ahead = self._send(next(self._frames))
            except Exception as error:  # raised when the loop requests this batch
                self._ahead = error
        return item

    def _send(self, frame: Frame) -> Item:
        # The loop may evaluate now, and train on this batch later: backward does not work on inference tensors.
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            if self._form == DEFAULT_FORM:
                return Item.of(frame, unpack(self._sent(self._packed(frame)), self._tensors))
            # All of them, as a finished tensor may depend on others.
            pin_memory = self._stream is not None
            documents = {name: as_tensor(array, pin_memory) for name, array in self._form.documents(frame).items()}
            made = self._form.apply(unpack(self._sent(self._packed(frame))), self._sent(documents))
            if "max_seqlen" in documents:
                made["max_seqlen"] = documents["max_seqlen"]  # kernels take it from the host
            return Item.of(frame, {name: value for name, value in made.items() if name in self._tensors})

    def _packed(self, frame: Frame) -> dict[str, Any]:
        return pack(frame, pin_memory=self._stream is not None, tensors=self._tensors)

    def _sent(self, packed: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value.to(self._device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in packed.items()
        }

    def _hand_over(self, batch: Batch, stream: torch.cuda.Stream) -> None:
        loop = torch.cuda.current_stream(self._device)
        loop.wait_stream(stream)
        for value in batch.values():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                # The tensor was allocated on the copy stream. Without this call the allocator could reuse it for the next
                # copy after the loop drops it, while queued kernels still read it.
                value.record_stream(loop)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all copies to a GPU. A stream per iteration would keep its allocated memory."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
