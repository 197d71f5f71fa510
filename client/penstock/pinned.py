"""Pinned memory: host memory that a GPU copies from by itself. Bodies are received into it where batches go to a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def allocate_pinned(gpu: int, nbytes: int) -> memoryview:
    """Pinned memory for a GPU. Torch uses it again once nobody looks at it and no copy to a GPU reads from it any more.

    Raises what torch raises where none is left.
    """
    # A thread begins on GPU 0, and the first to pin memory there would take some of GPU 0's for every rank.
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
