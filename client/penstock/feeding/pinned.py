"""Pinned memory: host memory that a GPU copies from directly. Bodies for a GPU are received into it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.transport.buffers import MAX_BUFFER


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
