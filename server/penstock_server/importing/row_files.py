"""Files of binary rows, as MosaicML Streaming and LitData write them, and the folders that hold them.

file  number of rows: 4 bytes | offset of each row and of the end: 4 each | other bytes | rows
row   size of each value that has no fixed size: 4 each | values

A folder has an index.json that names its files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import PurePosixPath
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, Field, ValidationError

from penstock.text import listed, one_line
from penstock_server.importing.inputs import Input, open_file
from penstock_server.importing.tables import Columns
from penstock_server.order.arrays import IntArray, starts_of

INDEX_NAME = "index.json"

_PORTION_BYTES, _PORTION_ROWS = 4 << 20, 65_536
_MAX_READ_BYTES = 64 << 20  # a read allocates its bytes even if the file has fewer, as a damaged one may

Model = TypeVar("Model", bound=BaseModel)
UInt32 = Annotated[int, Field(ge=0, lt=1 << 32)]
Decode = Callable[[Sequence[bytes]], pa.Array]
OpenColumns = Callable[[], AbstractContextManager[Columns]]


class Portion(NamedTuple):
    """Rows end to end: row i is data[bounds[i] : bounds[i + 1]]."""

    data: bytes
    bounds: IntArray


class Column(NamedTuple):
    """Column of a file. `size` of its values, None if each row states it; `decode` None if it is not imported."""

    name: str
    encoding: str
    size: int | None
    decode: Decode | None


# Folders -----------------------------------------------------------------------------------------------------------------


def read_index(folder: Input) -> dict[str, Any]:
    """Read the index.json of a folder. Raises ValueError: it is not a JSON object. Raises OSError."""
    with open_file(folder / INDEX_NAME) as file:
        try:
            index = json.loads(file.read())
        except RecursionError:
            index = None
    if not isinstance(index, dict):
        raise ValueError(f"{INDEX_NAME} is not a JSON object")
    return index


def checked(index: dict[str, Any], model: type[Model]) -> Model:
    """Return an index.json as a model. Raises ValueError: it has another form."""
    try:
        return model.model_validate(index)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{INDEX_NAME} has another form than expected at {place}: {first['msg']}") from error


def path_in(folder: Input, name: str) -> Input:
    """Return the path of a file that index.json names. Raises ValueError: it would be outside the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{INDEX_NAME} names {name!r}, which is outside the folder")
    return folder / path


def unread(name: str, encoding: str) -> ValueError:
    """Return the error for a column that cannot be read."""
    is_pickle = encoding in ("pkl", "pickle")
    reason = (
        "is a pickle, which can run any code when it is read"
        if is_pickle
        else f"has the encoding {encoding}, which is not read"
    )
    return ValueError(f"column {name!r} {reason}. Name the other columns: --columns A,B")


# Files -------------------------------------------------------------------------------------------------------------------


def read_rows(file: pa.NativeFile, num_rows: int) -> Iterator[Portion]:
    """Yield the rows of a file in portions of some MiB. Raises ValueError: they are not as many, or the file is damaged."""
    [stated] = read_numbers(file, 1)
    if stated != num_rows:
        raise ValueError(f"it has {stated:,} rows, but {INDEX_NAME} states {num_rows:,}")
    offsets = read_numbers(file, num_rows + 1)
    begin = 4 * (num_rows + 2)
    check_offsets(offsets, begin)
    read_bytes(file, int(offsets[0]) - begin)
    first = 0
    while first < num_rows:
        full = int(np.searchsorted(offsets, offsets[first] + _PORTION_BYTES, side="right")) - 1
        last = max(first + 1, min(full, first + _PORTION_ROWS, num_rows))
        yield Portion(read_bytes(file, int(offsets[last] - offsets[first])), offsets[first : last + 1] - offsets[first])
        first = last
    file.read(1)  # if it is compressed, its checksum follows the last row


def read_numbers(file: pa.NativeFile, count: int) -> IntArray:
    """Read unsigned numbers of four bytes. Raises ValueError: the file ends before the last one."""
    return np.frombuffer(read_bytes(file, 4 * count), "<u4").astype(np.int64)


def read_bytes(file: pa.NativeFile, count: int) -> bytes:
    """Read that many bytes. Raises ValueError: the file ends before the last one."""
    parts = list[bytes]()
    while count and (part := file.read(min(count, _MAX_READ_BYTES))):
        parts.append(part)
        count -= len(part)
    if count:
        raise ValueError(f"it ends {count:,} bytes too early")
    return b"".join(parts)


def check_offsets(offsets: IntArray, begin: int) -> None:
    """Raise ValueError if offsets do not ascend from `begin` or above."""
    if offsets[0] < begin or (np.diff(offsets) < 0).any():
        raise ValueError("its offsets do not ascend")


def columns_of(portions: Iterator[Portion], columns: Sequence[Column], *, states_sizes: bool = True) -> Columns:
    """Return the columns that are imported, with the types of the first row.

    Without `states_sizes` a row is the value of the only column, and nothing else.
    """
    by_name = {column.name: (number, column) for number, column in enumerate(columns) if column.decode}

    def batch(portion: Portion, names: Iterable[str]) -> pa.RecordBatch:
        begins, ends = (
            _value_bounds(portion, columns) if states_sizes else (portion.bounds[:-1, None], portion.bounds[1:, None])
        )
        arrays = []
        for number, column in map(by_name.__getitem__, names):
            bounds = zip(begins[:, number].tolist(), ends[:, number].tolist(), strict=True)
            arrays.append(_decoded(column, [portion.data[begin:end] for begin, end in bounds]))
        if not arrays:  # without a column, a batch would have no rows
            return pa.record_batch([pa.nulls(len(begins))], [""])
        return pa.record_batch(arrays, [*names])

    first = next(portions, None)
    if first is None:
        return Columns(pa.schema([]), lambda _: iter(()))
    schema = batch(Portion(first.data, first.bounds[:2]), by_name).select([*by_name]).schema
    return Columns(schema, lambda names: (batch(portion, names) for portion in chain([first], portions)))


def _value_bounds(portion: Portion, columns: Sequence[Column]) -> tuple[IntArray, IntArray]:
    """Return where the values of each row begin and end, both of shape [rows, columns].

    Raises ValueError: the sizes of the values are not those of their rows.
    """
    begins, ends = portion.bounds[:-1], portion.bounds[1:]
    is_stated = np.array([not column.size for column in columns])
    num_head_bytes = 4 * int(is_stated.sum())
    if len(begins) and (ends - begins).min() < num_head_bytes:
        raise ValueError("a row is shorter than the sizes of its values")
    sizes = np.empty((len(begins), len(columns)), np.int64)
    sizes[:] = [column.size or 0 for column in columns]
    heads = np.frombuffer(portion.data, np.uint8)[begins[:, None] + np.arange(num_head_bytes)]
    sizes[:, is_stated] = heads.view("<u4")
    stops = (begins + num_head_bytes)[:, None] + sizes.cumsum(axis=1)
    if (stops[:, -1] != ends).any():
        raise ValueError("the sizes of values do not add up to those of their rows")
    return stops - sizes, stops


def _decoded(column: Column, values: Sequence[bytes]) -> pa.Array:
    assert column.decode
    try:
        return column.decode(values)
    except (LookupError, OverflowError, RecursionError, ValueError, pa.ArrowException) as error:
        raise ValueError(f"column {column.name!r} has a value that is not {column.encoding}: {one_line(error)}") from error


# Values ------------------------------------------------------------------------------------------------------------------


def decode_bytes(values: Sequence[bytes]) -> pa.Array:
    """Return values as they are."""
    return pa.array(values, pa.binary())


def decode_text(values: Sequence[bytes]) -> pa.Array:
    """Return UTF-8 as text."""
    return decode_bytes(values).cast(pa.string())


def decode_numbers(values: Sequence[bytes], type_: npt.DTypeLike) -> pa.Array:
    """Return one number a value."""
    dtype = np.dtype(type_)
    if others := {len(value) for value in values} - {dtype.itemsize}:
        raise ValueError(f"it has {others.pop()} bytes, not {dtype.itemsize}")
    return pa.array(np.frombuffer(b"".join(values), dtype))


def decode_arrays(values: Sequence[bytes], parse: Callable[[bytes], npt.NDArray[Any]], *, has_one_type: bool) -> pa.Array:
    """Return arrays of any shape, but of one number of dimensions, as lists; those of two dimensions as lists of lists.

    Without `has_one_type`, floats become float64, since later ones may be wider. Integers are widened later, if need be.
    """
    arrays = [parse(value) for value in values]
    numbers = np.concatenate([array.reshape(-1) for array in arrays])
    types, axes = {array.dtype for array in arrays}, {array.ndim for array in arrays}
    if len({dtype.kind.replace("u", "i") for dtype in (numbers.dtype, *types)}) > 1 or len(axes) > 1:
        mixed = f"{listed(sorted(map(str, types)))} of {listed(sorted(map(str, axes)))} dimensions"
        raise ValueError(f"arrays of {mixed} do not go together")
    lists = pa.array(numbers.astype(np.float64) if numbers.dtype.kind == "f" and not has_one_type else numbers)
    sides = np.array([array.shape for array in arrays]).reshape(len(arrays), -1)
    for axis in reversed(range(sides.shape[1])):
        lengths = np.repeat(sides[:, axis], sides[:, :axis].prod(axis=1))
        lists = pa.LargeListArray.from_arrays(starts_of(lengths), lists)
    return lists
