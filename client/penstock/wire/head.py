"""Heads of frames: the header, a msgpack map, and the length of the payload."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from penstock.wire.digests import digest
from penstock.wire.layout import ALIGNMENT, MAX_SAMPLES, Layout, round_up

VERSION = 3
BIN32 = struct.Struct(">BI")  # msgpack's bin 32: 0xc6, then the length
HEADER_DIGEST: bytes = msgpack.packb("header_digest")
_DIGEST_BYTES = 16
_NO_DIGEST = "0" * _DIGEST_BYTES
_STR_OF_16 = b"\xb0"  # msgpack's mark of a text of that length
_SEALED_MAP: bytes = msgpack.Packer().pack_map_header(11)  # the fields before the header's digest
_MAP: bytes = msgpack.Packer().pack_map_header(13)
_STEP: bytes = msgpack.packb("step")
_REPLACED: bytes = msgpack.packb("replaced")
_DIGEST: bytes = msgpack.packb("digest") + _STR_OF_16
_SEAL: bytes = HEADER_DIGEST + _STR_OF_16
_FILLER: bytes = msgpack.packb("filler")
_ZERO: bytes = msgpack.packb(0)
_BIN8_BYTES = len(msgpack.packb(b""))
_FILLERS: list[bytes] = [msgpack.packb(bytes(count)) for count in range(ALIGNMENT + 8)]
_MAX_BYTES = len(msgpack.packb(MAX_SAMPLES))


class Address(NamedTuple):
    """Which batch a frame holds. `spec_digest`: see Spec.digest."""

    dataset: str
    snapshot: str
    spec_digest: str
    epoch: int
    rank: int
    step: int


class Header(NamedTuple):
    """What the header of a frame tells."""

    address: Address
    digest: str
    layout: Layout
    replaced: int


class Heads:
    """The heads of the frames of one epoch of a rank that have one layout: all of them but their payloads' bytes.

    `head` puts each frame's step into the address; the step that the address comes with does not matter.
    """

    def __init__(self, address: Address, layout: Layout) -> None:
        fields = address._asdict()
        del fields["step"]
        own = _packed(v=VERSION, **fields) + _STEP
        self._before, self._sealed_before = _MAP + own, _SEALED_MAP + own
        tensors = [[t.name, t.dtype, t.shape, t.offset] for t in layout.tensors]
        self._behind = _packed(nbytes=layout.nbytes, tensors=tensors) + _REPLACED
        self._none_replaced = self._behind + _ZERO + _SEAL
        self._mark = BIN32.pack(0xC6, layout.nbytes)
        self._behind_step = dict[tuple[int, int], tuple[bytes, bytes]]()  # see `_after`

    def head(self, step: int, payload_digest: str = _NO_DIGEST, replaced: int = 0) -> bytes:
        """A header and the payload's length; as long, whatever the digest, of 16 hex digits, and whatever is replaced."""
        spelled: bytes = msgpack.packb(step)
        behind, end = self._after(len(spelled), replaced)
        fields = b"".join((spelled, _DIGEST, payload_digest.encode(), behind))
        # Without it a flipped bit in a shape would turn one batch into another, unnoticed.
        seal = digest(self._sealed_before + fields).encode()
        return b"".join((self._before, fields, _SEAL, seal, end))

    def _after(self, step_nbytes: int, replaced: int) -> tuple[bytes, bytes]:
        """What stands between the digests of the payload and of the header, and behind both: much the same in a whole run."""
        found = self._behind_step.get((step_nbytes, replaced))
        if found is None:
            number: bytes = msgpack.packb(replaced)
            digests = len(_DIGEST) + len(_SEAL) + 2 * _DIGEST_BYTES
            sealed = len(self._before) + step_nbytes + digests + len(self._behind) + len(number) + len(_FILLER)
            bare = sealed + _BIN8_BYTES + BIN32.size
            longest = bare - len(number) + _MAX_BYTES
            found = self._behind + number, b"".join((_FILLER, _FILLERS[round_up(longest) - bare], self._mark))
            self._behind_step[step_nbytes, replaced] = found
        return found

    def recognise(self, heads: npt.NDArray[np.uint8], steps: Sequence[int]) -> list[str]:
        """Return the payload digests in `heads`, shape [len(steps), nbytes], before the first unexpected head.

        A head is expected if it has its step and no replaced rows. This compares each field except the head's digest and the
        filler with its expected value, so it need not compute the head's digest.
        """
        found: list[str] = []
        most = 1  # heads compared at once, growing: if the first is unexpected, the others need no comparison
        while some := steps[len(found) : len(found) + most]:
            _, alike = next(groupby(map(msgpack.packb, some), len))
            spelled = list(alike)
            lines = heads[len(found) : len(found) + len(spelled)]
            own = self._digests(lines, np.frombuffer(b"".join(spelled), np.uint8).reshape(len(lines), -1))
            found += own
            most *= 8
            if len(own) < len(lines):
                break
        return found

    def _digests(self, heads: npt.NDArray[np.uint8], steps: npt.NDArray[np.uint8]) -> list[str]:
        """As `recognise`, of steps that are spelled with as many bytes each, shape [num_heads, width]."""
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
    return packed[1:]  # without the mark of a map, which is a byte for so few fields
