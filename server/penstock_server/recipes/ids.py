"""Pre-tokenized rows: lists of token ids as they are stored, checked, opened and closed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock_server.geometry.arrays import IntArray, find_one, starts_of
from penstock_server.recipes.fields import Field
from penstock_server.recipes.masks import masked
from penstock_server.recipes.recipe import Recipe
from penstock_server.recipes.rows import Reasons, list_lengths
from penstock_server.recipes.turns import Lists, every, with_turns


def pretokenized(rows: pa.RecordBatch, recipe: Recipe, bound: int, reasons: Reasons) -> dict[str, Lists]:
    """The features of rows of ids, opened and closed by the recipe's BOS and EOS unless they begin and end with them.

    Ids outside [0, bound), null ids and lists without an id make a bad row.
    """
    ids = {role: _checked(source, rows, bound, reasons, is_named=role != "tokens") for role, source in recipe.fields}
    if "tokens" in ids:
        own = masked(ids["tokens"], recipe.masks, rows, reasons) if recipe.masks else ids["tokens"]
        return {"tokens": _closed(_opened(own, recipe.bos_id), recipe.eos_id)}
    first = ["prompt"] if "prompt" in ids else [*ids]
    ids |= {role: _opened(ids[role], recipe.bos_id) for role in first}
    prompts = ids.pop("prompt", every([], rows.num_rows))
    answers = zip(recipe.features, ids.values(), strict=True)
    return {feature: with_turns([prompts, _closed(own, recipe.eos_id)]) for feature, own in answers}


def _checked(source: Field, rows: pa.RecordBatch, bound: int, reasons: Reasons, *, is_named: bool) -> Lists:
    """Lists of ids as they are."""
    array, name = source.array(rows), f"{source.text} " if is_named else ""
    # Flattening drops the items of null lists, which fixed-size lists keep after their nulls.
    lengths, items = list_lengths(array), array.flatten()
    sound = not items.null_count and _all_within(items, bound)
    values = items.to_numpy() if sound else _marked(items, lengths, bound, name, reasons)
    for row in np.flatnonzero(lengths == 0).tolist():
        reasons.add(row, f"{name}is {'empty' if array[row].is_valid else 'null'}")
    return Lists(values, lengths)


def _all_within(items: pa.Array, bound: int) -> bool:
    least, largest = pc.min_max(items).as_py().values()
    return least is None or (least >= 0 and largest < bound)


def _marked(
    items: pa.Array, lengths: npt.NDArray[np.int64], bound: int, name: str, reasons: Reasons
) -> npt.NDArray[np.integer[Any]]:
    """The items with 0 for null, after the rows are noted that hold what is no token."""
    ids = pc.cast(items, pa.int64(), safe=False)  # an id past 2^63 turns negative, so it stays outside
    outside = pc.fill_null(pc.or_(pc.less(ids, 0), pc.greater_equal(ids, bound)), True)
    starts = np.cumsum(lengths) - lengths
    for at in np.flatnonzero(outside.to_numpy(zero_copy_only=False)).tolist():
        row = find_one(starts, at)
        item = items[at].as_py()
        what = "a null token" if item is None else f"token id {item}, outside 0 to {bound - 1}"
        reasons.add(row, f"{name}has {what}")
    values: npt.NDArray[np.integer[Any]] = pc.fill_null(ids, 0).to_numpy(zero_copy_only=False)
    return values


def _opened(lists: Lists, token: int | None) -> Lists:
    return _bounded(lists, token, at_end=False)


def _closed(lists: Lists, token: int | None) -> Lists:
    return _bounded(lists, token, at_end=True)


def _bounded(lists: Lists, token: int | None, *, at_end: bool) -> Lists:
    """The lists, each opened by a token unless it begins with it; `at_end`: closed unless it ends with it.

    It is learned as the one beside it is.
    """
    values, lengths = lists.values, lists.lengths
    if token is None or not len(values):
        return lists
    ends = np.cumsum(lengths)
    begins = ends - lengths
    borders, items = (ends, ends - 1) if at_end else (begins, begins)
    # Of an empty list it is another's item, or beyond them all.
    bare = (lengths > 0) & (values[items.clip(0, len(values) - 1)] != token)
    # Lists of bytes may be closed by an id that is none.
    longer = np.insert(values.astype(np.int64, copy=False), borders[bare], token)
    return Lists(longer, lengths + bare, lists.turns and _with_longer(*lists.turns, bare, at_end=at_end))


def _with_longer(
    turns: IntArray, num_turns: IntArray, longer: npt.NDArray[np.bool_], *, at_end: bool
) -> tuple[IntArray, IntArray]:
    """The turns of lists of which some are a token longer, in the first turn that has any, or `at_end` in the last one."""
    starts, turns = starts_of(num_turns), turns.copy()
    if at_end:
        own = starts[1:][longer] - 1
    else:
        own = starts[:-1][longer]
        own += turns[own] == 0
    turns[own] += 1
    return turns, num_turns
