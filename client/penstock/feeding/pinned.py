"""Pinned memory: host memory that a GPU copies from by itself. Bodies whose batches go to a GPU are received into it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.transport.buffers import MAX_BUFFER


def allocate_pinned(gpu: torch.device, nbytes: int) -> memoryview:
    """Pinned memory for a GPU. Torch uses it again once nobody looks at it and no copy to a GPU reads from it any more.

    It takes the next power of two of bytes, and torch keeps it: so what is larger than most bodies are is not pinned. Raises
    what torch raises where there is no more.
    """
    if nbytes > MAX_BUFFER:
        return memoryview(bytearray(nbytes))
    # A thread begins on GPU 0, and would take some of its memory for every rank that has nothing on its own GPU yet.
    with torch.cuda.device(gpu):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy().data


def tensor_over(array: npt.NDArray[Any]) -> torch.Tensor | None:
    """A tensor of the same memory, where that is a tensor's own; None if it is not, or torch cannot look at it so.

    Torch knows by a tensor's storage which pinned memory a copy reads from. Of a tensor that it made of an array it would not
    know, and what is received next would be written over what is still to be copied.
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
