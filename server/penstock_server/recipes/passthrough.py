"""Passthrough columns: sent beside the tokens of a block's rows."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock_server.arrow import raw_texts
from penstock_server.recipes.column_types import is_bytes
from penstock_server.recipes.fitting import Column
from penstock_server.recipes.rows import Rows
from penstock_server.recipes.tokenizer import Note


def travelling(rows: Rows, column: Column) -> pa.Array:
    """Return a passthrough column without nulls: NaN or an empty text replaces them; if the type has neither, the row is bad.

    Numbers and fixed-size lists of them stay, text is a large_string and bytes are a large_binary.
    """
    array, note = rows.values(column.field), partial(rows.note, of=column.name)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_fixed_size_list(array.type):
        return _vectors(array, note)
    if pa.types.is_floating(array.type):
        wide = array.cast(pa.float32()) if pa.types.is_float16(array.type) else array
        return pc.fill_null(wide, float("nan"))
    if pa.types.is_integer(array.type) or pa.types.is_boolean(array.type):
        for row in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            note(row, "is null")
        return pc.fill_null(array, False if pa.types.is_boolean(array.type) else 0)
    raw = pc.fill_null(raw_texts(array), b"")
    return raw if is_bytes(array.type) else _texts(raw, note)


def _vectors(array: pa.Array, note: Note) -> pa.Array:
    size, item = array.type.list_size, array.type.value_type
    if not (array.null_count or array.flatten().null_count):
        return array.cast(pa.list_(item, size))  # whether or not the file declares that it has no nulls
    vectors = []
    for row, value in enumerate(array.to_pylist()):
        if value is None or None in value:
            note(row, "is null or holds a null")
            value = [0] * size
        vectors.append(value)
    return pa.array(vectors, pa.list_(item, size))


def _texts(raw: pa.Array, note: Note) -> pa.Array:
    try:
        return pc.cast(raw, pa.large_string())
    except pa.ArrowInvalid:
        texts = []
        for row, value in enumerate(raw.to_pylist()):
            try:
                texts.append(value.decode())
            except UnicodeDecodeError as error:
                note(row, f"is not valid UTF-8 at byte {error.start}")
                texts.append("")
        return pa.array(texts, pa.large_string())
