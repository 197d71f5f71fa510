"""Lists of token ids, one a row, with their turns and documents; and pre-tokenized rows: checked, masked, opened and closed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.wire.names import IGNORED
from penstock_server.arrow import list_lengths
from penstock_server.order.arrays import IntArray, begins_run, concatenated_ranges, find, starts_of
from penstock_server.recipes.recipe import Rows
from penstock_server.recipes.tokenizer import Note

_Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Lists:
    """One list per row, end to end: all values, and the length of each list; likewise the lengths of its turns, if it has any.

    Turns are runs of tokens, the first without loss, the second with loss, and so on: prompt, response, prompt, ...
    `documents` are the lengths of the documents in each row, in the form of `turns`; None where each row is one document.
    """

    values: npt.NDArray[np.integer[Any]]
    lengths: npt.NDArray[np.int64]
    turns: tuple[IntArray, IntArray] | None = None
    documents: tuple[IntArray, IntArray] | None = None


def repeated(ids: list[int], num_rows: int) -> Lists:
    """Return the same ids for every row."""
    return Lists(np.tile(np.array(ids, np.int64), num_rows), np.full(num_rows, len(ids)))


def joined(features: Sequence[Lists]) -> Lists:
    """Concatenate the ids of each row's features."""
    features = [feature for feature in features if len(feature.values)] or features[:1]
    if len(features) == 1:
        return features[0]
    sizes = np.stack([feature.lengths for feature in features], axis=1)
    starts = starts_of(sizes.reshape(-1))[:-1].reshape(sizes.shape)
    values = np.empty(sizes.sum(), np.int64)
    for number, feature in enumerate(features):
        values[concatenated_ranges(starts[:, number], feature.lengths)] = feature.values
    return Lists(values, sizes.sum(axis=1))


def with_turns(turns: Sequence[Lists]) -> Lists:
    """Concatenate the ids of each row's turns, and keep the lengths of the turns."""
    lists = joined(turns)
    lengths = np.stack([turn.lengths for turn in turns], axis=1)
    return Lists(lists.values, lists.lengths, (lengths.reshape(-1), np.full(len(lengths), len(turns))))


def pretokenized(rows: Rows, bound: int) -> dict[str, Lists]:
    """Return the features of rows of ids, with the recipe's BOS and EOS added unless they begin and end with them.

    Ids outside [0, bound), null ids and lists without an id make a bad row.
    """
    recipe = rows.recipe
    # With a single list of ids, a message about a row needs no column name.
    notes = {role: partial(rows.note, of="" if role == "tokens" else source.text) for role, source in recipe.fields}
    ids = {role: _stored(rows.values(source), notes[role]) for role, source in recipe.fields}
    if recipe.masks:
        ids["tokens"] = _masked(ids["tokens"], rows)
    for role, lists in ids.items():
        if len(lists.values) and (lists.values.min() < 0 or lists.values.max() >= bound):
            for row, at in _first_marked((lists.values < 0) | (lists.values >= bound), lists.lengths):
                notes[role](row, f"has token id {lists.values[at]}, outside 0 to {bound - 1}")
    if "tokens" in ids:
        return {"tokens": _closed(_opened(ids["tokens"], recipe.bos_id), recipe.eos_id)}
    for role in ["prompt"] if "prompt" in ids else list(ids):
        ids[role] = _opened(ids[role], recipe.bos_id)
    prompts = ids.pop("prompt", repeated([], len(rows)))
    answers = zip(recipe.features, ids.values(), strict=True)
    return {feature: with_turns([prompts, _closed(answer, recipe.eos_id)]) for feature, answer in answers}


def _stored(array: pa.Array, note: Note) -> Lists:
    """Return lists of ids as they are, 0 for null."""
    # A null in fixed-size lists still has items; flattening drops them.
    lengths, items = list_lengths(array), array.flatten()
    items = _without_nulls(items, lengths, "has a null token", note)
    for row in np.flatnonzero(lengths == 0).tolist():
        note(row, f"is {'empty' if array[row].is_valid else 'null'}")
    return Lists(items.to_numpy(), lengths)


def _without_nulls(items: pa.Array, lengths: IntArray, reason: str, note: Note) -> pa.Array:
    """Replace nulls by 0; a row that has one is bad."""
    if not items.null_count:
        return items
    for row, _ in _first_marked(items.is_null().to_numpy(zero_copy_only=False), lengths):
        note(row, reason)
    return pc.fill_null(items, False if pa.types.is_boolean(items.type) else 0)


def _opened(lists: Lists, token: int | None) -> Lists:
    """Prepend a token to each list that does not begin with it. It has loss if the first id has."""
    if token is None or not len(lists.values):
        return lists
    begins = np.cumsum(lists.lengths) - lists.lengths
    # An empty list has no item: the value read in its place is another list's, or clipped, and is ignored.
    bare = (lists.lengths > 0) & (lists.values[begins.clip(0, len(lists.values) - 1)] != token)
    return _longer(lists, begins[bare], token, bare, at_end=False)


def _closed(lists: Lists, token: int | None) -> Lists:
    """Append a token to each list that does not end with it. It has loss if the last id has."""
    if token is None or not len(lists.values):
        return lists
    ends = np.cumsum(lists.lengths)
    bare = (lists.lengths > 0) & (lists.values[ends - 1] != token)
    return _longer(lists, ends[bare], token, bare, at_end=True)


def _longer(lists: Lists, places: IntArray, token: int, bare: _Marks, *, at_end: bool) -> Lists:
    """Insert a token at one place of each list in `bare`, and lengthen its first or last turn and document."""

    def lengthened(parts: tuple[IntArray, IntArray] | None) -> tuple[IntArray, IntArray] | None:
        if parts is None:
            return None
        sizes, counts = parts[0].copy(), parts[1]
        starts = starts_of(counts)
        part = starts[1:][bare] - 1 if at_end else starts[:-1][bare]
        if not at_end:
            part += sizes[part] == 0  # the first part that is not empty
        sizes[part] += 1
        return sizes, counts

    # The ids may fit into bytes while the token does not.
    values = np.insert(lists.values.astype(np.int64, copy=False), places, token)
    return Lists(values, lists.lengths + bare, lengthened(lists.turns), lengthened(lists.documents))


def _masked(ids: Lists, rows: Rows) -> Lists:
    """Remove padding from rows of ids; add turns if a mask selects the ids with loss, and the documents.

    The first id of a document does not follow from the document before it, so it has no loss. The first id of a row may have
    loss, as in rows of one document.
    A row is bad if a mask does not fit it, if nothing of it is left, or if no id has loss.
    """
    notes = {role: partial(rows.note, of=source.text) for role, source in rows.recipe.masks}
    columns = {role: rows.values(source) for role, source in rows.recipe.masks}
    documents = None  # the document number of each id
    if note := notes.get("seq_lengths"):
        documents = _by_lengths(columns.pop("seq_lengths"), ids.lengths, note)
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
        documents = _by_positions(values["position_ids"][attended], ids.lengths, note)
    elif documents is not None:
        documents = documents[attended]
    if documents is not None:
        begins = begins_run(documents)
        ids = replace(ids, documents=(np.diff(np.flatnonzero(begins), append=len(begins)), _counts(begins, ids.lengths)))
        begins[starts_of(ids.lengths)[:-1][ids.lengths > 0]] = False
        in_loss = ~begins if in_loss is None else in_loss & ~begins
    return ids if in_loss is None else _with_loss(ids, in_loss)


def _with_loss(lists: Lists, in_loss: _Marks) -> Lists:
    """Return the lists with turns that follow from a mask of their ids."""
    offsets = starts_of(lists.lengths)
    begins = np.zeros(len(in_loss) + 1, np.bool_)
    begins[1:-1] = in_loss[1:] != in_loss[:-1]
    begins[offsets] = True
    starts = np.flatnonzero(begins[:-1])
    first = np.searchsorted(starts, offsets)  # the first turn of each list, then the number of turns
    opens = np.zeros(len(lists.lengths), np.bool_)
    has_ids = lists.lengths > 0
    opens[has_ids] = in_loss[offsets[:-1][has_ids]]
    # The first turn never has loss: insert an empty turn before one that has.
    turns: IntArray = np.insert(np.diff(starts, append=len(in_loss)), first[:-1][opens], 0)
    return replace(lists, turns=(turns, np.diff(first) + opens))


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
    for row, at in _first_marked(sizes < 0, counts):
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
    for row, at in _first_marked(~begins & (is_first | (positions != np.roll(positions, 1) + 1)), lengths):
        before = "at the first id" if is_first[at] else f"after {positions[at - 1]}"
        note(row, f"has {positions[at]} {before}; positions in a document are 0, 1, 2 and so on")
    return np.cumsum(begins | is_first)


def _of_ids(array: pa.Array, lengths: IntArray, note: Note) -> npt.NDArray[Any]:
    """Return the mask value of each id, in rows of these lengths. A row with missing values is bad and has 0."""
    counts = list_lengths(array)
    fitting = counts == lengths
    for row in np.flatnonzero(~fitting).tolist():
        note(row, f"has {counts[row]:,} values for {lengths[row]:,} ids" if array[row].is_valid else "is null")
    items = _without_nulls(array.flatten(), counts, "has a null", note)
    values: npt.NDArray[Any] = items.to_numpy(zero_copy_only=False)
    if fitting.all():
        return values
    fitted = np.zeros(int(lengths.sum()), values.dtype)
    fitted[np.repeat(fitting, lengths)] = values[np.repeat(fitting, counts)]
    return fitted


def _ones(values: npt.NDArray[Any], lengths: IntArray, note: Note) -> _Marks:
    """Return the ids with 1 in a mask of 0 and 1; a row with any other value is bad."""
    marks: _Marks = values == 1
    for row, at in _first_marked(~marks & (values != 0), lengths):
        note(row, f"has {values[at]} instead of 0 or 1")
    return marks


def _labelled(labels: npt.NDArray[Any], ids: Lists, attended: _Marks, note: Note) -> _Marks:
    """Return the ids with loss by their labels; a row with a label that differs from its id is bad."""
    marks: _Marks = (labels != IGNORED) & attended
    for row, at in _first_marked(marks & (labels != ids.values), ids.lengths):
        note(row, f"has {labels[at]} at id {ids.values[at]}; a label must be the id itself, not the next one, or {IGNORED}")
    return marks


def _note_rows_without(marks: _Marks, lengths: IntArray, note: Note, reason: str) -> None:
    for row in np.flatnonzero(_counts(marks, lengths) == 0).tolist():
        note(row, reason)


def _counts(marks: _Marks, lengths: IntArray) -> IntArray:
    """Count the marked ids of each row."""
    ends = np.append(0, np.cumsum(marks, dtype=np.int64))
    counts: IntArray = np.diff(ends[starts_of(lengths)])
    return counts


def _first_marked(marks: _Marks, lengths: IntArray) -> Iterator[tuple[int, int]]:
    """Yield for each list with a marked id: (its number, index of its first marked id among all ids)."""
    at = np.flatnonzero(marks)
    rows = find(starts_of(lengths), at)
    first = begins_run(rows)
    yield from zip(rows[first].tolist(), at[first].tolist(), strict=True)
