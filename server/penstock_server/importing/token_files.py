"""Files of token ids: documents end to end, separated by an index beside the file or by an id. A document becomes a row.

corpus.bin, corpus.idx   Megatron-LM and NeMo: the index has the type, and the place of each document
web.ds, web.ds.index     datatrove and nanotron: the index has the end of each document; web.ds.loss, if present, the loss mask
shard_000.bin            llm.c and modded-nanogpt: a header has the type and the number of ids
shard_000.npy            NumPy: an array of one dimension
train.bin                nanoGPT, OLMo: ids alone; the user gives their type
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock_server.importing.tables import Columns
from penstock_server.order.arrays import IntArray, starts_of

STREAM_ROW_IDS = 1 << 16  # ids of a row, without document borders

_INDEX_MAGIC, _INDEX_HEADER_BYTES = b"MMIDIDX\0\0", 34
_INDEX_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating point
_HEADERS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # by format and version, the first two numbers of llm.c's header
_MAGICS = (20240520, 20240522, 20240801)
_HEADER_BYTES = 1024
_NUMPY_MAGIC = b"\x93NUMPY"
_STEP = 1 << 20  # ids scanned at a time
_MAX_DOCUMENTS = 1 << 16  # documents at a time
_LONGEST = 1 << 26  # ids of a document; a longer one means that the border id is wrong
_REMEDY = "Name the id that ends or begins a document, and the type of the ids; without an id the file is one stream"

Array = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """What files without an index do not state: the type of ids, and the id at document borders.

    That id belongs to the document that it begins, `start`, or ends, `end`. Without both, a file is one stream of ids.
    """

    type: str | None = None
    start: int | None = None
    end: int | None = None


class _Tokens(NamedTuple):
    """Columns of numbers of a file, and the lengths of its documents in portions.

    If `is_stream`, lengths are those of equal rows. Iterating over the lengths raises ValueError for wrong ones.
    """

    columns: Mapping[str, Array]
    lengths: Iterator[IntArray]
    is_stream: bool = False


@contextmanager
def open_tokens(path: Path, documents: Documents) -> Iterator[Columns]:
    """Open a file of token ids, memory-mapped: `tokens`, and `loss_mask` if the file has one. Empty documents are left out."""
    columns, portions, _ = _open(path, documents)

    def batch(start: int, stop: int, lengths: IntArray) -> pa.RecordBatch:
        offsets = pa.array(starts_of(lengths))
        native = {name: all_[start:stop].astype(all_.dtype.newbyteorder("="), copy=False) for name, all_ in columns.items()}
        lists = [pa.LargeListArray.from_arrays(offsets, pa.array(values)) for values in native.values()]
        return pa.record_batch(lists, [*native])

    def batches(_: Sequence[str]) -> Iterator[pa.RecordBatch]:
        stop = 0
        for lengths in portions:
            start, stop = stop, stop + int(lengths.sum())
            yield batch(start, stop, lengths[lengths > 0])

    yield Columns(batch(0, 0, np.zeros(0, np.int64)).schema, batches)


def is_stream(path: Path, documents: Documents) -> bool:
    """Return whether nothing marks documents in a file."""
    return _open(path, documents).is_stream


def _open(path: Path, documents: Documents) -> _Tokens:
    """Open a file by its ending, the files beside it, and its first bytes.

    Raises ValueError: the file contradicts its header or index, or the type of its ids is unknown. Raises OSError.
    """
    if path.suffix == ".bin" and (index := path.with_suffix(".idx")).exists():
        ids = _mapped(path, _index_type(index))
        return _Tokens({"tokens": ids}, _indexed(index, ids))
    if path.suffix == ".ds" and (index := path.with_name(f"{path.name}.index")).exists():
        return _open_datatrove(path, index)
    ids = _ids(path, documents.type)
    if documents.start is None and documents.end is None:
        return _Tokens({"tokens": ids}, _equal_rows(len(ids)), is_stream=len(ids) > 0)
    return _Tokens({"tokens": ids}, _separated(ids, documents))


def _ids(path: Path, type_: str | None) -> Array:
    with path.open("rb") as file:
        begin = file.read(12)
    if begin.startswith(_NUMPY_MAGIC):
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"it is an array of {array.dtype} of shape {array.shape}, not a row of integers")
        return array
    magic, version, count = np.frombuffer(begin.ljust(12, b"\0"), "<i4").tolist()
    if magic in _MAGICS:
        if (magic, version) not in _HEADERS:
            raise ValueError(f"format {magic}, version {version} of llm.c is not supported")
        ids = _mapped(path, _HEADERS[magic, version], _HEADER_BYTES)
        if len(ids) != count:
            raise ValueError(f"its header states {count:,} ids, but there are {len(ids):,}")
        return ids
    if type_ is None:
        raise ValueError("it has no header and no index beside it. Name the type of its ids, as in --ids uint16")
    return _mapped(path, np.dtype(type_).newbyteorder("<"))


def _mapped(path: Path, type_: npt.DTypeLike, offset: int = 0) -> Array:
    size, dtype = path.stat().st_size - offset, np.dtype(type_)
    if size < 0 or size % dtype.itemsize:
        raise ValueError(f"{path.name} has {size:,} bytes of ids, not a multiple of the {dtype.itemsize} bytes of {dtype.name}")
    return np.memmap(path, dtype, "r", offset) if size else np.zeros(0, dtype)  # an empty file cannot be mapped


def _equal_rows(num_ids: int) -> Iterator[IntArray]:
    """Yield row lengths of STREAM_ROW_IDS, the last one shorter: one row for the whole file may not fit into memory."""
    for begin in range(0, num_ids, STREAM_ROW_IDS):
        yield np.array([min(STREAM_ROW_IDS, num_ids - begin)])


def _separated(ids: Array, documents: Documents) -> Iterator[IntArray]:
    border, after = (documents.start, 0) if documents.end is None else (documents.end, 1)
    first, has_border = 0, False  # `first` begins the current document
    for begin in range(0, len(ids), _STEP):
        stops = begin + after + np.flatnonzero(ids[begin : begin + _STEP] == border)
        has_border |= len(stops) > 0
        lengths = np.diff(stops[stops > first], prepend=first)
        yield lengths
        first += int(lengths.sum())
        if begin - first > _LONGEST:
            raise ValueError(f"{begin - first:,} ids from number {first:,} on do not contain {border}. {_REMEDY}")
    if len(ids) and not has_border:
        raise ValueError(f"its {len(ids):,} ids do not contain {border}. {_REMEDY}")
    yield np.array([len(ids) - first])


def _index_type(index: Path) -> str:
    with index.open("rb") as file:
        header = file.read(_INDEX_HEADER_BYTES)
    if not header.startswith(_INDEX_MAGIC) or len(header) < _INDEX_HEADER_BYTES:
        raise ValueError(f"{index.name} beside it is not an index of Megatron-LM. {_REMEDY}")
    version, code = int.from_bytes(header[9:17], "little"), header[17]
    if version != 1 or code not in _INDEX_TYPES:
        raise ValueError(f"{index.name} has version {version} and type {code}; version 1 with integers is supported")
    return _INDEX_TYPES[code]


def _indexed(path: Path, ids: Array) -> Iterator[IntArray]:
    """Yield the lengths of the documents of an index.

    After its header come the length and the first byte of each sample, and the first sample of each document.
    """
    num_samples, num_borders = np.fromfile(path, "<u8", 2, offset=18).tolist()
    if not num_samples:
        return
    at = _INDEX_HEADER_BYTES
    lengths = np.memmap(path, "<i4", "r", at, (num_samples,))
    borders = np.memmap(path, "<i8", "r", at + 12 * num_samples, (num_borders,))
    count = int(lengths.sum(dtype=np.int64))
    if count != len(ids) or borders[-1] != num_samples:
        raise ValueError(
            f"{path.name} states {count:,} ids in {num_samples:,} samples, but there are {len(ids):,} ids, and its documents "
            f"end at sample {borders[-1]:,}"
        )
    for first in range(0, num_borders - 1, _MAX_DOCUMENTS):
        portion = np.array(borders[first : first + _MAX_DOCUMENTS + 1])
        samples = starts_of(lengths[portion[0] : portion[-1]].astype(np.int64))
        yield np.diff(samples[portion - portion[0]])


def _open_datatrove(path: Path, index: Path) -> _Tokens:
    """Open a file of datatrove: the index has each document's end, in ids; ids have two or four bytes."""
    ends = _mapped(index, "<u8")
    size, count = path.stat().st_size, int(ends[-1]) if len(ends) else 0
    types = [type_ for type_ in ("<u2", "<u4") if np.dtype(type_).itemsize * count == size]
    if not types:
        raise ValueError(f"{index.name} states {count:,} ids, but the {size:,} bytes are not ids of two or four bytes each")
    columns, loss = {"tokens": _mapped(path, types[0])}, path.with_name(f"{path.name}.loss")
    if loss.exists():
        columns["loss_mask"] = _mapped(loss, "u1")
        if len(columns["loss_mask"]) != count:
            raise ValueError(f"{loss.name} states {len(columns['loss_mask']):,} ids, but there are {count:,}")
    return _Tokens(columns, _ended(ends))


def _ended(ends: Array) -> Iterator[IntArray]:
    done = 0
    for first in range(0, len(ends), _MAX_DOCUMENTS):
        portion = ends[first : first + _MAX_DOCUMENTS].astype(np.int64)
        yield np.diff(portion, prepend=done)
        done = int(portion[-1])
