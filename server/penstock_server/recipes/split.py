"""Splits: train, validation and test rows, by the names of the shards or by a stable hash of each row.

By hash, every shard is a train shard, and a share of its rows is held out for validation. By names, a share is held out of the
train shards only if penstock.toml sets one. In both cases a shard's split and a row's hash decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from penstock_server.arrow import raw_texts
from penstock_server.order.permutation import permute
from penstock_server.recipes.fields import is_text, python_values
from penstock_server.recipes.recipe import Recipe

SplitRule = Literal["files", "hash"]
Selection = Literal["all", "none", "train", "validation"]  # of a shard's rows; the last two go by the row's hash

_HASHES = 1 << 32
# Hugging Face's rule for file names: a keyword between separators, digits or the ends of the name.
_KEYWORDS = re.compile(
    r"(?<![^-._ 0-9])(?:(test|testing|eval|evaluation)|(validation|valid|val|dev)|(train|training))(?![^-._ 0-9])",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Place:
    """Origin of rows: `first_row` is the first one's number in the shard called `shard`."""

    shard: str
    first_row: int


def split_hashes(rows: pa.RecordBatch, recipe: Recipe, place: Place, kept: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Return a uniform hash of each row, which decides its split and nothing else: of its place, or of the recipe's field.

    A row's place is the name of its shard and its number in it, so new shards move no row. `kept` are the rows' numbers,
    counted from `place.first_row`.
    """
    if recipe.split_by is None:
        key = xxhash.xxh3_64_intdigest(place.shard.encode())
        return permute((place.first_row + kept) % _HASHES, _HASHES, key).astype(np.uint32)
    values = recipe.split_by.array(rows)
    if is_text(values.type):  # hash its bytes: text that is not UTF-8 has a split, too
        contents = [b"None" if raw is None else raw for raw in raw_texts(values).to_pylist()]
    else:
        contents = [str(value).encode() for value in python_values(values)]
    return np.array([xxhash.xxh3_64_intdigest(content) >> 32 for content in contents], np.uint32)


def splits_of_shards(names: Iterable[str], rule: SplitRule | None) -> tuple[str, ...] | None:
    """Return the split of each shard by its file name: train, validation, test or none; None if the rule is the hash.

    Without a rule, names decide if some name test or validation shards, but not all. A shard without a keyword is train,
    unless other shards are named train. A shard with several keywords is held out: test before validation before train.

    >>> splits_of_shards(["test-00000-of-00001.parquet", "train-00000-of-00001.parquet"], None)
    ('test', 'train')
    """
    if rule == "hash":
        return None
    splits = [_split_named(name) for name in names]
    kinds = {*splits}
    if rule is None and (len(kinds) == 1 or not kinds & {"validation", "test"}):
        return None
    unnamed = "none" if "train" in kinds else "train"
    return tuple(split or unnamed for split in splits)


def _split_named(name: str) -> str:
    groups = {keyword.lastindex for keyword in _KEYWORDS.finditer(name)}
    return next((split for group, split in enumerate(("test", "validation", "train"), start=1) if group in groups), "")


def select_rows(split: str, shard_split: str, share: float) -> Selection:
    """Return the rows of a shard that are in a split; `share` of a train shard's rows is held out for validation."""
    if shard_split != "train" or split == "all":
        return "all" if split in ("all", shard_split) else "none"
    if split == "train":
        return "train" if share else "all"
    return "validation" if split == "validation" and share else "none"


def is_selected(held_out: npt.NDArray[np.bool_], selection: Selection) -> npt.NDArray[np.bool_]:
    """Return the mask of a selection's rows, shape of `held_out`; the hash holds out rows with True there."""
    if selection in ("all", "none"):
        return np.full_like(held_out, selection == "all")
    return held_out if selection == "validation" else ~held_out


def is_validation(hashes: npt.NDArray[np.uint32], share: float) -> npt.NDArray[np.bool_]:
    """Return the mask of rows that the hash holds out for validation, a `share` of all rows; shape of `hashes`."""
    return hashes < np.uint64(round(share * _HASHES))
