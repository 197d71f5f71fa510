"""Headers: the msgpack map of a frame and the length of its payload; and checksums."""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import groupby
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import VersionMismatch, WireError
from penstock.wire.layout import ALIGNMENT, MAX_SAMPLES, Layout, layout_of, round_up

VERSION = 3
BIN32 = struct.Struct(">BI")  # msgpack's bin 32: 0xc6, then the length
_BIN32_MARK = 0xC6
_MAX_HEADER = 1 << 20
_MAX_ARRAY = 1 << 14  # msgpack may allocate the declared length of each nested array before its items arrive
_UNSEALED = {"header_digest", "filler"}
_HEADER_DIGEST: bytes = msgpack.packb("header_digest")
_DIGEST_BYTES = 16
_NO_DIGEST = "0" * _DIGEST_BYTES
_STR_OF_16 = b"\xb0"  # msgpack's mark of a text of that length
_SEALED_MAP: bytes = msgpack.Packer().pack_map_header(11)  # the fields before the header's digest
_MAP: bytes = msgpack.Packer().pack_map_header(13)
_STEP: bytes = msgpack.packb("step")
_REPLACED: bytes = msgpack.packb("replaced")
_DIGEST: bytes = msgpack.packb("digest") + _STR_OF_16
_SEAL: bytes = _HEADER_DIGEST + _STR_OF_16
_FILLER: bytes = msgpack.packb("filler")
_ZERO: bytes = msgpack.packb(0)
_BIN8_BYTES = len(msgpack.packb(b""))
_FILLERS: list[bytes] = [msgpack.packb(bytes(count)) for count in range(ALIGNMENT + 8)]
_MAX_BYTES = len(msgpack.packb(MAX_SAMPLES))


def digest(content: bytes | memoryview) -> str:
    """Return the xxh3-64, as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(content)


def content_digest(body: bytes | memoryview) -> str:
    """Return the Content-Digest header (RFC 9530) of a body that is not made of frames."""
    return f"sha-256=:{b64encode(sha256(body).digest()).decode()}:"


class Address(NamedTuple):
    """Address of a batch. `spec_digest`: see Spec.digest."""

    dataset: str
    snapshot: str
    spec_digest: str
    epoch: int
    rank: int
    step: int


class Header(NamedTuple):
    """Fields of a frame's header."""

    address: Address
    digest: str
    layout: Layout
    replaced: int


class Heads:
    """Heads of the frames of one rank and epoch that have one layout: everything but the bytes of their payloads.

    The step of `address` does not matter: `head` takes each frame's step.
    """

    def __init__(self, address: Address, layout: Layout) -> None:
        fields = address._asdict()
        del fields["step"]
        before = _packed(v=VERSION, **fields) + _STEP
        self._before, self._sealed_before = _MAP + before, _SEALED_MAP + before
        tensors = [[t.name, t.dtype, t.shape, t.offset] for t in layout.tensors]
        self._after = _packed(nbytes=layout.nbytes, tensors=tensors) + _REPLACED
        self._none_replaced = self._after + _ZERO + _SEAL
        self._mark = BIN32.pack(_BIN32_MARK, layout.nbytes)
        self._ends = dict[tuple[int, int], tuple[bytes, bytes]]()

    def head(self, step: int, payload_digest: str = _NO_DIGEST, replaced: int = 0) -> bytes:
        """Return a header and the payload's length. Its size does not depend on the digest or on `replaced`."""
        packed_step: bytes = msgpack.packb(step)
        after, end = self._end(len(packed_step), replaced)
        fields = b"".join((packed_step, _DIGEST, payload_digest.encode(), after))
        # Without it a flipped bit in a shape would turn one batch into another, unnoticed.
        seal = digest(self._sealed_before + fields).encode()
        return b"".join((self._before, fields, _SEAL, seal, end))

    def _end(self, step_nbytes: int, replaced: int) -> tuple[bytes, bytes]:
        """Return the bytes after the payload's digest and those after the header's, which most frames share."""
        if (step_nbytes, replaced) not in self._ends:
            number: bytes = msgpack.packb(replaced)
            digests = len(_DIGEST) + len(_SEAL) + 2 * _DIGEST_BYTES
            sealed = len(self._before) + step_nbytes + digests + len(self._after) + len(number) + len(_FILLER)
            bare = sealed + _BIN8_BYTES + BIN32.size
            longest = bare - len(number) + _MAX_BYTES
            end = b"".join((_FILLER, _FILLERS[round_up(longest) - bare], self._mark))
            self._ends[step_nbytes, replaced] = self._after + number, end
        return self._ends[step_nbytes, replaced]

    def recognise(self, heads: npt.NDArray[np.uint8], steps: Sequence[int]) -> list[str]:
        """Return the payload digests in `heads`, shape [len(steps), nbytes], before the first unexpected head.

        A head is expected if it has its step and no replaced rows. This compares each field except the head's digest and the
        filler with its expected value, so it need not compute the head's digest.
        """
        digests: list[str] = []
        most = 1  # heads compared at once, growing: if the first is unexpected, the others need no comparison
        while compared := steps[len(digests) : len(digests) + most]:
            _, of_one_width = next(groupby(map(msgpack.packb, compared), len))
            packed = list(of_one_width)
            rows = heads[len(digests) : len(digests) + len(packed)]
            recognised = self._digests(rows, np.frombuffer(b"".join(packed), np.uint8).reshape(len(rows), -1))
            digests += recognised
            most *= 8
            if len(recognised) < len(rows):
                break
        return digests

    def _digests(self, heads: npt.NDArray[np.uint8], steps: npt.NDArray[np.uint8]) -> list[str]:
        """Return the digests as `recognise` does, for packed steps of one width, shape [num_heads, width]."""
        begin = len(self._before)
        end = begin + steps.shape[1]
        digest_begin = end + len(_DIGEST)
        digest_end = digest_begin + _DIGEST_BYTES
        expected = b"".join((self._before, bytes(steps[0]), _DIGEST, _NO_DIGEST.encode(), self._none_replaced))
        if heads.shape[1] < len(expected) + len(self._mark):
            return []
        is_same = heads[:, : len(expected)] == np.frombuffer(expected, np.uint8)
        is_same[:, begin:end] = heads[:, begin:end] == steps
        is_same[:, digest_begin:digest_end] = True
        is_it = is_same.all(axis=1) & (heads[:, -len(self._mark) :] == np.frombuffer(self._mark, np.uint8)).all(axis=1)
        count = len(is_it) if is_it.all() else int(is_it.argmin())
        digests = str(heads[:count, digest_begin:digest_end].tobytes(), "latin-1")
        return [digests[at : at + _DIGEST_BYTES] for at in range(0, len(digests), _DIGEST_BYTES)]


def _packed(**fields: object) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return packed[1:]  # without the byte that marks a map


def read_header(view: memoryview, start: int) -> tuple[Header, int]:
    """Return the header at `start`, and where its payload begins. Raises WireError and VersionMismatch: see decode."""
    fields, at = _decode_header(view, start)
    if len(view) - at < BIN32.size:
        raise WireError(f"the body ends inside a frame, {len(view) - start} bytes after the frame's start")
    mark, nbytes = BIN32.unpack_from(view, at)
    if mark != _BIN32_MARK or nbytes != fields.get("nbytes"):
        raise WireError("the header of a frame does not fit its payload")
    try:
        address = Address(*(fields[name] for name in Address._fields))
        layout = layout_of(fields["tensors"], nbytes)
        return Header(address, str(fields["digest"]), layout, int(fields["replaced"])), at + BIN32.size
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"the header of a frame is not one of version {VERSION}: {error!r}") from error


def _decode_header(view: memoryview, start: int) -> tuple[dict[str, Any], int]:
    # The unpacker copies what it is fed: feed it the header, not the megabytes after it.
    unpacker = msgpack.Unpacker(max_buffer_size=_MAX_HEADER, max_array_len=_MAX_ARRAY, use_list=False)
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
    """Return the digest of the fields of a packed header before its own digest, packed as a map."""
    return digest(_map_of(num_fields) + header[1 : header.rfind(_HEADER_DIGEST)])


@lru_cache(maxsize=8)
def _map_of(num_fields: int) -> bytes:
    packed: bytes = msgpack.Packer().pack_map_header(num_fields)
    return packed
