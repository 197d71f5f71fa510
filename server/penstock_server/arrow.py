"""Arrow operations that pyarrow lacks, or lacks for some types, and opening Parquet files."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock_server.order.arrays import IntArray

_INT96_UNIT = "us"  # for Spark's INT96 times; pyarrow's default, ns, overflows in 2262 and wraps to 1677


def open_parquet(source: Any, **options: Any) -> pq.ParquetFile:
    """Open a Parquet file with these options of pyarrow; a column has the same type wherever it is read."""
    return pq.ParquetFile(source, coerce_int96_timestamp_unit=_INT96_UNIT, **options)


def take_rows(rows: pa.RecordBatch, numbers: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """Return the rows with these ascending numbers."""
    try:
        return rows.take(pa.array(numbers))
    except pa.ArrowNotImplementedError:  # pyarrow can only slice and join views; Polars writes all text as views
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
        return pa.concat_batches([rows.slice(int(run[0]), len(run)) for run in runs if len(run)] or [rows.slice(0, 0)])


def list_lengths(array: pa.Array) -> IntArray:
    """Return the length of each list, 0 for null."""
    lengths: IntArray = pc.fill_null(pc.cast(pc.list_value_length(array), pa.int64()), 0).to_numpy(zero_copy_only=False)
    return lengths


def raw_texts(array: pa.Array) -> pa.Array:
    """Convert a column of text, JSON or bytes to large_binary: not every text is UTF-8.

    A JSON string becomes its characters, JSON null becomes null, other JSON values stay JSON text. Invalid JSON is text.
    """
    raw = pc.cast(array, pa.large_binary())
    return pa.array(map(_raw_text, raw.to_pylist()), raw.type) if isinstance(array.type, pa.JsonType) else raw


def _raw_text(raw: bytes | None) -> bytes | None:
    try:
        value = parsed_json(raw.decode()) if raw else raw
    except UnicodeDecodeError:
        return raw
    if value is None:
        return None
    return value.encode(errors="surrogatepass") if isinstance(value, str) else raw


def parsed_json(text: str) -> Any:
    """Parse a JSON text; returns the text itself if it is invalid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def without_json_type(array: pa.Array) -> pa.Array:
    """Convert JSON in an array to plain text as `raw_texts` does, also in the fields of structs."""
    if isinstance(array.type, pa.JsonType):
        return pc.cast(raw_texts(array), pa.large_string(), safe=False)
    if not (pa.types.is_struct(array.type) and holds_json(array.type)):
        return array
    children = [without_json_type(child) for child in array.flatten()]
    return pa.StructArray.from_arrays(children, [field.name for field in array.type], mask=array.is_null())


def holds_json(type_: pa.DataType) -> bool:
    """Return whether a type is Parquet's JSON type, or contains it."""
    if isinstance(type_, pa.BaseExtensionType) or not pa.types.is_nested(type_):
        return isinstance(type_, pa.JsonType)
    return any(holds_json(type_.field(number).type) for number in range(type_.num_fields))
