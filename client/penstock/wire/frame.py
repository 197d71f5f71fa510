"""Frames: batches as they come out of a body, each checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from penstock.errors import VersionMismatch, WireError
from penstock.wire.digests import digest
from penstock.wire.head import BIN32, HEADER_DIGEST, VERSION, Address, Header, Heads
from penstock.wire.layout import MISFIT, TEXTS, TensorLayout, layout_of, unpack_texts

Array = npt.NDArray[Any]
Texts = list[str] | list[bytes]

_UNSEALED = {"header_digest", "filler"}
_MAX_HEADER = 1 << 20


class FrameGroup:
    """Consecutive frames of a body with one layout and addresses that differ only in the step.

    address      address of the first frame
    steps        step of each frame; `digests` are those of their payloads
    nbytes       bytes of a payload
    replaced     samples of the first frame that replace bad rows; the other frames have no such samples
    arrays       each tensor of all frames, shape [num_frames, *shape]; views of the received bytes. `names` are their names
    texts        values of text columns in each frame; [] without such columns
    num_tokens   tokens of each frame, without padding; None until counted
    """

    def __init__(
        self,
        address: Address,
        steps: list[int],
        digests: list[str],
        nbytes: int,
        arrays: Mapping[str, Array],
        replaced: int = 0,
    ) -> None:
        self.address, self.steps, self.digests = address, steps, digests
        self.nbytes, self.replaced = nbytes, replaced
        self.arrays, self.texts = arrays, list[dict[str, Texts]]()
        self.names = tuple(arrays)
        self.num_tokens: list[int] | None = None
        self._totals: dict[str, list[int]] = {}

    def totals(self, name: str) -> list[int]:
        """The sum of a tensor's numbers in each frame; of all of them at once, when the first is asked for."""
        if name not in self._totals:
            array = self.arrays[name]
            self._totals[name] = array.reshape(len(array), -1).sum(axis=1, dtype=np.int64).tolist()
        return self._totals[name]


class Frame(NamedTuple):
    """One batch as it came over the wire: which of several that are alike it is."""

    alike: FrameGroup
    number: int

    @property
    def address(self) -> Address:
        """Which batch it is."""
        return self.alike.address._replace(step=self.step)

    @property
    def step(self) -> int:
        """That of its address."""
        return self.alike.steps[self.number]

    @property
    def digest(self) -> str:
        """The digest of its payload, which was checked."""
        return self.alike.digests[self.number]

    @property
    def nbytes(self) -> int:
        """Bytes of its payload."""
        return self.alike.nbytes

    @property
    def tensors(self) -> dict[str, Array]:
        """Its tensors, views of the received bytes."""
        number = self.number
        return {name: array[number] for name, array in self.alike.arrays.items()}

    @property
    def texts(self) -> dict[str, Texts]:
        """What its columns of text hold."""
        return self.alike.texts[self.number] if self.alike.texts else {}

    @property
    def replaced(self) -> int:
        """How many samples stand in for rows that cannot be used."""
        return 0 if self.number else self.alike.replaced

    def total(self, name: str) -> int:
        """The sum of a tensor's numbers."""
        return self.alike.totals(name)[self.number]


def decode(body: bytes | bytearray | memoryview, steps: Sequence[int] = ()) -> Iterator[Frame]:
    """The frames of a body, in order; their tensors share the body's memory. If they are of these `steps`, it takes less time.

    Raises WireError: the bytes are not frames, a frame is cut short, or a digest does not match.
    Raises VersionMismatch: the frames are of another version, or have a tensor of a type that is unknown here.
    """
    return chain.from_iterable(decode_alike(body, steps))


def decode_alike(body: bytes | bytearray | memoryview, steps: Sequence[int] = ()) -> Iterator[list[Frame]]:
    """The frames of a body as `decode` gives them, those that are alike as one list; before it raises, those that are sound.

    Where the first of a list is of the step that it should be, so are the others.
    """
    view = memoryview(body).cast("B")
    start = number = 0
    while start < len(view):
        header, at = read_header(view, start)
        nbytes, stride = header.layout.nbytes, at - start + header.layout.nbytes
        alike, columns = _alike(view, start, at, header, steps[number:])
        start += len(alike.steps) * stride
        number += len(alike.steps)
        frames: list[Frame] = []
        try:
            for own, expected in enumerate(alike.digests):
                begin = at + own * stride
                actual = digest(view[begin : begin + nbytes])
                if actual != expected:
                    step = alike.steps[own]
                    raise WireError(f"the batch of step {step} was damaged on the way: digest {actual}, not {expected}")
                if columns:
                    alike.texts.append({t.name: unpack_texts(t, array[own]) for t, array in columns})
                frames.append(Frame(alike, own))
        except WireError:
            if frames:
                yield frames
            raise
        yield frames


def _alike(
    view: memoryview, start: int, at: int, header: Header, likely: Sequence[int]
) -> tuple[FrameGroup, list[tuple[TensorLayout, Array]]]:
    """The frames from the byte `start` on that are alike, and their columns of text, which are not yet read.

    The first of them has this header, and its payload begins at byte `at`. `likely` are the steps of that one and of those
    behind it, perhaps of more than there are.
    """
    layout, stride = header.layout, at - start + header.layout.nbytes
    most = (len(view) - start) // stride
    if not most:
        step, came = header.address.step, len(view) - at
        raise WireError(f"the body ends inside the batch of step {step}: {came} of {layout.nbytes} bytes came")
    steps, digests = [header.address.step], [header.digest]
    # Where the next has another layout, to compare it would only take time: its payload mostly has another length, too.
    if most > 1 and view[at - BIN32.size : at] == view[at - BIN32.size + stride : at + stride]:
        following = likely[1:most]
        memory = np.frombuffer(view[start:], np.uint8, most * stride).reshape(most, stride)
        heads = memory[1 : 1 + len(following), : at - start]
        digests += Heads(header.address, layout).recognise(heads, following)
        steps += following[: len(digests) - 1]
    arrays = layout.arrays(view, at, stride, len(steps))
    columns = [(tensor, arrays.pop(tensor.name)) for tensor in layout.tensors if tensor.dtype in TEXTS]
    return FrameGroup(header.address, steps, digests, layout.nbytes, arrays, header.replaced), columns


def read_header(view: memoryview, start: int) -> tuple[Header, int]:
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
    return Header(address, expected, layout, header.get("replaced", 0)), at + BIN32.size


def _decode_header(view: memoryview, start: int) -> tuple[dict[str, Any], int]:
    # The unpacker copies what it is fed: feed it the header, not the megabytes after it.
    unpacker = msgpack.Unpacker(max_buffer_size=_MAX_HEADER, use_list=False)
    fed = start
    while fed < len(view) and fed - start < _MAX_HEADER:
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
