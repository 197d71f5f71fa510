"""Application of the masks of pre-tokenized rows. `mask_columns` finds them.

Padding is removed, ids with loss become turns, and documents packed into a row are separated.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.batch import IGNORED
from penstock_server.arrow import list_lengths
from penstock_server.order.arrays import IntArray, begins_run, starts_of
from penstock_server.recipes.rows import Rows
from penstock_server.recipes.tokenizer import Note
from penstock_server.recipes.turns import Lists, first_marked, turns_where

_Marks = npt.NDArray[np.bool_]


def masked(ids: Lists, rows: Rows) -> Lists:
    """Remove padding from rows of ids; add turns if a mask selects the ids with loss, and the documents.

    The first id of a document does not follow from the document before it, so it has no loss. The first id of a row may have
    loss, as in rows of one document.
    A row is bad if a mask does not fit it, if nothing of it is left, or if no id has loss.
    """
    notes = {role: partial(rows.note, of=source.text) for role, source in rows.recipe.masks}
    columns = {role: rows.values(source) for role, source in rows.recipe.masks}
    numbers = None
    if note := notes.get("seq_lengths"):
        numbers = _by_lengths(columns.pop("seq_lengths"), ids.lengths, note)
    values = {role: _of_ids(column, ids.lengths, notes[role]) for role, column in columns.items()}
    attended, in_loss = np.ones(len(ids.values), np.bool_), None
    if note := notes.get("attention_mask"):
        attended = _ones(values["attention_mask"], ids.lengths, note)
        _note_rows_without(attended, ids.lengths, note, "is 0 throughout: it is padding alone")
    if note := notes.get("labels"):
        in_loss = _labelled(values["labels"], ids, attended, note)
        _note_rows_without(in_loss, ids.lengths, note, f"is {IGNORED} throughout: no token has loss")
    elif note := notes.get("loss_mask"):
        in_loss = _ones(values["loss_mask"], ids.lengths, note) & attended
        _note_rows_without(in_loss, ids.lengths, note, "is 0 throughout: no token has loss")
    if not attended.all():
        ids = Lists(ids.values[attended], _counts(attended, ids.lengths))
        in_loss = None if in_loss is None else in_loss[attended]
    if note := notes.get("position_ids"):
        numbers = _by_positions(values["position_ids"][attended], ids.lengths, note)
    elif numbers is not None:
        numbers = numbers[attended]
    if numbers is not None:
        begins = begins_run(numbers)
        ids = replace(ids, documents=(np.diff(np.flatnonzero(begins), append=len(begins)), _counts(begins, ids.lengths)))
        begins[starts_of(ids.lengths)[:-1][ids.lengths > 0]] = False
        in_loss = ~begins if in_loss is None else in_loss & ~begins
    return ids if in_loss is None else turns_where(ids, in_loss)


def _by_lengths(array: pa.Array, lengths: IntArray, note: Note) -> IntArray:
    """Return the document number of each id, counted through all rows; a bad row is one document."""
    counts = list_lengths(array)
    items = array.flatten()
    sizes = pc.fill_null(items, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    totals = np.add.reduceat(np.append(sizes, 0), starts_of(counts)[:-1]) if len(counts) else counts
    totals = np.where(counts > 0, totals, 0)
    is_bad = totals != lengths
    for row in np.flatnonzero(is_bad).tolist():
        note(row, f"adds up to {totals[row]:,} for {lengths[row]:,} ids" if array[row].is_valid else "is null")
    for row, at in first_marked(sizes < 0, counts):
        note(row, f"has {sizes[at]}" if items[at].is_valid else "has a null")
        is_bad[row] = True
    rows = np.repeat(np.arange(len(counts)), counts)
    kept = ~is_bad[rows]
    of_rows, sizes = np.append(rows[kept], np.flatnonzero(is_bad)), np.append(sizes[kept], lengths[is_bad])
    order = np.argsort(of_rows, kind="stable")
    return np.repeat(np.arange(len(order)), sizes[order])


def _by_positions(positions: npt.NDArray[Any], lengths: IntArray, note: Note) -> IntArray:
    """Return the same from the position of each id in its document: position 0 begins a document."""
    is_first = np.zeros(len(positions), np.bool_)
    is_first[starts_of(lengths)[:-1][lengths > 0]] = True
    begins = positions == 0
    for row, at in first_marked(~begins & (is_first | (positions != np.roll(positions, 1) + 1)), lengths):
        before = "at the first id" if is_first[at] else f"after {positions[at - 1]}"
        note(row, f"has {positions[at]} {before}; positions in a document are 0, 1, 2 and so on")
    return np.cumsum(begins | is_first)


def _of_ids(array: pa.Array, lengths: IntArray, note: Note) -> npt.NDArray[Any]:
    """Return the mask value of each id, in rows of these lengths. A row with missing values is bad and has 0."""
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
    """Return the ids with 1 in a mask of 0 and 1; a row with any other value is bad."""
    marks: _Marks = values == 1
    for row, at in first_marked(~marks & (values != 0), lengths):
        note(row, f"has {values[at]} where 0 or 1 is meant")
    return marks


def _labelled(labels: npt.NDArray[Any], ids: Lists, attended: _Marks, note: Note) -> _Marks:
    """Return the ids with loss by their labels; a row with a label that differs from its id is bad."""
    marks: _Marks = (labels != IGNORED) & attended
    for row, at in first_marked(marks & (labels != ids.values), ids.lengths):
        told = f"has {labels[at]} at id {ids.values[at]}"
        note(row, f"{told}; a label must be the id itself, not the next one, or {IGNORED}")
    return marks


def _note_rows_without(marks: _Marks, lengths: IntArray, note: Note, reason: str) -> None:
    for row in np.flatnonzero(_counts(marks, lengths) == 0).tolist():
        note(row, reason)


def _counts(marks: _Marks, lengths: IntArray) -> IntArray:
    """Count the marked ids of each row."""
    found, some = np.zeros(len(lengths), np.int64), lengths > 0
    if some.any():
        found[some] = np.add.reduceat(marks, starts_of(lengths)[:-1][some], dtype=np.int64)
    return found
