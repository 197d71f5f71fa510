"""Frames: batches as they come out of a body, each checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from penstock.errors import VersionMismatch, WireError
from penstock.wire.digests import digest
from penstock.wire.head import BIN32, HEADER_DIGEST, VERSION, Address, Header, Heads
from penstock.wire.layout import MISFIT, TEXTS, Layout, layout_of, unpack_texts

Array = npt.NDArray[Any]

_UNSEALED = {"header_digest", "pad"}
_LARGEST_HEADER = 1 << 20


class Arrays(dict[str, Array]):
    """Each tensor in frames of one layout, shape [num_frames, *shape]; views of the received bytes."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        super().__init__(arrays)
        self._totals: dict[str, list[int]] = {}

    def totals(self, name: str) -> list[int]:
        """The sum of a tensor's numbers in each frame; of all of them at once, when the first is asked for."""
        if name not in self._totals:
            self._totals[name] = self[name].reshape(len(self[name]), -1).sum(axis=1, dtype=np.int64).tolist()
        return self._totals[name]


class Frame(NamedTuple):
    """One batch as it came over the wire.

    nbytes       bytes of its payload
    texts        what columns of text hold
    substituted  how many sequences stand in for rows that cannot be used
    alike        the tensors of this and of other frames
    number       which of those frames it is
    """

    address: Address
    digest: str
    nbytes: int
    texts: dict[str, list[str] | list[bytes]]
    substituted: int
    alike: Arrays
    number: int

    @property
    def tensors(self) -> dict[str, Array]:
        """Its tensors, views of the received bytes."""
        number = self.number
        return {name: array[number] for name, array in self.alike.items()}

    def total(self, name: str) -> int:
        """The sum of a tensor's numbers."""
        return self.alike.totals(name)[self.number]


def decode(body: bytes | bytearray | memoryview, steps: Iterable[int] = ()) -> Iterator[Frame]:
    """The frames of a body, in order; their tensors share the body's memory. If they are of these `steps`, it takes less time.

    Raises WireError: the bytes are not frames, a frame is cut short, or a digest does not match.
    Raises VersionMismatch: the frames are of another version.
    """
    view = memoryview(body).cast("B")
    likely = iter(steps)
    alike: _Alike | None = None
    start = 0
    while start < len(view):
        step = next(likely, None)
        frame = alike.frame_of(step, start) if alike and step is not None else None
        if alike is None or frame is None:
            header, at = _read_header(view, start)
            # Where layouts change, to expect one more of the last would only take time.
            is_one = step is None or alike is None or header.layout != alike.layout
            alike = _Alike(view, start, at, header, is_one=is_one)
            frame = alike.frame(header.address, header.digest, header.substituted, start)
        yield frame
        start += alike.frame_nbytes


class _Alike:
    """Frames of one layout that stand one behind the other in a body, from the byte `start` on, if they are as is expected.

    The first of them has this header, and its payload begins at byte `at`. `is_one`: no other is expected.
    """

    def __init__(self, view: memoryview, start: int, at: int, header: Header, *, is_one: bool) -> None:
        self.layout = header.layout
        self.frame_nbytes = at - start + header.layout.nbytes
        self._view, self._start, self._head_nbytes = view, start, at - start
        num_frames = (len(view) - start) // self.frame_nbytes
        if not num_frames:
            raise _cut(header.address, len(view) - at, header.layout)
        self._address = header.address
        self._heads = None if is_one else Heads(header.address, header.layout)
        self._arrays = Arrays(header.layout.arrays(view, at, self.frame_nbytes, 1 if is_one else num_frames))
        self._texts = [(t, self._arrays.pop(t.name)) for t in header.layout.tensors if t.dtype in TEXTS]

    def frame_of(self, step: int, start: int) -> Frame | None:
        """The frame at `start`, if it is one of these and of this step. Raises WireError: see `frame`."""
        if self._heads is None:
            return None
        expected = self._heads.recognise(bytes(self._view[start : start + self._head_nbytes]), step)
        if expected is None:
            return None
        dataset, snapshot, epoch, rank, _ = self._address
        return self.frame(Address(dataset, snapshot, epoch, rank, step), expected, 0, start)

    def frame(self, address: Address, expected: str, substituted: int, start: int) -> Frame:
        """The frame at `start`. Raises WireError: its payload is cut short, or its digest is not what was expected."""
        payload = self._view[start + self._head_nbytes : start + self.frame_nbytes]
        nbytes = self.layout.nbytes
        if len(payload) < nbytes:
            raise _cut(address, len(payload), self.layout)
        actual = digest(payload)
        if actual != expected:
            raise WireError(f"the batch of step {address.step} was damaged on the way: digest {actual}, not {expected}")
        number = (start - self._start) // self.frame_nbytes
        texts = {tensor.name: unpack_texts(tensor, array[number]) for tensor, array in self._texts} if self._texts else {}
        return Frame(address, actual, nbytes, texts, substituted, self._arrays, number)


def _cut(address: Address, nbytes: int, layout: Layout) -> WireError:
    return WireError(f"the body ends inside the batch of step {address.step}: {nbytes} of {layout.nbytes} bytes came")


def _read_header(view: memoryview, start: int) -> tuple[Header, int]:
    """The header at `start`, and where its payload begins."""
    header, at = _decode_header(view, start)
    if len(view) - at < BIN32.size:
        raise WireError(f"the body ends inside a frame, {len(view) - start} bytes after the frame's start")
    mark, nbytes = BIN32.unpack_from(view, at)
    try:
        address = Address(
            dataset=header["dataset"],
            snapshot=header["snapshot"],
            epoch=header["epoch"],
            rank=header["rank"],
            step=header["step"],
        )
        expected = header["digest"]
        layout = layout_of(header["tensors"], nbytes)
        fits = mark == 0xC6 and nbytes == header["nbytes"]
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"the header of a frame lacks or garbles a field: {error!r}") from error
    if not fits:
        raise WireError(MISFIT)
    return Header(address, expected, layout, header.get("substituted", 0)), at + BIN32.size


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
    return digest(_map_of(num_fields) + header[1 : header.rfind(HEADER_DIGEST)])


@lru_cache(maxsize=8)
def _map_of(num_fields: int) -> bytes:
    packed: bytes = msgpack.Packer().pack_map_header(num_fields)
    return packed
