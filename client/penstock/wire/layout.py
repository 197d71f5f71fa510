"""Layouts: where the tensors of a batch lie in its payload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import VersionMismatch, WireError
from penstock.text import cut

ALIGNMENT = 64
TEXTS = ("utf8", "binary")
MAX_SAMPLES = 1 << 17  # more than a batch has, and more bytes in a header than any fewer
MISFIT = "the header of a frame does not fit its payload"
_MAX_DIMENSIONS = 32
DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64")
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """Where one tensor lies in a payload: `offset` bytes from its start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself, without the filler after it."""
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
        """Lays (name, dtype, shape) out one after the other, each on a 64-byte boundary."""
        placed: list[TensorLayout] = []
        end = 0
        for name, dtype, shape in tensors:
            tensor = TensorLayout(name=name, dtype=dtype, shape=shape, offset=end)
            placed.append(tensor)
            end += round_up(tensor.nbytes)
        return cls(tuple(placed), end)

    def arrays(self, body: memoryview, begin: int, stride: int, count: int) -> dict[str, npt.NDArray[Any]]:
        """The tensors of `count` payloads in a body, whose memory they share and hold: see `strided`."""
        # Np.ndarray keeps no hold on memory that is no array: it would be used again while it is read.
        memory = np.frombuffer(body, np.uint8)
        return {t.name: strided(t, memory, begin + t.offset, stride, count) for t in self.tensors}


def strided(
    tensor: TensorLayout, body: memoryview | npt.NDArray[np.uint8], begin: int, stride: int, count: int
) -> npt.NDArray[Any]:
    """A tensor of `count` frames, shape [count, *shape], that begins at byte `begin` of a body and each time `stride` later.

    Texts are bytes as they lie there, shape [count, nbytes]. It has no hold on memory that is no array.
    """
    shape, dtype = tensor.shape, DTYPES.get(tensor.dtype)
    if dtype is None:  # texts lie there as bytes
        shape, dtype = (tensor.nbytes,), np.dtype(np.uint8)
    if count == 1:
        return np.ndarray((1, *shape), dtype, body, begin)
    strides = [dtype.itemsize]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return np.ndarray((count, *shape), dtype, body, begin, (stride, *strides[: len(shape)]))


def pack_texts(texts: Sequence[bytes], out: npt.NDArray[np.uint8]) -> None:
    """Writes texts as a tensor of dtype utf8 or binary holds them."""
    head = 8 * (len(texts) + 1)
    out[:head].view("<i8")[:] = np.cumsum([0, *map(len, texts)])
    out[head:] = np.frombuffer(b"".join(texts), np.uint8)


def unpack_texts(tensor: TensorLayout, content: npt.NDArray[np.uint8]) -> list[str] | list[bytes]:
    """The texts, or the bytes, that such a tensor holds. Raises WireError: its offsets or its text are none."""
    head = 8 * (tensor.shape[0] + 1)
    borders, body = content[:head].view("<i8"), content[head:].tobytes()
    if borders[0] != 0 or borders[-1] != len(body) or (borders[1:] < borders[:-1]).any():
        raise WireError(f"the offsets of the texts in {tensor.name} are none")
    found = [body[start:stop] for start, stop in pairwise(borders.tolist())]
    try:
        return [text.decode() for text in found] if tensor.dtype == "utf8" else found
    except UnicodeDecodeError as error:
        raise WireError(f"{tensor.name} holds bytes that are no UTF-8") from error


@lru_cache(maxsize=256)  # the frames of a run mostly have one
def layout_of(tensors: tuple[tuple[str, str, tuple[int, ...], int], ...], nbytes: int) -> Layout:
    """The layout that a header tells of, which was not damaged on the way.

    Raises WireError: it does not fit. Raises VersionMismatch: a tensor is of a type that is unknown here. Raises what things
    raise that are no such tuples.
    """
    for name, dtype, *_ in tensors:
        if isinstance(dtype, str) and dtype not in {*DTYPES, *TEXTS}:
            told = cut(f"{name} is {dtype}")
            raise VersionMismatch(
                f"the server sends what this client does not know ({told}): install the same penstock on both"
            )
    layout = Layout(tuple(TensorLayout(name=n, dtype=d, shape=tuple(s), offset=o) for n, d, s, o in tensors), nbytes)
    if not all(_fits(tensor, nbytes) for tensor in layout.tensors):
        raise WireError(MISFIT)
    if len({tensor.name for tensor in layout.tensors}) < len(layout.tensors):
        raise WireError(MISFIT)
    return layout


def _fits(tensor: TensorLayout, nbytes: int) -> bool:
    """Whether a tensor of a header can lie in a payload of so many bytes. Raises what numbers raise that are none."""
    sizes = (tensor.offset, *tensor.shape)
    if not isinstance(tensor.name, str) or any(type(size) is not int or not 0 <= size < 1 << 32 for size in sizes):
        return False
    if tensor.dtype in TEXTS:  # a count and a number of bytes
        makes_sense = len(tensor.shape) == 2 and tensor.shape[0] <= MAX_SAMPLES
    else:  # numpy refuses some shapes even where another size is 0
        makes_sense = len(sizes) <= _MAX_DIMENSIONS and math.prod(max(size, 1) for size in tensor.shape) < 1 << 32
    return makes_sense and tensor.offset + tensor.nbytes <= nbytes


def round_up(nbytes: int) -> int:
    """The next multiple of 64."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
