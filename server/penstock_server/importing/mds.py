"""Folders of MosaicML Streaming: shards in the format MDS.

Sources: https://docs.mosaicml.com/projects/streaming/en/stable/preparing_datasets/dataset_format.html, and encodings.py,
writer.py and compression.py of mosaicml-streaming 0.13.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
from pydantic import BaseModel, Field, model_validator

from penstock.text import listed
from penstock_server.importing.inputs import Input, open_file
from penstock_server.importing.row_files import (
    INDEX_NAME,
    Column,
    Decode,
    OpenColumns,
    UInt32,
    checked,
    columns_of,
    decode_arrays,
    decode_bytes,
    decode_numbers,
    decode_text,
    path_in,
    read_rows,
    unread,
)
from penstock_server.importing.tables import Columns

_NUMBERS = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 18: "<f2", 32: "<u4", 33: "<i4", 34: "<f4", 64: "<u8", 65: "<i8", 66: "<f8"}
_NUMBERS_BY_NAME = {"int": "<i8", **{np.dtype(type_).name: type_ for type_ in _NUMBERS.values()}}
_HASHES = {*hashlib.algorithms_guaranteed, *xxhash.algorithms_available} - {"shake_128", "shake_256"}
_CODECS = {"br": "brotli", "bz2": "bz2", "gz": "gzip", "snappy": "snappy", "zstd": "zstd"}


class _File(BaseModel):
    basename: str
    bytes: UInt32
    hashes: dict[str, str]


class _Shard(BaseModel):
    version: Literal[2]
    format: Literal["mds"]
    samples: UInt32
    column_names: list[str] = Field(min_length=1)
    column_encodings: list[str]
    column_sizes: list[UInt32 | None]
    raw_data: _File
    zip_data: _File | None
    compression: str | None

    @model_validator(mode="after")
    def _check(self) -> _Shard:
        if not len(self.column_names) == len(self.column_encodings) == len(self.column_sizes):
            raise ValueError("there must be as many encodings and sizes as columns")
        return self


class _Index(BaseModel):
    version: Literal[2]
    shards: list[_Shard] = Field(min_length=1)


def mds_shards(
    folder: Input, index: dict[str, Any], columns: Sequence[str] | None, text: Sequence[str], ids: str | None
) -> Sequence[tuple[Input, OpenColumns]]:
    """Return the shards of a folder by its index.json. Raises ValueError: it has another form, or a column cannot be read.

    Columns in `text` stay text if they are JSON, or numbers written as text. Bytes are token ids of type `ids`, if given.
    """
    shards = list[tuple[Input, OpenColumns]]()
    for shard in checked(index, _Index).shards:
        described = zip(shard.column_names, shard.column_encodings, shard.column_sizes, strict=True)
        read = [
            Column(name, encoding, size, _decoder(name, encoding, text, ids) if columns is None or name in columns else None)
            for name, encoding, size in described
        ]
        raw = path_in(folder, shard.raw_data.basename)
        if shard.zip_data is None or raw.exists():  # in a cache, a shard may be decompressed
            shards.append((raw, partial(_open_shard, raw, shard.raw_data, None, shard, read)))
        else:
            packed = path_in(folder, shard.zip_data.basename)
            shards.append((packed, partial(_open_shard, packed, shard.zip_data, shard.compression, shard, read)))
    return shards


@contextmanager
def _open_shard(
    path: Input, file: _File, compression: str | None, shard: _Shard, columns: Sequence[Column]
) -> Iterator[Columns]:
    with open_file(path) as opened:
        rows = opened if compression is None else _decompressed(opened, compression, shard.raw_data.bytes)
        read = columns_of(read_rows(rows, shard.samples), columns)

        def batches(names: Sequence[str]) -> Iterator[pa.RecordBatch]:
            _check(path, file.hashes)
            yield from read.batches(names)

        yield Columns(read.schema, batches)


def _decompressed(file: pa.NativeFile, compression: str, num_bytes: int) -> pa.NativeFile:
    codec = _CODECS.get(compression.partition(":")[0])  # after the colon comes the level
    if codec is None:
        raise ValueError(f"the compression {compression!r} is not known; {listed([*_CODECS])} are")
    if codec == "snappy":  # Arrow cannot stream it
        return pa.BufferReader(pa.decompress(file.read_buffer(), num_bytes, codec))
    return pa.CompressedInputStream(file, codec)


def _check(path: Input, hashes: Mapping[str, str]) -> None:
    """Raise ValueError if a file has another hash. Algorithms that are unknown here are left out."""
    for name, stated in hashes.items():
        if name in _HASHES:
            with open_file(path) as file:
                digest = hashlib.file_digest(file, getattr(xxhash, name, name))
            if digest.hexdigest() != stated:
                raise ValueError(f"its {name} is {digest.hexdigest()}, but {INDEX_NAME} states {stated}. Copy the file again")


def _decoder(name: str, encoding: str, text: Sequence[str], ids: str | None) -> Decode:
    kind, _, settings = encoding.partition(":")
    if kind in _NUMBERS_BY_NAME:
        return partial(decode_numbers, type_=_NUMBERS_BY_NAME[kind])
    type_, _, shape = settings.partition(":")
    if kind == "ndarray" and type_ in ("", *_NUMBERS_BY_NAME):
        sides = tuple(map(int, shape.split(","))) if shape else None
        parse = partial(_array, _NUMBERS_BY_NAME.get(type_), sides)
        return partial(decode_arrays, parse=parse, has_one_type=bool(type_))
    if kind == "bytes" and ids:
        return partial(decode_arrays, parse=partial(np.frombuffer, dtype=np.dtype(ids).newbyteorder("<")), has_one_type=True)
    if kind in ("bytes", "jpeg", "png"):
        return decode_bytes
    if kind in ("str", "str_decimal") or (kind in ("str_int", "str_float", "json") and name in text):
        return decode_text
    if kind == "json":
        return _json
    if kind in ("str_int", "str_float"):
        return partial(_parsed, parse=int if kind == "str_int" else float)
    raise unread(name, encoding)


def _parsed(values: Sequence[bytes], parse: type[int] | type[float]) -> pa.Array:
    return pa.array([parse(value) for value in values], pa.int64() if parse is int else pa.float64())


def _json(values: Sequence[bytes]) -> pa.Array:
    for value in values:
        json.loads(value)  # raises ValueError
    return pa.ExtensionArray.from_storage(pa.json_(), decode_text(values))


def _array(type_: str | None, sides: Sequence[int] | None, value: bytes) -> npt.NDArray[Any]:
    """Parse [type: 1] [dimensions << 2 | log2 of the bytes of a side: 1] [sides] numbers, without what is given already."""
    at = 0
    if type_ is None:
        type_, at = _NUMBERS[value[0]], 1
    if sides is None:
        num_axes, width = value[at] >> 2, 1 << (value[at] & 3)
        sides = np.frombuffer(value, f"<u{width}", num_axes, at + 1).tolist()
        at += 1 + num_axes * width
    return np.frombuffer(value, type_, offset=at).reshape(sides)
