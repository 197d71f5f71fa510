"""Frames: batches as they come out of a body, each checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from penstock.errors import VersionMismatch, WireError
from penstock.wire.digests import digest
from penstock.wire.head import BIN32, HEADER_DIGEST, VERSION, Address, Header, Heads
from penstock.wire.layout import MISFIT, TEXTS, layout_of, unpack_texts

Array = npt.NDArray[Any]

_UNSEALED = {"header_digest", "pad"}
_LARGEST_HEADER = 1 << 20


class Arrays(dict[str, Array]):
    """Each tensor in frames of one layout, shape [num_frames, *shape]; views of the received bytes. `names` are all of them."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        super().__init__(arrays)
        self.names = tuple(arrays)
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


def decode(body: bytes | bytearray | memoryview, steps: Sequence[int] = ()) -> Iterator[Frame]:
    """The frames of a body, in order; their tensors share the body's memory. If they are of these `steps`, it takes less time.

    Raises WireError: the bytes are not frames, a frame is cut short, or a digest does not match.
    Raises VersionMismatch: the frames are of another version.
    """
    view = memoryview(body).cast("B")
    start = number = 0
    while start < len(view):
        header, at = _read_header(view, start)
        alike = _Alike(view, start, at, header, steps, number)
        yield from alike.frames()
        start += len(alike.steps) * alike.frame_nbytes
        number += len(alike.steps)


class _Alike:
    """Frames that stand one after the other in a body, from the byte `start` on, of one layout and of the likely steps.

    The first of them has this header, and its payload begins at byte `at`. It is the frame of that `number` in the body, so
    that `likely[number + 1]` is probably the step of the next.
    """

    def __init__(self, view: memoryview, start: int, at: int, header: Header, likely: Sequence[int], number: int) -> None:
        self.frame_nbytes = at - start + header.layout.nbytes
        self._view, self._at, self._header = view, at, header
        most = (len(view) - start) // self.frame_nbytes
        if not most:
            step, came, nbytes = header.address.step, len(view) - at, header.layout.nbytes
            raise WireError(f"the body ends inside the batch of step {step}: {came} of {nbytes} bytes came")
        self.steps, self._digests = [header.address.step], [header.digest]
        # Where the next has another layout, to compare it would only take time: its payload mostly has another length, too.
        if most > 1 and view[at - BIN32.size : at] == view[at - BIN32.size + self.frame_nbytes : at + self.frame_nbytes]:
            following = likely[number + 1 : number + most]
            memory = np.frombuffer(view[start:], np.uint8, most * self.frame_nbytes).reshape(most, self.frame_nbytes)
            heads = memory[1 : 1 + len(following), : at - start]
            self._digests += Heads(header.address, header.layout).recognise(heads, following)
            self.steps += following[: len(self._digests) - 1]
        arrays = header.layout.arrays(view, at, self.frame_nbytes, len(self.steps))
        self._texts = [(t, arrays.pop(t.name)) for t in header.layout.tensors if t.dtype in TEXTS]
        self._arrays = Arrays(arrays)

    def frames(self) -> Iterator[Frame]:
        """Each of them. Raises WireError: its payload's digest is not what was expected."""
        (dataset, snapshot, spec, epoch, rank, _), layout = self._header.address, self._header.layout
        substituted = self._header.substituted  # only the first may have any
        start = self._at
        for number, (step, expected) in enumerate(zip(self.steps, self._digests, strict=True)):
            actual = digest(self._view[start : start + layout.nbytes])
            if actual != expected:
                raise WireError(f"the batch of step {step} was damaged on the way: digest {actual}, not {expected}")
            texts = {tensor.name: unpack_texts(tensor, array[number]) for tensor, array in self._texts} if self._texts else {}
            address = Address(dataset, snapshot, spec, epoch, rank, step)
            yield Frame(address, actual, layout.nbytes, texts, substituted, self._arrays, number)
            start, substituted = start + self.frame_nbytes, 0


def _read_header(view: memoryview, start: int) -> tuple[Header, int]:
    """The header at `start`, and where its payload begins."""
    header, at = _decode_header(view, start)
    if len(view) - at < BIN32.size:
        raise WireError(f"the body ends inside a frame, {len(view) - start} bytes after the frame's start")
    mark, nbytes = BIN32.unpack_from(view, at)
    try:
        address = Address(*(header[name] for name in Address._fields))
        expected = header["digest"]
        layout = layout_of(header["tensors"], nbytes)
        fits = mark == 0xC6 and nbytes == header["nbytes"]
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"the header of a frame lacks or garbles a field: {error!r}") from error
    if not fits:
        raise WireError(MISFIT)
    return Header(address, expected, layout, header.get("substituted", 0)), at + BIN32.size


def _decode_header(view: memoryview, start: int) -> tuple[dict[str, Any], int]:
    # The unpacker copies what it is fed: feed it the header, not the megabytes after it.
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
