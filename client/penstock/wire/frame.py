"""Frames: batches as they come out of a body, each checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgpack
import numpy.typing as npt

from penstock.errors import VersionMismatch, WireError
from penstock.wire.digests import digest
from penstock.wire.head import BIN32, HEADER_DIGEST, VERSION, Address, Header, Heads
from penstock.wire.layout import MISFIT, TEXTS, Layout, layout_of, unpack_texts

_UNSEALED = {"header_digest", "pad"}
_LARGEST_HEADER = 1 << 20


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


def decode(body: bytes | bytearray | memoryview, steps: Iterable[int] = ()) -> Iterator[Frame]:
    """The frames of a body, in order; their tensors share the body's memory. If they are of these `steps`, it takes less time.

    Raises WireError: the bytes are not frames, a frame is cut short, or a digest does not match.
    Raises VersionMismatch: the frames are of another version.
    """
    view = memoryview(body).cast("B")
    likely = iter(steps)
    heads: Heads | None = None
    layout: Layout | None = None
    start = 0
    while start < len(view):
        step = next(likely, None)
        known = heads.recognise(view, start, step) if heads and step is not None else None
        header, at = known or _read_header(view, start)
        if not known:
            # Where layouts change, to expect one more of the last would only take time.
            heads = Heads(header.address, header.layout) if header.layout == layout and step is not None else None
        layout = header.layout
        start = at + layout.nbytes
        yield _frame(header, view[at:start])


def _frame(header: Header, payload: memoryview) -> Frame:
    address, expected, layout, substituted = header
    if len(payload) < layout.nbytes:
        raise WireError(f"the body ends inside the batch of step {address.step}: {len(payload)} of {layout.nbytes} bytes came")
    actual = digest(payload)
    if actual != expected:
        raise WireError(f"the batch of step {address.step} was damaged on the way: digest {actual}, not {expected}")
    views = layout.views(payload)
    texts = {t.name: unpack_texts(t, views.pop(t.name)) for t in layout.tensors if t.dtype in TEXTS}
    return Frame(address, actual, layout.nbytes, views, texts, substituted)


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
    return digest(msgpack.Packer().pack_map_header(num_fields) + header[1 : header.rfind(HEADER_DIGEST)])
