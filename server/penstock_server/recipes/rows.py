"""A block's rows: why they are bad, and the columns that travel beside their tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock_server.geometry.arrays import IntArray
from penstock_server.recipes.column_types import is_bytes


class Reasons(list[str | None]):
    """Why each row is bad, None where it is not; the first reason stays."""

    def add(self, row: int, reason: str) -> None:
        """Notes that a row is bad."""
        self[row] = self[row] or reason


def travelling(array: pa.Array, name: str, reasons: Reasons) -> pa.Array:
    """A column that travels, without nulls: NaN and empty texts stand for them; where nothing can, the row is bad.

    Numbers and fixed-size lists of them stay, text is a large_string and bytes are a large_binary.
    """
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_fixed_size_list(array.type):
        return _vectors(array, name, reasons)
    if pa.types.is_floating(array.type):
        wide = array.cast(pa.float32()) if pa.types.is_float16(array.type) else array
        return pc.fill_null(wide, float("nan"))
    if pa.types.is_integer(array.type) or pa.types.is_boolean(array.type):
        for row in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            reasons.add(row, f"{name} is null")
        return pc.fill_null(array, False if pa.types.is_boolean(array.type) else 0)
    raw = pc.fill_null(raw_texts(array), b"")
    return raw if is_bytes(array.type) else _texts(raw, name, reasons)


def take_rows(rows: pa.RecordBatch, numbers: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """The rows of these numbers, which ascend."""
    try:
        return rows.take(pa.array(numbers))
    except pa.ArrowNotImplementedError:  # of views, which pyarrow only slices and joins; Polars writes all text as views
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
        return pa.concat_batches([rows.slice(int(run[0]), len(run)) for run in runs if len(run)] or [rows.slice(0, 0)])


def list_lengths(array: pa.Array) -> IntArray:
    """The length of each list, 0 for null."""
    lengths: IntArray = pc.fill_null(pc.cast(pc.list_value_length(array), pa.int64()), 0).to_numpy(zero_copy_only=False)
    return lengths


def raw_texts(array: pa.Array) -> pa.Array:
    """A column of text or bytes as large_binary: not every text is UTF-8."""
    return pc.cast(array, pa.large_binary())


def _vectors(array: pa.Array, name: str, reasons: Reasons) -> pa.Array:
    size, item = array.type.list_size, array.type.value_type
    if not (array.null_count or array.flatten().null_count):
        return array
    rows = []
    for row, value in enumerate(array.to_pylist()):
        if value is None or None in value:
            reasons.add(row, f"{name} is null or holds a null")
            value = [0] * size
        rows.append(value)
    return pa.array(rows, pa.list_(item, size))


def _texts(raw: pa.Array, name: str, reasons: Reasons) -> pa.Array:
    try:
        return pc.cast(raw, pa.large_string())
    except pa.ArrowInvalid:
        texts = []
        for row, value in enumerate(raw.to_pylist()):
            try:
                texts.append(value.decode())
            except UnicodeDecodeError as error:
                reasons.add(row, f"{name} is not valid UTF-8 at byte {error.start}")
                texts.append("")
        return pa.array(texts, pa.large_string())
