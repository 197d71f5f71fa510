"""The wire format: a batch as two msgpack objects, a header map and one `bin` with the tensors' raw bytes.

    body    = frame frame frame ...
    frame   = header payload                 each frame a multiple of 64 bytes long
    header  = {v, dataset, snapshot, epoch, rank, step, digest, nbytes, tensors: [[name, dtype, shape, offset], ...],
               substituted, header_digest, pad}
    payload = bin                            starts on a 64-byte boundary of the body, as does each tensor in it

A tensor of dtype utf8 or binary holds texts or bytes, shape [count, nbytes]: count + 1 int64 offsets, then nbytes bytes; text i
is bytes [offsets[i], offsets[i + 1]). `substituted` sequences stand in for rows that cannot be used.

`digest` is the xxh3-64 of the payload, `header_digest` that of the header's fields before it, packed as a map; both as 16
hex digits. `pad` is filler that puts the payload on its boundary. All numbers in tensors are little-endian.
"""

from __future__ import annotations

import math
import struct
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import VersionMismatch, WireError

VERSION = 1
ALIGNMENT = 64
MEDIA_TYPE = "application/vnd.msgpack"

_BIN32 = struct.Struct(">BI")  # msgpack's bin 32: 0xc6, then the length
TEXTS = ("utf8", "binary")
_DIGEST_BYTES = 16
_NO_DIGEST = "0" * _DIGEST_BYTES
_STR_OF_16 = b"\xb0"  # msgpack's mark of a text of that length
_MOST_SEQUENCES = 1 << 17  # more than a batch has, and more bytes in a header than any fewer
_MOST_DIMENSIONS = 32
_MAP_OF_TEN: bytes = msgpack.Packer().pack_map_header(10)
_MAP_OF_TWELVE: bytes = msgpack.Packer().pack_map_header(12)
_STEP: bytes = msgpack.packb("step")
_SUBSTITUTED: bytes = msgpack.packb("substituted")
_DIGEST: bytes = msgpack.packb("digest") + _STR_OF_16
_HEADER_DIGEST: bytes = msgpack.packb("header_digest")
_PAD: bytes = msgpack.packb("pad")
_ZERO: bytes = msgpack.packb(0)
_BIN8_BYTES = len(msgpack.packb(b""))
_FILLERS: list[bytes] = [msgpack.packb(bytes(count)) for count in range(ALIGNMENT + 8)]
_MOST_BYTES = len(msgpack.packb(_MOST_SEQUENCES))
_UNSEALED = {"header_digest", "pad"}
_DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64")
}
_LARGEST_HEADER = 1 << 20
_MISFIT = "the header of a frame does not fit its payload"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """Where one tensor lies in a payload: `offset` bytes from its start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself, without the filler behind it."""
        if self.dtype in TEXTS:
            count, nbytes = self.shape
            return 8 * (count + 1) + nbytes
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a payload and its length in bytes, a multiple of 64."""

    tensors: tuple[TensorLayout, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> Layout:
        """Lays (name, dtype, shape) out one behind the other, each on a 64-byte boundary."""
        placed: list[TensorLayout] = []
        end = 0
        for name, dtype, shape in tensors:
            tensor = TensorLayout(name=name, dtype=dtype, shape=shape, offset=end)
            placed.append(tensor)
            end += _round_up(tensor.nbytes)
        return cls(tuple(placed), end)

    def views(self, payload: memoryview) -> dict[str, npt.NDArray[Any]]:
        """The tensors as arrays that share the payload's memory; texts as they lie there, bytes of shape [nbytes]."""
        return {t.name: _view(t, payload) for t in self.tensors}


def _view(tensor: TensorLayout, payload: memoryview) -> npt.NDArray[Any]:
    # Not np.ndarray, though it is faster: it keeps no hold on the buffer, which would then be used again while it is read.
    if tensor.dtype in TEXTS:
        return np.frombuffer(payload, np.uint8, tensor.nbytes, tensor.offset)
    return np.frombuffer(payload, _DTYPES[tensor.dtype], math.prod(tensor.shape), tensor.offset).reshape(tensor.shape)


def strided(tensor: TensorLayout, body: bytearray, begin: int, stride: int, count: int) -> npt.NDArray[Any]:
    """A tensor of `count` frames, shape [count, *shape], that begins at byte `begin` of a body and each time `stride` later."""
    shape, dtype = tensor.shape, _DTYPES.get(tensor.dtype)
    if dtype is None:  # texts lie there as bytes
        shape, dtype = (tensor.nbytes,), np.dtype(np.uint8)
    inner = [math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))]
    return np.ndarray((count, *shape), dtype, body, begin, (stride, *inner))


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


class Address(NamedTuple):
    """Which batch a frame holds."""

    dataset: str
    snapshot: str
    epoch: int
    rank: int
    step: int


class Frame(NamedTuple):
    """One batch as it came over the wire; `tensors` are views of the received bytes, `texts` what columns of text hold.

    `substituted` sequences stand in for rows that cannot be used.
    """

    address: Address
    digest: str
    nbytes: int
    tensors: dict[str, npt.NDArray[Any]]
    texts: dict[str, list[str] | list[bytes]]
    substituted: int


def digest(content: bytes | memoryview) -> str:
    """xxh3-64, as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(content)


def content_digest(body: bytes | memoryview) -> str:
    """The field Content-Digest (RFC 9530) of a body that is no frame and carries no digest of its own."""
    return f"sha-256=:{b64encode(sha256(body).digest()).decode()}:"


def encode_head(address: Address, layout: Layout, payload_digest: str = _NO_DIGEST, substituted: int = 0) -> bytes:
    """The head of a frame; see Heads."""
    return Heads(address, layout).head(address.step, payload_digest, substituted)


class Heads:
    """The heads of the frames of one epoch of a rank that have one layout: all of them but their payloads' bytes."""

    def __init__(self, address: Address, layout: Layout) -> None:
        self._address, self._layout = address, layout
        dataset, snapshot, epoch, rank, _ = address
        self._before = _packed(v=VERSION, dataset=dataset, snapshot=snapshot, epoch=epoch, rank=rank) + _STEP
        tensors = [[t.name, t.dtype, t.shape, t.offset] for t in layout.tensors]
        self._behind = _packed(nbytes=layout.nbytes, tensors=tensors) + _SUBSTITUTED
        self._mark = _BIN32.pack(0xC6, layout.nbytes)

    def head(self, step: int, payload_digest: str = _NO_DIGEST, substituted: int = 0) -> bytes:
        """A header and the payload's length. What is in digest or `substituted` makes it no longer or shorter."""
        return self._head(msgpack.packb(step), payload_digest.encode(), msgpack.packb(substituted))

    def _head(self, step: bytes, payload_digest: bytes, number: bytes) -> bytes:
        fields = b"".join((self._before, step, _DIGEST, payload_digest, self._behind, number))
        # Without it a flipped bit in a shape would turn one batch into another, unnoticed.
        sealed = b"".join((fields, _HEADER_DIGEST, _STR_OF_16, digest(_MAP_OF_TEN + fields).encode(), _PAD))
        bare = len(_MAP_OF_TWELVE) + len(sealed) + _BIN8_BYTES + _BIN32.size
        longest = bare - len(number) + _MOST_BYTES
        return b"".join((_MAP_OF_TWELVE, sealed, _FILLERS[_round_up(longest) - bare], self._mark))

    def recognise(self, view: memoryview, start: int, step: int) -> tuple[_Header, int] | None:
        """The header at `start` and where its payload begins, if it is that of this step, and nothing stands in for bad rows.

        To write what it must be and compare takes a third of the time of reading it.
        """
        packed: bytes = msgpack.packb(step)
        at = start + len(_MAP_OF_TWELVE) + len(self._before) + len(packed) + len(_DIGEST)
        payload_digest = bytes(view[at : at + _DIGEST_BYTES])
        head = self._head(packed, payload_digest, _ZERO)
        if bytes(view[start : start + len(head)]) != head:
            return None
        dataset, snapshot, epoch, rank, _ = self._address
        address = Address(dataset, snapshot, epoch, rank, step)
        return _Header(address, str(payload_digest, "latin-1"), self._layout, 0), start + len(head)


class _Header(NamedTuple):
    """What the header of a frame tells."""

    address: Address
    digest: str
    layout: Layout
    substituted: int


def _packed(**fields: object) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return packed[len(_MAP_OF_TEN) :]


def decode(body: bytes | bytearray | memoryview, steps: Iterable[int] = ()) -> Iterator[Frame]:
    """The frames of a body, in order; their tensors share the body's memory. If they are of these `steps`, it takes less time.

    Raises WireError: the bytes are not frames, a frame is cut short, or a digest does not match.
    Raises VersionMismatch: the frames are of another version.
    """
    view = memoryview(body).cast("B")
    likely = iter(steps)
    heads: Heads | None = None
    start = 0
    while start < len(view):
        step = next(likely, None)
        known = heads.recognise(view, start, step) if heads and step is not None else None
        header, at = known or _read_header(view, start)
        if not known and step is not None:
            heads = Heads(header.address, header.layout)
        start = at + header.layout.nbytes
        yield _frame(header, view[at:start])


def _frame(header: _Header, payload: memoryview) -> Frame:
    address, expected, layout, substituted = header
    if len(payload) < layout.nbytes:
        raise WireError(f"the body ends inside the batch of step {address.step}: {len(payload)} of {layout.nbytes} bytes came")
    actual = digest(payload)
    if actual != expected:
        raise WireError(f"the batch of step {address.step} was damaged on the way: digest {actual}, not {expected}")
    views = layout.views(payload)
    texts = {t.name: unpack_texts(t, views.pop(t.name)) for t in layout.tensors if t.dtype in TEXTS}
    return Frame(address, actual, layout.nbytes, views, texts, substituted)


def _read_header(view: memoryview, start: int) -> tuple[_Header, int]:
    """The header at `start`, and where its payload begins."""
    header, at = _decode_header(view, start)
    if len(view) - at < _BIN32.size:
        raise WireError(f"the body ends inside a frame, {len(view) - start} bytes after the frame's start")
    mark, nbytes = _BIN32.unpack_from(view, at)
    try:
        address = Address(
            dataset=header["dataset"],
            snapshot=header["snapshot"],
            epoch=header["epoch"],
            rank=header["rank"],
            step=header["step"],
        )
        expected = header["digest"]
        layout = _layout_of(header["tensors"], nbytes)
        fits = mark == 0xC6 and nbytes == header["nbytes"]
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"the header of a frame lacks or garbles a field: {error!r}") from error
    if not fits:
        raise WireError(_MISFIT)
    return _Header(address, expected, layout, header.get("substituted", 0)), at + _BIN32.size


@lru_cache(maxsize=256)  # the frames of a run mostly have one
def _layout_of(tensors: tuple[tuple[str, str, tuple[int, ...], int], ...], nbytes: int) -> Layout:
    """The layout that a header tells of. Raises WireError: it does not fit; and what things raise that are no such tuples."""
    layout = Layout(tuple(TensorLayout(name=n, dtype=d, shape=tuple(s), offset=o) for n, d, s, o in tensors), nbytes)
    if not all(_fits(tensor, nbytes) for tensor in layout.tensors):
        raise WireError(_MISFIT)
    if len({tensor.name for tensor in layout.tensors}) < len(layout.tensors):
        raise WireError(_MISFIT)
    return layout


def _fits(tensor: TensorLayout, nbytes: int) -> bool:
    """Whether a tensor of a header can lie in a payload of so many bytes. Raises what numbers raise that are none."""
    sizes = (tensor.offset, *tensor.shape)
    if not isinstance(tensor.name, str) or any(type(size) is not int or not 0 <= size < 1 << 32 for size in sizes):
        return False
    if tensor.dtype in TEXTS and (len(tensor.shape) != 2 or tensor.shape[0] > _MOST_SEQUENCES):
        return False
    # Numpy refuses some shapes even where another size is 0.
    makes_sense = len(sizes) <= _MOST_DIMENSIONS and math.prod(max(size, 1) for size in tensor.shape) < 1 << 56
    return makes_sense and tensor.offset + tensor.nbytes <= nbytes


def _decode_header(view: memoryview, start: int) -> tuple[dict[str, Any], int]:
    # The unpacker copies what it is fed: feed it the header, not the megabytes behind it.
    unpacker = msgpack.Unpacker(max_buffer_size=_LARGEST_HEADER, use_list=False)
    fed = start
    while fed < len(view) and fed - start < _LARGEST_HEADER:
        unpacker.feed(view[fed : fed + 1024])
        fed += 1024
        try:
            header = unpacker.unpack()
        except msgpack.OutOfData:
            continue
        except (ValueError, msgpack.UnpackException) as error:
            raise WireError(f"this is not a batch: {error}") from error
        if not isinstance(header, dict) or "v" not in header:
            raise WireError("this is not a batch: it does not begin with a frame's header")
        nbytes = unpacker.tell()
        if header.get("header_digest") != _seal(bytes(view[start : start + nbytes]), len(header.keys() - _UNSEALED)):
            raise WireError("the header of a frame was damaged on the way")
        if header["v"] != VERSION:
            raise VersionMismatch(
                f"the server speaks wire version {header['v']}, this client {VERSION}: install the same penstock on both"
            )
        return header, start + nbytes
    raise WireError("the body ends inside a frame's header")


def _seal(header: bytes, num_fields: int) -> str:
    """The digest of the fields of a packed header that come before its own digest, packed as a map."""
    return digest(msgpack.Packer().pack_map_header(num_fields) + header[1 : header.rfind(_HEADER_DIGEST)])


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
