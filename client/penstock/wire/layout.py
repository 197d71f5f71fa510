"""Layouts: offsets of a batch's tensors in its payload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import VersionMismatch, WireError

ALIGNMENT = 64
TEXTS = ("utf8", "binary")
MAX_SAMPLES = 1 << 17  # more than any batch has, and in a header no smaller number takes more bytes
DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64")
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """Layout of one tensor in a payload, `offset` bytes from the payload's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without the filler after it."""
        if self.dtype in TEXTS:
            count, nbytes = self.shape
            return 8 * (count + 1) + nbytes
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a payload and its length in bytes, a multiple of 64."""

    tensors: tuple[TensorLayout, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> Layout:
        """Lay out tensors (name, dtype, shape) in order, each on a 64-byte boundary."""
        placed: list[TensorLayout] = []
        end = 0
        for name, dtype, shape in tensors:
            tensor = TensorLayout(name=name, dtype=dtype, shape=shape, offset=end)
            placed.append(tensor)
            end += round_up(tensor.nbytes)
        return cls(tuple(placed), end)

    def arrays(self, body: memoryview, begin: int, stride: int, count: int) -> dict[str, npt.NDArray[Any]]:
        """View the tensors of `count` payloads, each [count, *shape]: the first at byte `begin`, then each `stride` bytes.

        Texts are raw bytes, shape [count, nbytes]. The views keep the body's memory alive.
        """
        # np.ndarray keeps only arrays alive: without frombuffer the receive buffer could be reused during a read.
        memory, views = np.frombuffer(body, np.uint8), {}
        for tensor in self.tensors:
            at, dtype = begin + tensor.offset, DTYPES.get(tensor.dtype, np.dtype(np.uint8))
            shape = (tensor.nbytes,) if tensor.dtype in TEXTS else tensor.shape
            first = np.ndarray(shape, dtype, memory, at)
            views[tensor.name] = np.ndarray((count, *shape), dtype, memory, at, (stride, *first.strides))
        return views


@lru_cache(maxsize=256)  # most frames of a run have the same layout
def layout_of(tensors: tuple[tuple[str, str, tuple[int, ...], int], ...], nbytes: int) -> Layout:
    """Build the layout of a header whose checksum is verified.

    Raises:
        VersionMismatch: a tensor has a dtype unknown to this client.
        TypeError, ValueError: a field is of the wrong kind, or a size is negative.
    """
    for name, dtype, _, _ in tensors:
        if dtype not in DTYPES and dtype not in TEXTS:
            raise VersionMismatch(
                f"the server sends what this client does not know ({name} is {dtype}): install the same penstock on both"
            )
    placed = [TensorLayout(name=str(n), dtype=d, shape=tuple(map(index, s)), offset=index(o)) for n, d, s, o in tensors]
    if min((size for tensor in placed for size in (tensor.offset, *tensor.shape)), default=0) < 0:
        raise ValueError("a size is negative")
    return Layout(tuple(placed), nbytes)


def unpack_texts(tensor: TensorLayout, content: npt.NDArray[np.uint8]) -> list[str] | list[bytes]:
    """Read the texts or bytes of a utf8 or binary tensor. Raises WireError: invalid offsets or UTF-8."""
    head = 8 * (tensor.shape[0] + 1)
    offsets, body = content[:head].view("<i8"), content[head:].tobytes()
    # Texts that overlap would take many times the bytes of the body.
    if offsets[0] < 0 or (offsets[1:] < offsets[:-1]).any() or offsets[-1] > len(body):
        raise WireError(f"{tensor.name} has texts that overlap or are cut off")
    texts = [body[start:stop] for start, stop in pairwise(offsets.tolist())]
    try:
        return [text.decode() for text in texts] if tensor.dtype == "utf8" else texts
    except UnicodeDecodeError as error:
        raise WireError(f"{tensor.name} holds bytes that are no UTF-8") from error


def round_up(nbytes: int) -> int:
    """Round up to a multiple of 64."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
