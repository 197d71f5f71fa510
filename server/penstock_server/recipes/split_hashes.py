"""Splits: a stable hash of each row says whether it is of "train" or of "validation", whatever share validation has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from penstock_server.arrow import raw_texts
from penstock_server.geometry.permutation import permute
from penstock_server.recipes.column_types import is_text
from penstock_server.recipes.recipe import Recipe
from penstock_server.recipes.values import python_values

_HASHES = 1 << 32


@dataclass(frozen=True, slots=True)
class Place:
    """Where rows come from: `first_row` is the first one's number in the shard called `shard`."""

    shard: str
    first_row: int


def split_hashes(rows: pa.RecordBatch, recipe: Recipe, place: Place, kept: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """A uniform hash of each row, shape [num_rows]: of its place, or of the value of the field that the recipe names.

    A row's place is the name of its shard and its number in it, so shards that come to the dataset move no row to the other
    split. `kept` are the rows' numbers, counted from `place.first_row`.

    It decides a row's split and nothing else: what else is left to chance needs a hash of its own, or it would go by the split.
    """
    if recipe.split_by is None:
        key = xxhash.xxh3_64_intdigest(place.shard.encode())
        return permute((place.first_row + kept) % _HASHES, _HASHES, key).astype(np.uint32)
    found = recipe.split_by.array(rows)
    if is_text(found.type):  # as its bytes: those that are no UTF-8 have a split, too
        contents = [str(raw).encode() if raw is None else raw for raw in raw_texts(found).to_pylist()]
    else:
        contents = [str(value).encode() for value in _values(found)]
    return np.array([xxhash.xxh3_64_intdigest(content) >> 32 for content in contents], np.uint32)


def is_validation(hashes: npt.NDArray[np.uint32], share: float) -> npt.NDArray[np.bool_]:
    """Which rows are of the validation split, which has that share of all rows; shape of `hashes`."""
    return hashes < np.uint64(round(share * _HASHES))


def _values(array: pa.Array) -> list[Any]:
    """The values as Python objects; a date that Python has not as its number, and what holds such a date as a text."""
    try:
        return python_values(array)
    except OverflowError:
        return [_value(array[row : row + 1]) for row in range(len(array))]


def _value(one: pa.Array) -> Any:
    try:
        [value] = python_values(one)
    except OverflowError:
        value = one.to_string() if pa.types.is_nested(one.type) else one[0].value
    return value
