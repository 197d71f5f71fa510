"""Masks of pre-tokenized rows, applied: padding is left out, and what is learned becomes turns. `mask_columns` finds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.batch import IGNORED
from penstock_server.geometry.arrays import IntArray, starts_of
from penstock_server.recipes.mask_columns import Masks
from penstock_server.recipes.rows import Reasons, list_lengths
from penstock_server.recipes.turns import Lists, first_marked, learned_where

_Marks = npt.NDArray[np.bool_]


def masked(ids: Lists, masks: Masks, rows: pa.RecordBatch, reasons: Reasons) -> Lists:
    """Rows of ids without their padding, with turns where a mask tells which ids are learned.

    A row is bad if a mask does not fit it, or if nothing of it is left or learned.
    """
    names = {role: source.text for role, source in masks}
    values = {role: _of_ids(source.array(rows), ids.lengths, source.text, reasons) for role, source in masks}
    attended, learned = np.ones(len(ids.values), np.bool_), None
    if name := names.get("attention_mask"):
        attended = _ones(values["attention_mask"], name, ids.lengths, reasons)
        _note_rows_without(attended, ids.lengths, reasons, f"{name} is 0 throughout: it is padding alone")
    if name := names.get("labels"):
        learned = _labelled(values["labels"], ids, attended, name, reasons)
        _note_rows_without(learned, ids.lengths, reasons, f"{name} is {IGNORED} throughout: nothing is learned")
    elif name := names.get("loss_mask"):
        learned = _ones(values["loss_mask"], name, ids.lengths, reasons) & attended
        _note_rows_without(learned, ids.lengths, reasons, f"{name} is 0 throughout: nothing is learned")
    if not attended.all():
        ids = Lists(ids.values[attended], _counts(attended, ids.lengths))
        learned = None if learned is None else learned[attended]
    return ids if learned is None else learned_where(ids, learned)


def _of_ids(array: pa.Array, lengths: IntArray, name: str, reasons: Reasons) -> npt.NDArray[Any]:
    """The value of each id, in rows of these lengths; 0 where there is none, and the row is bad."""
    own = list_lengths(array)
    fitting = own == lengths
    for row in np.flatnonzero(~fitting).tolist():
        told = f"has {own[row]:,} values for {lengths[row]:,} ids" if array[row].is_valid else "is null"
        reasons.add(row, f"{name} {told}")
    items = array.flatten()
    if items.null_count:
        nulls = items.is_null().to_numpy(zero_copy_only=False)
        for row, _ in first_marked(nulls, own):
            reasons.add(row, f"{name} has a null")
        items = pc.fill_null(items, False if pa.types.is_boolean(items.type) else 0)
    values: npt.NDArray[Any] = items.to_numpy(zero_copy_only=False)
    if fitting.all():
        return values
    found = np.zeros(int(lengths.sum()), values.dtype)
    found[np.repeat(fitting, lengths)] = values[np.repeat(fitting, own)]
    return found


def _ones(values: npt.NDArray[Any], name: str, lengths: IntArray, reasons: Reasons) -> _Marks:
    """Where a mask of 0 and 1 is 1; a row with anything else is bad."""
    marks: _Marks = values == 1
    for row, at in first_marked(~marks & (values != 0), lengths):
        reasons.add(row, f"{name} has {values[at]} where 0 or 1 is meant")
    return marks


def _labelled(labels: npt.NDArray[Any], ids: Lists, attended: _Marks, name: str, reasons: Reasons) -> _Marks:
    """Where labels say that an id is learned; a row with labels that are no ids of it is bad."""
    marks: _Marks = (labels != IGNORED) & attended
    for row, at in first_marked(marks & (labels != ids.values), ids.lengths):
        told = f"{name} has {labels[at]} at id {ids.values[at]}"
        reasons.add(row, f"{told}; a label must be the id itself, not the next one, or {IGNORED}")
    return marks


def _note_rows_without(marks: _Marks, lengths: IntArray, reasons: Reasons, reason: str) -> None:
    for row in np.flatnonzero(_counts(marks, lengths) == 0).tolist():
        reasons.add(row, reason)


def _counts(marks: _Marks, lengths: IntArray) -> IntArray:
    """How many ids of each row are marked."""
    found, some = np.zeros(len(lengths), np.int64), lengths > 0
    if some.any():
        found[some] = np.add.reduceat(marks, starts_of(lengths)[:-1][some], dtype=np.int64)
    return found
