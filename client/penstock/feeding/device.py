"""Batches on a GPU: what travelled is copied there as it is, on a stream of its own, and expanded there, one batch ahead."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from penstock.batch import IGNORED
from penstock.errors import PenstockError, SpecError
from penstock.feeding.item import Item
from penstock.feeding.pinned import tensor_over
from penstock.feeding.prefetch import Prefetch
from penstock.numbers import plain
from penstock.rank import Worker
from penstock.tensors import ALL, CPU, Batch, Lines, as_tensor, kind_of, travelled
from penstock.text import counted
from penstock.wire import Frame


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """Where the loop's batches lie, and whether host memory is pinned for them."""

    device: torch.device
    pin_memory: bool


def check_device(device: str | int | torch.device | None) -> torch.device | None:
    """The device that is meant; None where batches stay in host memory, pinned if there is a GPU.

    Raises SpecError: it is none that batches can be given on, here.
    """
    if device is None:
        return None
    number = plain(device)
    name = f"cuda:{number}" if isinstance(number, int) else device
    try:
        found = torch.device(name)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise SpecError(f"device must be 'cpu', or a GPU such as 'cuda' or 'cuda:1', not {device!r}", ("device",))
    is_there = (found.index or 0) < torch.cuda.device_count() and str(found) == str(name)  # of large numbers torch makes others
    if found.type == "cuda" and not is_there:
        raise SpecError(
            f"device={device!r}, but torch sees {counted(torch.cuda.device_count(), 'GPU')} here. Install a torch with CUDA, "
            f"check CUDA_VISIBLE_DEVICES, or leave device out: batches then lie in host memory.",
            ("device",),
        )
    return found


def find_destination(device: torch.device | None, worker: Worker | None) -> Destination:
    """Where an iteration that begins in this process gives its batches. 'cuda' is the GPU that is current now.

    Raises PenstockError: a loader worker cannot give them there.
    """
    is_cuda = device is not None and device.type == "cuda"
    if worker:
        if is_cuda:
            raise PenstockError(
                f"DataLoader workers cannot give batches on device={str(device)!r}: a GPU belongs to the process of the loop. "
                f"Iterate over the dataset itself, or with num_workers=0, or leave device out."
            )
        return Destination(device=CPU, pin_memory=False)  # a DataLoader pins what its workers send
    if device is None:
        # A process that was forked off one that has used the GPU cannot use it, nor pin memory.
        return Destination(device=CPU, pin_memory=torch.cuda.is_available() and not torch.cuda._is_in_bad_fork())
    if not is_cuda:
        return Destination(device=CPU, pin_memory=False)
    index = torch.cuda.current_device() if device.index is None else device.index
    return Destination(device=torch.device("cuda", index), pin_memory=True)


def pack(frame: Frame, *, pin_memory: bool, tensors: Container[str] = ALL) -> Batch:
    """What travelled and is needed for `tensors`: where it was received, if torch can copy it from there.

    If not, as with what came through a proxy, it is a copy, in pinned memory where asked for.
    """
    kind = kind_of(frame.alike.names)
    arrays = travelled(frame, kind)
    unneeded = {name for name in kind.columns if name not in tensors}
    texts = {name: texts for name, texts in frame.texts.items() if name in tensors}
    return {name: _on_host(array, pin_memory) for name, array in arrays.items() if name not in unneeded} | texts


def _on_host(array: npt.NDArray[Any], pin_memory: bool) -> torch.Tensor:
    received = tensor_over(array)
    return as_tensor(array, pin_memory) if received is None else received


def unpack(packed: Batch, tensors: Container[str] = ALL) -> Batch:
    """What penstock.tensors.expand makes of the frame, where the packed tensors lie. On a GPU nothing waits for it."""
    kind, made = kind_of(tuple(packed)), Batch()
    for side in kind.sides:
        lines = Lines(side, packed, lambda ids: torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device))
        ids, labels = (tensor.to(torch.int64, copy=True) for tensor in (lines.ids, lines.targets))
        mask = torch.ones_like(ids) if lines.attended is None else lines.attended.to(torch.int64)
        if lines.in_loss is not None:
            labels.masked_fill_(~lines.in_loss, IGNORED)
        made.update(zip(side.names, (ids, mask, labels), strict=True))
    if "cu_seqlens" in packed:
        borders, ids = packed["cu_seqlens"], made["input_ids"]
        # Without the size torch would ask the GPU for it, and wait.
        begins = torch.repeat_interleave(borders[:-1], borders.diff(), output_size=ids.numel())
        positions = (torch.arange(ids.numel(), device=ids.device) - begins).view(ids.shape)
        made["labels"].masked_fill_(positions == 0, IGNORED)
        made |= {"position_ids": positions, "cu_seqlens": borders}
    made |= {name: packed[name] for name in kind.columns}
    return {name: value for name, value in made.items() if name in tensors}


class OnDevice:
    """Iterates over the batches of fetched frames, copied to a device and expanded there, one ahead of the loop.

    On a GPU the copy runs beside what the loop computes, and the loop's stream waits for it, not the loop.
    """

    def __init__(self, frames: Prefetch[Frame], device: torch.device, tensors: Container[str] = ALL) -> None:
        self._frames, self._device, self._tensors = frames, device, tensors
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
        # Not before: the loop's stream would wait for this one's copy, too.
        if self._frames.has_next:
            try:
                self._ahead = self._send(next(self._frames))
            except Exception as error:  # when it is this one's turn
                self._ahead = error
        return item

    def _send(self, frame: Frame) -> Item:
        # The loop may be evaluating just now, and train on this batch: of a tensor of inference mode backward keeps nothing.
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            sent = {
                name: value.to(self._device, non_blocking=True) if isinstance(value, torch.Tensor) else value
                for name, value in pack(frame, pin_memory=self._stream is not None, tensors=self._tensors).items()
            }
            return Item.of(frame, unpack(sent, self._tensors))

    def _hand_over(self, batch: Batch, stream: torch.cuda.Stream) -> None:
        loop = torch.cuda.current_stream(self._device)
        loop.wait_stream(stream)
        for value in batch.values():
            if isinstance(value, torch.Tensor):
                # It was allocated for the other stream: without this a tensor that the loop drops would be given to the
                # next copy while kernels that read it are still queued.
                value.record_stream(loop)


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all copies to a GPU. Each iteration's own would keep the memory that was allocated for it."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


_streams: dict[torch.device, torch.cuda.Stream] = {}
