"""Masks of pre-tokenized rows, applied: padding is left out, and what is learned becomes turns. `mask_columns` finds them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.batch import IGNORED
from penstock_server.arrow import list_lengths
from penstock_server.geometry.arrays import IntArray, starts_of
from penstock_server.recipes.rows import Rows
from penstock_server.recipes.tokenizer import Note
from penstock_server.recipes.turns import Lists, first_marked, learned_where

_Marks = npt.NDArray[np.bool_]


def masked(ids: Lists, rows: Rows) -> Lists:
    """Rows of ids without their padding, with turns where a mask tells which ids are learned.

    A row is bad if a mask does not fit it, or if nothing of it is left or learned.
    """
    notes = {role: partial(rows.note, of=source.text) for role, source in rows.recipe.masks}
    values = {role: _of_ids(rows.values(source), ids.lengths, notes[role]) for role, source in rows.recipe.masks}
    attended, learned = np.ones(len(ids.values), np.bool_), None
    if note := notes.get("attention_mask"):
        attended = _ones(values["attention_mask"], ids.lengths, note)
        _note_rows_without(attended, ids.lengths, note, "is 0 throughout: it is padding alone")
    if note := notes.get("labels"):
        learned = _labelled(values["labels"], ids, attended, note)
        _note_rows_without(learned, ids.lengths, note, f"is {IGNORED} throughout: nothing is learned")
    elif note := notes.get("loss_mask"):
        learned = _ones(values["loss_mask"], ids.lengths, note) & attended
        _note_rows_without(learned, ids.lengths, note, "is 0 throughout: nothing is learned")
    if not attended.all():
        ids = Lists(ids.values[attended], _counts(attended, ids.lengths))
        learned = None if learned is None else learned[attended]
    return ids if learned is None else learned_where(ids, learned)


def _of_ids(array: pa.Array, lengths: IntArray, note: Note) -> npt.NDArray[Any]:
    """The value of each id, in rows of these lengths; 0 where there is none, and the row is bad."""
    own = list_lengths(array)
    fitting = own == lengths
    for row in np.flatnonzero(~fitting).tolist():
        told = f"has {own[row]:,} values for {lengths[row]:,} ids" if array[row].is_valid else "is null"
        note(row, told)
    items = array.flatten()
    if items.null_count:
        nulls = items.is_null().to_numpy(zero_copy_only=False)
        for row, _ in first_marked(nulls, own):
            note(row, "has a null")
        items = pc.fill_null(items, False if pa.types.is_boolean(items.type) else 0)
    values: npt.NDArray[Any] = items.to_numpy(zero_copy_only=False)
    if fitting.all():
        return values
    found = np.zeros(int(lengths.sum()), values.dtype)
    found[np.repeat(fitting, lengths)] = values[np.repeat(fitting, own)]
    return found


def _ones(values: npt.NDArray[Any], lengths: IntArray, note: Note) -> _Marks:
    """Where a mask of 0 and 1 is 1; a row with anything else is bad."""
    marks: _Marks = values == 1
    for row, at in first_marked(~marks & (values != 0), lengths):
        note(row, f"has {values[at]} where 0 or 1 is meant")
    return marks


def _labelled(labels: npt.NDArray[Any], ids: Lists, attended: _Marks, note: Note) -> _Marks:
    """Where labels say that an id is learned; a row with labels that are no ids of it is bad."""
    marks: _Marks = (labels != IGNORED) & attended
    for row, at in first_marked(marks & (labels != ids.values), ids.lengths):
        told = f"has {labels[at]} at id {ids.values[at]}"
        note(row, f"{told}; a label must be the id itself, not the next one, or {IGNORED}")
    return marks


def _note_rows_without(marks: _Marks, lengths: IntArray, note: Note, reason: str) -> None:
    for row in np.flatnonzero(_counts(marks, lengths) == 0).tolist():
        note(row, reason)


def _counts(marks: _Marks, lengths: IntArray) -> IntArray:
    """How many ids of each row are marked."""
    found, some = np.zeros(len(lengths), np.int64), lengths > 0
    if some.any():
        found[some] = np.add.reduceat(marks, starts_of(lengths)[:-1][some], dtype=np.int64)
    return found
