"""Folders of LitData: chunks of items, in each of the forms that its writer has.

Sources: writer.py, item_loader.py, serializers.py, framed_zstd.py and constants.py of litdata 0.2.76.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, Field, Json, StringConstraints

from penstock_server.importing.inputs import Input, open_file
from penstock_server.importing.row_files import (
    INDEX_NAME,
    Column,
    Decode,
    OpenColumns,
    Portion,
    UInt32,
    check_offsets,
    checked,
    columns_of,
    decode_arrays,
    decode_bytes,
    decode_numbers,
    decode_text,
    path_in,
    read_bytes,
    read_numbers,
    read_rows,
    unread,
)
from penstock_server.importing.tables import Columns, arrow_columns
from penstock_server.order.arrays import starts_of

# By the numbers in index.json and in chunks; complex numbers and bfloat16 are left out.
_NUMPY = dict(enumerate(["i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8"])) | {13: "?"}
_TORCH_CODES = {
    "<f4": (0, 1),
    "<f8": (2, 3),
    "<f2": (8, 9),
    "?": (19,),
    "i1": (12,),
    "<i2": (13, 14),
    "<i4": (15, 16),
    "<i8": (17, 18),
    "u1": (11,),
    "<u2": (20,),
}
_TORCH = {code: type_ for type_, codes in _TORCH_CODES.items() for code in codes}
_NUMBERS = {"int": "<i8", "float": "<f8", "bool": "?"}
_FOOTER_MAGIC = b"LDARW01\0"
_FRAMES_MAGIC = b"LDFZ01\0\0"
_FRAME = np.dtype([("first", "<u4"), ("rows", "<u4"), ("begin", "<u8"), ("bytes", "<u4"), ("raw_bytes", "<u4")])


class _Chunk(BaseModel):
    filename: str
    chunk_size: UInt32


class _Tree(BaseModel):
    """Nested keys of an item: those of a dict, or no context for a list and for a value, which has no children."""

    type: str | None
    context: Json[Any] | None
    children_spec: list[_Tree]


class _Config(BaseModel):
    data_format: list[str] = Field(min_length=1)
    data_spec: Json[tuple[Literal[1], _Tree]]
    compression: Annotated[str, StringConstraints(pattern=r"^zstd(:\d+)?$")] | None = None
    compression_level: Literal["chunk", "batch", "sample"] | None = None
    encryption: dict[str, Any] | None = None
    item_loader: str | None = None

    @property
    def holds_tokens(self) -> bool:
        """Whether an item is an array of token ids, which does not state its size."""
        # As in LitData, whose old versions wrote no item_loader.
        is_array = len(self.data_format) == 1 and self.data_format[0].startswith("no_header_tensor")
        return self.item_loader == "TokensLoader" or (self.item_loader is None and is_array)


class _Index(BaseModel):
    chunks: list[_Chunk] = Field(min_length=1)
    config: _Config


def litdata_chunks(folder: Input, index: dict[str, Any], columns: Sequence[str] | None) -> Sequence[tuple[Input, OpenColumns]]:
    """Return the chunks of a folder by its index.json. Raises ValueError: it has another form, or chunks of other kinds."""
    model = checked(index, _Index)
    config = model.config
    if config.encryption:
        raise ValueError("its chunks are encrypted. Write them again without encryption")
    if config.item_loader not in (None, "PyTreeLoader", "TokensLoader"):
        raise ValueError(f"chunks of {config.item_loader} are not read. If they are Parquet files, serve or import these")
    if config.holds_tokens and len(config.data_format) > 1:
        raise ValueError(f"{INDEX_NAME} states several values for each row of tokens")
    chunks = list[tuple[Input, OpenColumns]]()
    for chunk in model.chunks:
        stored = path_in(folder, chunk.filename)
        plain = stored.with_name(stored.name.replace(f".{config.compression}", "")) if config.compression else stored
        path = plain if plain.exists() else stored  # in a cache, a chunk may be decompressed
        open_chunk = partial(_open_chunk, path, chunk.chunk_size, config, columns, is_compressed=path != plain)
        chunks.append((path, open_chunk))
    return chunks


@contextmanager
def _open_chunk(
    path: Input, num_rows: int, config: _Config, chosen: Sequence[str] | None, *, is_compressed: bool
) -> Iterator[Columns]:
    with open_file(path) as file:
        if not (is_compressed or config.holds_tokens) and (footer := _footer(file)):
            yield arrow_columns(footer)
            return
        if config.compression_level == "batch":
            portions = _frames(file, num_rows)
        else:
            portions = read_rows(pa.CompressedInputStream(file, "zstd") if is_compressed else file, num_rows)
        if config.compression_level == "sample":
            portions = map(_inflated, portions)
        yield columns_of(portions, _columns(config, chosen), states_sizes=not config.holds_tokens)


def _footer(file: pa.NativeFile) -> pa.NativeFile | None:
    """Return the Arrow file or stream at the end of a chunk, if there is one. It has the rows, and items are not needed.

    ... | Arrow | bytes of Arrow: 4 | magic: 8
    """
    num_bytes = file.size() - 4 - len(_FOOTER_MAGIC)
    if num_bytes > 0:
        file.seek(num_bytes)
        [num_arrow_bytes] = read_numbers(file, 1)
        if read_bytes(file, len(_FOOTER_MAGIC)) == _FOOTER_MAGIC and num_arrow_bytes <= num_bytes:
            file.seek(num_bytes - num_arrow_bytes)
            return pa.BufferReader(file.read_buffer(num_arrow_bytes))
    file.seek(0)
    return None


def _frames(file: pa.NativeFile, num_rows: int) -> Iterator[Portion]:
    """Yield rows that are compressed some hundred at a time.

    magic: 8 | version: 2 | flags: 2 | rows: 4 | rows of a frame: 4 | frames: 4 | offset of each row, and of the end, without
    compression: 4 each | first row, rows, begin, bytes, bytes without compression: 24 for each frame | frames
    """
    magic, version = read_bytes(file, len(_FRAMES_MAGIC)), int.from_bytes(read_bytes(file, 2), "little")
    read_bytes(file, 2)
    stated, _, num_frames = read_numbers(file, 3).tolist()
    if (magic, version, stated) != (_FRAMES_MAGIC, 1, num_rows):
        raise ValueError(f"it does not begin as a chunk of {num_rows:,} rows in frames of version 1")
    offsets = read_numbers(file, num_rows + 1)
    check_offsets(offsets, 0)
    first = 0
    for frame in np.frombuffer(read_bytes(file, _FRAME.itemsize * num_frames), _FRAME):
        bounds = offsets[first : first + int(frame["rows"]) + 1] - offsets[first]
        if frame["first"] != first or bounds[-1] != frame["raw_bytes"] or frame["begin"] > file.size():
            raise ValueError(f"its frames do not hold the rows from number {first:,} on")
        file.seek(int(frame["begin"]))
        data = pa.decompress(read_bytes(file, int(frame["bytes"])), int(frame["raw_bytes"]), "zstd", asbytes=True)
        yield Portion(data, bounds)
        first += len(bounds) - 1
    if first != num_rows:
        raise ValueError(f"its frames hold {first:,} of {num_rows:,} rows")


def _inflated(portion: Portion) -> Portion:
    """Decompress each row."""
    rows = [
        pa.CompressedInputStream(pa.BufferReader(portion.data[begin:end]), "zstd").read()
        for begin, end in pairwise(portion.bounds.tolist())
    ]
    return Portion(b"".join(rows), starts_of(np.array([*map(len, rows)])))


def _columns(config: _Config, chosen: Sequence[str] | None) -> Sequence[Column]:
    names = _names(config.data_spec[1])
    if names == [""]:
        format_ = config.data_format[0]
        names = ["tokens" if format_.startswith("no_header") else "text" if format_ in ("str", "text") else "value"]
    return [
        Column(name, format_, None, _decoder(name, format_) if chosen is None or name in chosen else None)
        for name, format_ in zip(names, config.data_format, strict=True)
    ]


def _names(tree: _Tree, name: str = "") -> list[str]:
    """Return the name of each value: a.b for value b of dict a, a.0 for the first one of list a."""
    if tree.type is None:
        return [name]
    keys = tree.context if isinstance(tree.context, list) else range(len(tree.children_spec))
    children = zip(keys, tree.children_spec, strict=True)
    return [leaf for key, child in children for leaf in _names(child, f"{name}.{key}" if name else str(key))]


def _decoder(name: str, format_: str) -> Decode:
    kind, _, setting = format_.partition(":")
    if kind in _NUMBERS:
        return partial(decode_numbers, type_=_NUMBERS[kind])
    if kind in ("str", "text"):
        return decode_text
    if kind in ("bytes", "file", "image", "jpeg"):
        return decode_bytes
    if kind == "tensor":
        return partial(decode_arrays, parse=partial(_array, _TORCH, ">"), has_one_type=False)
    if kind == "numpy":
        return partial(decode_arrays, parse=partial(_array, _NUMPY, "<"), has_one_type=False)
    if kind in ("no_header_tensor", "no_header_numpy"):
        type_ = (_TORCH if kind == "no_header_tensor" else _NUMPY).get(int(setting))
        if type_:
            return partial(decode_arrays, parse=partial(np.frombuffer, dtype=type_), has_one_type=True)
    raise unread(name, format_)


def _array(types: Mapping[int, str], order: str, value: bytes) -> npt.NDArray[Any]:
    """Parse [type: 4] [dimensions: 4] [sides: 4 each] numbers; the first three are in byte order `order`."""
    type_, num_axes = np.frombuffer(value, f"{order}u4", 2).tolist()
    sides = np.frombuffer(value, f"{order}u4", num_axes, offset=8).tolist()
    return np.frombuffer(value, types[type_], offset=8 + 4 * num_axes).reshape(sides)
