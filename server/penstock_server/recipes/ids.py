"""Pre-tokenized rows: lists of token ids as they are stored, checked, opened and closed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock_server.geometry.arrays import find_one
from penstock_server.recipes.rows import Reasons
from penstock_server.recipes.turns import Lists


def checked_ids(array: pa.Array, bound: int, bos_id: int | None, eos_id: int | None, reasons: Reasons) -> Lists:
    """Lists of token ids as they are, opened and closed by these tokens unless they begin and end with them.

    Ids outside [0, bound), null ids and lists without an id make a bad row.
    """
    # Flattening drops the items of null lists, which fixed-size lists keep after their nulls.
    lengths = pc.fill_null(pc.cast(pc.list_value_length(array), pa.int64()), 0).to_numpy(zero_copy_only=False)
    items = array.flatten()
    sound = not items.null_count and _all_within(items, bound)
    values = items.to_numpy() if sound else _marked(items, lengths, bound, reasons)
    for row in np.flatnonzero(lengths == 0).tolist():
        reasons[row] = "is empty" if array[row].is_valid else "is null"
    opened = _bounded(Lists(values, lengths), bos_id, at_end=False)
    return _bounded(opened, eos_id, at_end=True)


def _all_within(items: pa.Array, bound: int) -> bool:
    least, largest = pc.min_max(items).as_py().values()
    return least is None or (least >= 0 and largest < bound)


def _marked(items: pa.Array, lengths: npt.NDArray[np.int64], bound: int, reasons: Reasons) -> npt.NDArray[np.integer[Any]]:
    """The items with 0 for null, after the rows are noted that hold what is no token."""
    ids = pc.cast(items, pa.int64(), safe=False)  # an id past 2^63 turns negative, so it stays outside
    outside = pc.fill_null(pc.or_(pc.less(ids, 0), pc.greater_equal(ids, bound)), True)
    starts = np.cumsum(lengths) - lengths
    for at in np.flatnonzero(outside.to_numpy(zero_copy_only=False)).tolist():
        row = find_one(starts, at)
        item = items[at].as_py()
        what = "a null token" if item is None else f"token id {item}, outside 0 to {bound - 1}"
        reasons.add(row, f"has {what}")
    values: npt.NDArray[np.integer[Any]] = pc.fill_null(ids, 0).to_numpy(zero_copy_only=False)
    return values


def _bounded(lists: Lists, token: int | None, *, at_end: bool) -> Lists:
    """The lists, each opened by a token unless it begins with it; `at_end`: closed unless it ends with it."""
    values, lengths = lists.values, lists.lengths
    if token is None or not len(values):
        return lists
    ends = np.cumsum(lengths)
    begins = ends - lengths
    borders, items = (ends, ends - 1) if at_end else (begins, begins)
    # Of an empty list it is another's item, or beyond them all.
    bare = (lengths > 0) & (values[items.clip(0, len(values) - 1)] != token)
    # Lists of bytes may be closed by an id that is none.
    return Lists(np.insert(values.astype(np.int64, copy=False), borders[bare], token), lengths + bare)
