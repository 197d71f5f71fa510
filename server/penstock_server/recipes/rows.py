"""What is made of a block's rows: lists of numbers, why rows are bad; and the columns that need no tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock_server.geometry.arrays import find_one
from penstock_server.recipes.column_types import is_bytes


@dataclass(frozen=True, slots=True)
class Lists:
    """A list a row, end to end: all values, and how many are each row's; the same of the lengths of its turns, if it has any.

    Turns are runs of tokens that are not learned and that are, in turn: prompt, response, prompt, ...
    """

    values: npt.NDArray[np.integer[Any]]
    lengths: npt.NDArray[np.int64]
    turns: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None


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
