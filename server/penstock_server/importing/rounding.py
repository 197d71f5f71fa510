"""Whole numbers that float64 rounds: in JSON they may have any number of digits, and share a column with decimals."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_EXACT = 2**53  # float64 holds every whole number up to here
_LONG = re.compile(rb"(?<![\d.eE+-])-?\d{16,}(?![\d.eE])")


def find_inexact(lines: bytes, table: pa.Table, known: Collection[str]) -> dict[str, Decimal]:
    """Find one whole number per column, by path, that float64 does not hold exactly, except for the paths in `known`.

    `table` is the parsed JSON lines. A path is "column", "column.field" or, in a list, "column[]".
    """
    wanted = {path for path, values in _numbers(table) if path not in known and _reaches_far(values)}
    found: dict[str, Decimal] = {}
    for line in lines.split(b"\n") if wanted else ():
        if _LONG.search(line):
            with suppress(ValueError):  # pyarrow reads more than JSON, such as Inf
                for path, number in _whole_numbers("", json.loads(line, parse_int=Decimal)):
                    if path in wanted and Decimal(float(number)) != number:
                        found.setdefault(path, number)
            if wanted == found.keys():
                break
    return found


def float_columns(schema: pa.Schema) -> set[str]:
    """Return the paths of all float64 values."""
    return {path for path, values in _numbers(schema.empty_table()) if pa.types.is_floating(values.type)}


def _numbers(table: pa.Table) -> Iterator[tuple[str, pa.Array]]:
    for name, column in zip(table.schema.names, table.columns, strict=True):
        yield from _numbers_in(name, column.combine_chunks())


def _numbers_in(path: str, values: pa.Array) -> Iterator[tuple[str, pa.Array]]:
    if pa.types.is_struct(values.type):
        for number, field in enumerate(values.type):
            yield from _numbers_in(f"{path}.{field.name}", values.field(number))
    elif pa.types.is_list(values.type):
        yield from _numbers_in(f"{path}[]", values.flatten())
    elif pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
        yield path, values


def _reaches_far(values: pa.Array) -> bool:
    bounds = pc.min_max(values).as_py()
    # The bound itself may be the rounded form of the next number.
    return bounds["min"] is not None and (bounds["min"] <= -_EXACT or bounds["max"] >= _EXACT)


def _whole_numbers(path: str, value: Any) -> Iterator[tuple[str, Decimal]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _whole_numbers(f"{path}.{key}" if path else key, item)
    elif isinstance(value, list):
        for item in value:
            yield from _whole_numbers(f"{path}[]", item)
    elif isinstance(value, Decimal):
        yield path, value
