"""Formats of files of token ids: documents end to end, separated by an index beside the file or by an id.

corpus.bin, corpus.idx   Megatron-LM and NeMo: the index has the type, and the place of each document
web.ds, web.ds.index     datatrove and nanotron: the index has the end of each document; web.ds.loss, if present, the loss mask
shard_000.bin            llm.c and modded-nanogpt: a header has the type and the number of ids
shard_000.npy            an array of numpy's, of one dimension
train.bin                nanoGPT, OLMo: ids alone; the user gives their type
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock_server.order.arrays import IntArray, starts_of

_INDEX_MAGIC, _INDEX_HEADER_BYTES = b"MMIDIDX\0\0", 34
_INDEX_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating point
_HEADERS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # by the first two numbers of llm.c's header, format and version
_FORMATS = {20240520, 20240522, 20240801}  # the second holds evaluation questions
_HEADER_BYTES = 1024
_NUMPY_MAGIC = b"\x93NUMPY"
_STEP = 1 << 20  # ids scanned at a time
_MAX_DOCUMENTS = 1 << 16  # likewise
_LONGEST = 1 << 26  # ids of a document; a longer one means that the border id is wrong

STREAM_ROW_IDS = 1 << 16  # ids of a row, without document borders

_NAME = (
    "Name the id that ends a document, or begins one, and the type that ids have; without an id the file is imported as one "
    "stream"
)

Array = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Facts missing in files without an index: the type of ids, unless a header has it, and the id at document borders.

    That id belongs to the document that it begins, `start`, or ends, `end`. Without both, a file is one stream of ids.
    """

    type: str | None = None
    start: int | None = None
    end: int | None = None


class Found(NamedTuple):
    """Ids of a file, the lengths of its documents, some thousand at a time, and the loss mask, if it has one.

    If `is_stream`, there are no document borders, and lengths are those of equal rows. Iterating over the lengths raises
    ValueError for wrong ones.
    """

    ids: Array
    lengths: Iterator[IntArray]
    in_loss: Array | None = None
    is_stream: bool = False


def find_documents(path: Path, documents: Documents) -> Found:
    """Find a file's documents by its ending, the files beside it, and its first bytes.

    Raises ValueError: the file contradicts its header or index, or the type of its ids is unknown. Raises OSError.
    """
    endings = {".bin": ".idx", ".BIN": ".IDX"}
    if path.suffix in endings and os.path.lexists(index := path.with_suffix(endings[path.suffix])):
        ids = _mapped(path, _type_in(index))
        return Found(ids, _indexed(index, ids))
    if path.suffix == ".ds" and os.path.lexists(index := path.with_name(f"{path.name}.index")):
        return _of_datatrove(path, index)
    ids = _ids(path, documents.type)
    if documents.start is None and documents.end is None:
        return Found(ids, _equal_rows(len(ids)), is_stream=len(ids) > 0)
    return Found(ids, _separated(ids, documents))


def _ids(path: Path, type_: str | None) -> Array:
    with path.open("rb") as file:
        begin = file.read(12)
    if begin.startswith(_NUMPY_MAGIC):
        array = _loaded(path)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"it is an array of {array.dtype} of shape {array.shape}, not of whole numbers in a row")
        return array
    magic, version, count = np.frombuffer(begin.ljust(12, b"\0"), "<i4").tolist()
    if magic in _FORMATS:
        if (magic, version) not in _HEADERS:
            raise ValueError(f"its header is llm.c's, but of format {magic}, version {version}, which is not read")
        ids = _mapped(path, _HEADERS[magic, version], _HEADER_BYTES)
        if len(ids) != count:
            raise ValueError(f"its header tells of {count:,} ids, but there are {len(ids):,}")
        return ids
    if type_ is None:
        index = {".bin": f"{path.stem}.idx", ".ds": f"{path.name}.index"}.get(path.suffix.lower())
        beside = f": it has no header, and no {index} is beside it" if index else ""
        raise ValueError(f"nothing tells the type of its ids{beside}. Name it, as in --ids uint16")
    return _mapped(path, np.dtype(type_).newbyteorder("<"))


def _mapped(path: Path, type_: npt.DTypeLike, offset: int = 0) -> Array:
    size, dtype = path.stat().st_size - offset, np.dtype(type_)
    if size < 0 or size % dtype.itemsize:
        raise ValueError(f"its {size:,} bytes of ids are no whole number of {dtype.name}")
    return np.memmap(path, dtype, "r", offset) if size else np.zeros(0, dtype)  # an empty file cannot be mapped


def _loaded(path: Path) -> Array:
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OverflowError, TokenError) as error:  # numpy raises these for some damaged headers
        raise ValueError(f"its header is damaged: {error}") from error
    return array


def _equal_rows(num_ids: int) -> Iterator[IntArray]:
    """Yield row lengths of STREAM_ROW_IDS, the last one shorter: one row for the whole file may not fit into memory."""
    for begin in range(0, num_ids, STREAM_ROW_IDS):
        yield np.array([min(STREAM_ROW_IDS, num_ids - begin)])


def _separated(ids: Array, documents: Documents) -> Iterator[IntArray]:
    border, behind = (documents.start, 0) if documents.end is None else (documents.end, 1)
    first, is_there = 0, False  # start of the current document; whether the border id was seen
    for begin in range(0, len(ids), _STEP):
        stops = begin + behind + np.flatnonzero(ids[begin : begin + _STEP] == border)
        is_there |= len(stops) > 0
        lengths = np.diff(stops[stops > first], prepend=first)
        yield lengths
        first += int(lengths.sum())
        if begin - first > _LONGEST:
            told = f"of {begin - first:,} ids from number {first:,} on none is {border}: no document is that long"
            raise ValueError(f"{told}. {_NAME}")
    if len(ids) and not is_there:
        raise ValueError(f"of its {len(ids):,} ids none is {border}. {_NAME}")
    yield np.array([len(ids) - first])


def _type_in(index: Path) -> str:
    try:
        with index.open("rb") as file:
            header = file.read(_INDEX_HEADER_BYTES)
    except OSError as error:
        raise ValueError(f"{index.name} beside it cannot be read: {error.strerror}") from error
    if not header.startswith(_INDEX_MAGIC) or len(header) < _INDEX_HEADER_BYTES:
        raise ValueError(
            f"{index.name} beside it is no index of Megatron's. Without it, name the type of ids and what ends documents"
        )
    version, code = int.from_bytes(header[9:17], "little"), header[17]
    if version != 1 or code not in _INDEX_TYPES:
        raise ValueError(f"{index.name} is of version {version}, with ids of type {code}; version 1 with whole numbers is read")
    return _INDEX_TYPES[code]


def _indexed(path: Path, ids: Array) -> Iterator[IntArray]:
    """Yield the lengths of the documents of an index.

    After its header come the length and the first byte of each sample, and the first sample of each document.
    """
    header = np.fromfile(path, "u1", _INDEX_HEADER_BYTES)
    num_samples, num_borders = header[18:34].view("<u8").tolist()
    size, wanted = path.stat().st_size, _INDEX_HEADER_BYTES + 12 * num_samples + 8 * num_borders
    if size not in (wanted, wanted + num_samples):  # the mode of each sample may follow
        raise ValueError(f"{path.name} has {size:,} bytes, not the {wanted:,} that its header tells of")
    if not (num_samples and num_borders):
        if len(ids):
            raise ValueError(f"{path.name} tells of no document, but there are {len(ids):,} ids")
        return
    at = _INDEX_HEADER_BYTES
    lengths = np.memmap(path, "<i4", "r", at, (num_samples,))
    begins = np.memmap(path, "<i8", "r", at + 4 * num_samples, (num_samples,))
    borders = np.memmap(path, "<i8", "r", at + 12 * num_samples, (num_borders,))
    if borders[0] != 0 or borders[-1] != num_samples:
        raise ValueError(f"{path.name} tells of documents that are not those of its {num_samples:,} samples")
    if (count := int(lengths.sum(dtype=np.int64))) != len(ids):
        raise ValueError(f"{path.name} tells of {count:,} ids, but there are {len(ids):,}")
    done = 0
    for first in range(0, num_borders - 1, _MAX_DOCUMENTS):
        own = np.array(borders[first : first + _MAX_DOCUMENTS + 1])
        sizes = lengths[own[0] : own[-1]].astype(np.int64)
        if (np.diff(own) < 0).any() or own[-1] > num_samples or (sizes < 0).any():
            raise ValueError(f"{path.name} is damaged: it tells of lengths below 0, or of more samples than it has")
        samples = starts_of(sizes)
        if (begins[own[0] : own[-1]] != (done + samples[:-1]) * ids.itemsize).any():
            raise ValueError(f"{path.name} tells of samples that do not lie end to end")
        yield np.diff(samples[own - own[0]])
        done += int(samples[-1])


def _of_datatrove(path: Path, index: Path) -> Found:
    """Find documents in datatrove's format: the index has each document's end, in ids; ids have two or four bytes."""
    ends = _beside(index, "<u8")
    size, count = path.stat().st_size, int(ends[-1]) if len(ends) else 0
    types = [type_ for type_ in ("<u2", "<u4") if np.dtype(type_).itemsize * count == size]
    if not types:
        raise ValueError(f"{index.name} tells of {count:,} ids, and {size:,} bytes are no such ids of two bytes or of four")
    loss = path.with_name(f"{path.name}.loss")
    in_loss = _beside(loss, "u1") if os.path.lexists(loss) else None
    if in_loss is not None and len(in_loss) != count:
        raise ValueError(f"{loss.name} tells of {len(in_loss):,} ids, but there are {count:,}")
    return Found(_mapped(path, types[0]), _ended(index.name, ends), in_loss)


def _ended(name: str, ends: Array) -> Iterator[IntArray]:
    done = 0
    for first in range(0, len(ends), _MAX_DOCUMENTS):
        some = ends[first : first + _MAX_DOCUMENTS].astype(np.int64)
        lengths: IntArray = some - np.concatenate([[done], some[:-1]])
        if (lengths < 0).any():
            raise ValueError(f"{name} is damaged: a document ends before it begins")
        yield lengths
        done += int(lengths.sum())


def _beside(path: Path, type_: str) -> Array:
    """Map all numbers of a file beside the file of ids."""
    try:
        return _mapped(path, type_)
    except OSError as error:
        raise ValueError(f"{path.name} beside it cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error
