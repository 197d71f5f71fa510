"""Files of token ids, as pretraining writes them: documents end to end, told apart by an index beside the file or by an id.

corpus.bin, corpus.idx   Megatron-LM and NeMo: the index has the type, and where documents lie
shard_000.bin            llm.c and modded-nanogpt: a header has the type and the number of ids
shard_000.npy            an array of numpy's, of one dimension
train.bin                nanoGPT, OLMo: ids alone, of a type that somebody must know
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock_server.geometry.arrays import IntArray, starts_of
from penstock_server.importing.columnar import portions, refusing, survey_typed
from penstock_server.importing.source import Advance, Survey

COLUMN = "tokens"

_INDEX_MAGIC, _INDEX_HEADER_BYTES = b"MMIDIDX\0\0", 34
_INDEX_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are no whole numbers
_HEADERS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # by the first numbers of llm.c's header, a format and its version
_FORMATS = {20240520, 20240522, 20240801}  # the second is of questions for an evaluation
_HEADER_BYTES = 1024
_NUMPY_MAGIC = b"\x93NUMPY"
_STEP = 1 << 20  # ids that are looked at at a time
_MOST_DOCUMENTS = 1 << 16  # likewise
_LONGEST = 1 << 26  # ids of a document; with more between two of them, the id that is looked for is another

_NAME = "Name the id that ends a document, or begins one, and the type that ids have"
_ADVICE = "Mend the file, or what is said of it"

_Ids = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """What files without an index do not tell: the type of ids, where no header has it, and the id at each document's border.

    That id belongs to the document that it begins, `start`, or ends, `end`.
    """

    type: str | None = None
    start: int | None = None
    end: int | None = None


class TokenFile:
    """A file of token ids, mapped into memory: a document is a row, and those without an id are left out."""

    def __init__(self, path: Path, columns: Sequence[str] | None, documents: Documents) -> None:
        self.path = path
        self._columns, self._documents = columns, documents

    def survey(self, advance: Advance) -> Survey:
        """Lists of ids. Raises ImportRefused: the file is not what its header or its index says, or documents have no end."""
        with refusing(self.path, _ADVICE):
            schema = _table(np.zeros(0, self._ids().dtype), np.zeros(0, np.int64)).schema
        return survey_typed(self.path, schema, self._columns, lambda _: self._tables(advance))

    def tables(self, survey: Survey, advance: Advance) -> Iterator[pa.Table]:
        """The documents in the file's order. Raises ImportRefused: as `survey`."""
        return self._tables(advance) if len(survey.schema) else iter(())

    def _tables(self, advance: Advance) -> Iterator[pa.Table]:
        with refusing(self.path, _ADVICE):
            ids = self._ids()
            done = 0
            for lengths in self._lengths(ids):
                stop = done + int(lengths.sum())
                for batch in _table(ids[done:stop], lengths[lengths > 0]).to_batches():
                    yield from portions(batch)
                done = stop
                advance(done * ids.itemsize)

    def _lengths(self, ids: _Ids) -> Iterator[IntArray]:
        """How many ids each document has, some thousand documents at a time."""
        return _indexed(index, ids) if (index := self._index) else _separated(ids, self._documents)

    @property
    def _index(self) -> Path | None:
        endings = {".bin": ".idx", ".BIN": ".IDX"}
        index = self.path.with_suffix(endings.get(self.path.suffix, ".idx"))
        return index if self.path.suffix in endings and os.path.lexists(index) else None

    def _ids(self) -> _Ids:
        """All ids of the file. Raises ValueError: it is not what it says, or nothing says of what type they are."""
        if index := self._index:
            return _mapped(self.path, _type_in(index))
        with self.path.open("rb") as file:
            begin = file.read(12)
        if begin.startswith(_NUMPY_MAGIC):
            array = _loaded(self.path)
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise ValueError(f"it is an array of {array.dtype} of shape {array.shape}, not of whole numbers in a row")
            return array
        magic, version, count = np.frombuffer(begin.ljust(12, b"\0"), "<i4").tolist()
        if magic in _FORMATS:
            if (magic, version) not in _HEADERS:
                raise ValueError(f"its header is llm.c's, but of format {magic}, version {version}, which is not read")
            ids = _mapped(self.path, _HEADERS[magic, version], _HEADER_BYTES)
            if len(ids) != count:
                raise ValueError(f"its header tells of {count:,} ids, but there are {len(ids):,}")
            return ids
        if self._documents.type is None:
            raise ValueError("nothing tells the type of its ids; name it, as in --ids uint16")
        return _mapped(self.path, np.dtype(self._documents.type).newbyteorder("<"))


def _mapped(path: Path, type_: npt.DTypeLike, offset: int = 0) -> _Ids:
    size, dtype = path.stat().st_size - offset, np.dtype(type_)
    if size < 0 or size % dtype.itemsize:
        raise ValueError(f"its {size:,} bytes of ids are no whole number of {dtype.name}")
    return np.memmap(path, dtype, "r", offset) if size else np.zeros(0, dtype)  # nothing cannot be mapped


def _loaded(path: Path) -> _Ids:
    try:
        array: _Ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OverflowError, TokenError) as error:  # what numpy makes of some damaged headers
        raise ValueError(f"its header is damaged: {error}") from error
    return array


def _table(ids: _Ids, lengths: IntArray) -> pa.Table:
    native = ids.astype(ids.dtype.newbyteorder("="), copy=False)
    lists = pa.LargeListArray.from_arrays(pa.array(starts_of(lengths)), pa.array(native))
    return pa.table({COLUMN: lists})


def _separated(ids: _Ids, documents: Documents) -> Iterator[IntArray]:
    if (documents.start is None) == (documents.end is None):
        raise ValueError("nothing tells where its documents end; name the id: --document-end 50256, or --document-start 50256")
    border, behind = (documents.start, 0) if documents.end is None else (documents.end, 1)
    first, is_there = 0, False  # the first id of the document that has not ended yet; whether the border is anywhere
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


def _indexed(path: Path, ids: _Ids) -> Iterator[IntArray]:
    """The documents of an index.

    Behind its header it has of each sequence its length and its first byte, and of each document its first sequence.
    """
    header = np.fromfile(path, "u1", _INDEX_HEADER_BYTES)
    num_sequences, num_borders = header[18:34].view("<u8").tolist()
    size, wanted = path.stat().st_size, _INDEX_HEADER_BYTES + 12 * num_sequences + 8 * num_borders
    if size not in (wanted, wanted + num_sequences):  # behind it may stand of which kind each sequence is
        raise ValueError(f"{path.name} has {size:,} bytes, not the {wanted:,} that its header tells of")
    if not (num_sequences and num_borders):
        if len(ids):
            raise ValueError(f"{path.name} tells of no document, but there are {len(ids):,} ids")
        return
    at = _INDEX_HEADER_BYTES
    lengths = np.memmap(path, "<i4", "r", at, (num_sequences,))
    begins = np.memmap(path, "<i8", "r", at + 4 * num_sequences, (num_sequences,))
    borders = np.memmap(path, "<i8", "r", at + 12 * num_sequences, (num_borders,))
    if borders[0] != 0 or borders[-1] != num_sequences:
        raise ValueError(f"{path.name} tells of documents that are not those of its {num_sequences:,} sequences")
    if (count := int(lengths.sum(dtype=np.int64))) != len(ids):
        raise ValueError(f"{path.name} tells of {count:,} ids, but there are {len(ids):,}")
    done = 0
    for first in range(0, num_borders - 1, _MOST_DOCUMENTS):
        own = np.array(borders[first : first + _MOST_DOCUMENTS + 1])
        sizes = lengths[own[0] : own[-1]].astype(np.int64)
        if (np.diff(own) < 0).any() or own[-1] > num_sequences or (sizes < 0).any():
            raise ValueError(f"{path.name} is damaged: it tells of lengths below 0, or of more sequences than it has")
        sequences = starts_of(sizes)
        if (begins[own[0] : own[-1]] != (done + sequences[:-1]) * ids.itemsize).any():
            raise ValueError(f"{path.name} tells of sequences that do not lie end to end")
        yield np.diff(sequences[own - own[0]])
        done += int(sequences[-1])
