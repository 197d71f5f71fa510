"""Folders of MosaicML Streaming and LitData, written as their formats say, without these libraries.

MDS: https://docs.mosaicml.com/projects/streaming/en/stable/preparing_datasets/dataset_format.html
LitData: https://github.com/Lightning-AI/litData, src/litdata/streaming/{writer,serializers,framed_zstd}.py
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from support.corpora import Rows

COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "br": lambda raw: bytes(pa.compress(raw, "brotli", asbytes=True)),
    "bz2": bz2.compress,
    "gz": gzip.compress,
    "snappy": lambda raw: bytes(pa.compress(raw, "snappy", asbytes=True)),
    "zstd": lambda raw: bytes(pa.compress(raw, "zstd", asbytes=True)),
}
_ARRAY_CODES = {
    "uint8": 8,
    "int8": 9,
    "uint16": 16,
    "int16": 17,
    "float16": 18,
    "uint32": 32,
    "int32": 33,
    "float32": 34,
    "uint64": 64,
    "int64": 65,
    "float64": 66,
}


def rows_as_file(rows: Sequence[bytes], filler: bytes = b"") -> bytes:
    """Number of rows, offsets, filler, rows."""
    begin = 4 * (len(rows) + 2) + len(filler)
    offsets = begin + np.cumsum([0, *map(len, rows)])
    return np.array([len(rows), *offsets], "<u4").tobytes() + filler + b"".join(rows)


# MosaicML Streaming ------------------------------------------------------------------------------------------------------


def write_mds(
    folder: Path,
    columns: Mapping[str, str],
    rows: Rows,
    *,
    shard_rows: int = 4,
    compression: str | None = None,
    hashes: Sequence[str] = (),
) -> Path:
    """Rows of these columns, by their encodings."""
    names, shards = sorted(columns), list[dict[str, Any]]()
    config = {
        "version": 2,
        "format": "mds",
        "compression": compression,
        "hashes": [*hashes],
        "size_limit": None,
        "column_names": names,
        "column_encodings": [columns[name] for name in names],
        "column_sizes": [_mds_size(columns[name]) for name in names],
    }
    folder.mkdir(parents=True)
    for start in range(0, len(rows), shard_rows):
        encoded = [_mds_row(columns, row) for row in rows[start : start + shard_rows]]
        raw, name = rows_as_file(encoded, json.dumps(config).encode()), f"shard.{len(shards):05}.mds"
        shard = config | {"samples": len(encoded), "raw_data": _described(name, raw, hashes), "zip_data": None}
        if compression:
            name += f".{compression.partition(':')[0]}"
            raw = COMPRESSIONS[compression.partition(":")[0]](raw)
            shard["zip_data"] = _described(name, raw, hashes)
        (folder / name).write_bytes(raw)
        shards.append(shard)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def _described(name: str, raw: bytes, hashes: Sequence[str]) -> dict[str, Any]:
    found = {algorithm: getattr(xxhash, algorithm, None) or getattr(hashlib, algorithm) for algorithm in hashes}
    return {"basename": name, "bytes": len(raw), "hashes": {name: make(raw).hexdigest() for name, make in found.items()}}


def _mds_size(encoding: str) -> int | None:
    kind, *settings = encoding.split(":")
    if kind == "ndarray":
        sides = [int(side) for side in settings[1].split(",")] if len(settings) > 1 else None
        return int(np.prod(sides)) * np.dtype(settings[0]).itemsize if sides else None
    return 8 if kind == "int" else np.dtype(kind).itemsize if kind in _ARRAY_CODES else None


def _mds_row(columns: Mapping[str, str], row: dict[str, Any]) -> bytes:
    values = {name: _mds_value(columns[name], row[name]) for name in sorted(columns)}
    sizes = [len(value) for name, value in values.items() if _mds_size(columns[name]) is None]
    return np.array(sizes, "<u4").tobytes() + b"".join(values.values())


def _mds_value(encoding: str, value: Any) -> bytes:
    kind, *settings = encoding.split(":")
    if isinstance(value, bytes):
        return value
    if kind in _ARRAY_CODES or kind == "int":
        return np.array(value, "int64" if kind == "int" else kind).tobytes()
    if kind == "json":
        return json.dumps(value).encode()
    if kind != "ndarray":
        return str(value).encode()
    array, head = np.asarray(value), b""
    if not settings:
        head += bytes([_ARRAY_CODES[array.dtype.name]])
    if len(settings) < 2:
        width = next(width for width in range(4) if max(array.shape) < 1 << 8 * 2**width)
        head += bytes([array.ndim << 2 | width]) + np.array(array.shape, f"<u{2**width}").tobytes()
    return head + array.tobytes()


# LitData -----------------------------------------------------------------------------------------------------------------

TENSOR_CODES = {"float32": 1, "float64": 3, "float16": 9, "uint8": 11, "int8": 12, "int16": 14, "int32": 16, "int64": 18}
NUMPY_CODES = {
    "int8": 0,
    "int16": 1,
    "int32": 2,
    "int64": 3,
    "uint8": 4,
    "uint16": 5,
    "uint32": 6,
    "uint64": 7,
    "float16": 8,
    "float32": 9,
    "float64": 10,
    "bool": 13,
}
_LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}


def tree_of(item: Any) -> dict[str, Any]:
    """The structure of an item."""
    if isinstance(item, dict):
        return {
            "type": "builtins.dict",
            "context": json.dumps([*item]),
            "children_spec": [tree_of(child) for child in item.values()],
        }
    if isinstance(item, tuple):
        return {"type": "builtins.tuple", "context": "null", "children_spec": [tree_of(child) for child in item]}
    return _LEAF


def leaves_of(item: Any) -> list[Any]:
    if isinstance(item, dict | tuple):
        children = item.values() if isinstance(item, dict) else item
        return [leaf for child in children for leaf in leaves_of(child)]
    return [item]


def write_litdata(
    folder: Path,
    formats: Sequence[str],
    items: Sequence[Any],
    *,
    chunk_rows: int = 4,
    level: str | None = None,
    **config: Any,
) -> Path:
    """Items, whose leaves have these formats. `level` is that of the compression: chunk, batch or sample."""
    folder.mkdir(parents=True)
    chunks = list[dict[str, Any]]()
    settings = {
        "chunk_size": chunk_rows,
        "compression": level and "zstd:3",
        "compression_level": level,
        "data_format": [*formats],
        "data_spec": json.dumps([1, tree_of(items[0])]),
        "encryption": None,
        "item_loader": "PyTreeLoader",
    } | config
    for start in range(0, len(items), chunk_rows):
        rows, name = [], f"chunk-0-{len(chunks)}.bin"
        for item in items[start : start + chunk_rows]:
            values = [litdata_value(format_, leaf) for format_, leaf in zip(formats, leaves_of(item), strict=True)]
            head = b"" if settings["item_loader"] == "TokensLoader" else np.array([*map(len, values)], "<u4").tobytes()
            rows.append(head + b"".join(values))
        raw = rows_as_file([COMPRESSIONS["zstd"](row) for row in rows] if level == "sample" else rows)
        chunks.append({"chunk_bytes": len(raw), "chunk_size": len(rows), "dim": None, "filename": name})
        if level == "chunk":
            chunks[-1]["filename"] = name = name.replace(".bin", ".zstd:3.bin")
            raw = COMPRESSIONS["zstd"](raw)
        (folder / name).write_bytes(in_frames(rows, 3) if level == "batch" else raw)
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": settings}))
    return folder


def litdata_value(format_: str, value: Any) -> bytes:
    kind, _, _ = format_.partition(":")
    if isinstance(value, bytes):
        return value
    if kind in ("int", "float", "bool"):
        return np.array(value, {"int": "<i8", "float": "<f8", "bool": "?"}[kind]).tobytes()
    if kind in ("tensor", "numpy"):
        order, codes = (">", TENSOR_CODES) if kind == "tensor" else ("<", NUMPY_CODES)
        head = np.array([codes[value.dtype.name], value.ndim, *value.shape], f"{order}u4").tobytes()
        return head + bytes(value.tobytes())
    return bytes(value.tobytes()) if isinstance(value, np.ndarray) else str(value).encode()


def in_frames(rows: Sequence[bytes], frame_rows: int) -> bytes:
    """A chunk of compressed frames, each of so many rows."""
    frames = [rows[start : start + frame_rows] for start in range(0, len(rows), frame_rows)]
    packed = [COMPRESSIONS["zstd"](b"".join(frame)) for frame in frames]
    head = struct.pack("<8sHHIII", b"LDFZ01\0\0", 1, 0, len(rows), frame_rows, len(frames))
    head += np.cumsum([0, *map(len, rows)]).astype("<u4").tobytes()
    begin, table = len(head) + 24 * len(frames), b""
    for number, (frame, data) in enumerate(zip(frames, packed, strict=True)):
        table += struct.pack("<IIQII", number * frame_rows, len(frame), begin, len(data), sum(map(len, frame)))
        begin += len(data)
    return head + table + b"".join(packed)


def with_footer(num_rows: int, table: pa.Table, *, is_file: bool = True) -> bytes:
    """A chunk without items, whose rows are an Arrow file or stream at its end."""
    sink = pa.BufferOutputStream()
    with (pa.ipc.new_file if is_file else pa.ipc.new_stream)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    footer: bytes = sink.getvalue().to_pybytes()
    return rows_as_file([b""] * num_rows) + footer + struct.pack("<I", len(footer)) + b"LDARW01\0"
