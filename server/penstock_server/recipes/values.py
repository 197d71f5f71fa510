"""Columns as Python objects: types without a direct text, such as nested columns, times and dates."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from penstock_server.arrow import parsed_json


def python_values(array: pa.Array) -> list[Any]:
    """Convert values to Python objects; times are cut to the microsecond, Python's resolution.

    Raises UnicodeDecodeError: a text is not UTF-8. Raises OverflowError: a date is outside the years 1 to 9999. Raises
    ValueError: a time zone is not known here.
    """
    coarse = _coarse(array.type)
    try:
        values: list[Any] = (array if coarse == array.type else array.cast(coarse, safe=False)).to_pylist()
    except pa.ArrowInvalid as error:
        if "zoneinfo" not in str(error):
            raise
        raise ValueError(f"of {array.type} the time zone is not known here; install tzdata, or write times in UTC") from error
    return values


def json_values(array: pa.Array) -> list[Any]:
    """Convert values to JSON values: structs and maps are objects, and values of Parquet's JSON type are parsed.

    A null field of a struct is left out, since Parquet cannot store a row without it; a map key with a null value stays.
    Raises UnicodeEncodeError: a JSON value has half of a surrogate pair. Raises the errors of `python_values`.
    """
    return [_as_json(value, array.type) for value in python_values(array)]


def _as_json(value: Any, kind: pa.DataType) -> Any:
    if isinstance(kind, pa.JsonType):
        made = None if value is None else parsed_json(value)
        if value and "\\u" in value:
            json.dumps(made, ensure_ascii=False).encode()
        return made
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if isinstance(value, dict):
        made = {field.name: _as_json(value[field.name], field.type) for field in kind}
        return {name: item for name, item in made.items() if item is not None}
    if pa.types.is_map(kind) and value is not None:
        return {key: _as_json(item, kind.item_type) for key, item in value}
    return [_as_json(item, kind.value_type) for item in value] if isinstance(value, list) else value


def _coarse(kind: pa.DataType) -> pa.DataType:
    """Replace nanoseconds by microseconds in a type, also inside nested types."""
    types = pa.types
    if types.is_struct(kind):
        return pa.struct([field.with_type(_coarse(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(kind.key_field.with_type(_coarse(kind.key_type)), kind.item_field.with_type(_coarse(kind.item_type)))
    if types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_coarse(kind.value_type)), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):  # pyarrow cannot cast list views
        item = kind.value_field.with_type(_coarse(kind.value_type))
        return pa.list_(item) if types.is_list(kind) else pa.large_list(item)
    if not types.is_temporal(kind) or getattr(kind, "unit", "") != "ns":
        return kind
    if types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return pa.duration("us") if types.is_duration(kind) else pa.time64("us")
