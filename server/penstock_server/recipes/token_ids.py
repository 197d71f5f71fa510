"""Lists of token ids, one a row, with the ids that have loss; and pre-tokenized rows: checked, masked, opened and closed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.wire.names import IGNORED
from penstock_server.arrow import list_lengths
from penstock_server.order.arrays import IntArray, begins_run, concatenated_ranges, find, starts_of
from penstock_server.recipes.recipe import Rows
from penstock_server.recipes.tokenizer import Marks, Note


@dataclass(frozen=True, slots=True)
class Lists:
    """One list of ids per row, end to end: all values, and the length of each list.

    in_loss    whether each id has loss; None if all have
    documents  the document of each id, as any number that its neighbours in other documents do not have; None for one per row
    """

    values: npt.NDArray[np.integer[Any]]
    lengths: IntArray
    in_loss: Marks | None = None
    documents: IntArray | None = None

    @classmethod
    def joined(cls, parts: Sequence[Lists]) -> Lists:
        """Concatenate lists without documents; all or none of them say which ids have loss."""
        marks = [lists.in_loss for lists in parts if lists.in_loss is not None]
        values, lengths = (
            np.concatenate(arrays) for arrays in zip(*((part.values, part.lengths) for part in parts), strict=True)
        )
        return cls(values, lengths, np.concatenate(marks) if marks else None)

    def packed(self) -> list[bytes | None]:
        """Return values, lengths and marks as bytes, for `unpacked`; ids are below 2^32."""
        numbers = [array.astype("<u4").tobytes() for array in (self.values, self.lengths)]
        return [*numbers, None if self.in_loss is None else self.in_loss.tobytes()]

    @classmethod
    def unpacked(cls, values: bytes, lengths: bytes, marks: bytes | None) -> Lists:
        """Return the lists that `packed` describes."""
        in_loss = None if marks is None else np.frombuffer(marks, np.bool_)
        return cls(np.frombuffer(values, "<u4"), np.frombuffer(lengths, "<u4").astype(np.int64), in_loss)

    @property
    def turns(self) -> tuple[IntArray, IntArray]:
        """Return the lengths of runs of ids without and with loss, in turn, and their number in each row."""
        assert self.in_loss is not None
        turns, counts = self.runs(self.in_loss)
        opens = self.lengths > 0
        opens[opens] = self.in_loss[starts_of(self.lengths)[:-1][opens]]
        # The first turn never has loss: insert an empty turn before one that has.
        return np.insert(turns, starts_of(counts)[:-1][opens], 0), counts + opens

    def runs(self, values: npt.NDArray[Any]) -> tuple[IntArray, IntArray]:
        """Return the lengths of runs of equal values of ids, and their number in each row."""
        begins = begins_run(values)
        begins[starts_of(self.lengths)[:-1][self.lengths > 0]] = True
        return np.diff(np.flatnonzero(begins), append=len(values)), _counts(begins, self.lengths)

    def lacking(self, token: int | None, *, at_end: bool) -> Marks:
        """Return the lists that do not begin, or end, with a token; empty ones excepted."""
        ends, lacking = np.cumsum(self.lengths), self.lengths > 0
        lacking[lacking] = self.values[(ends - 1 if at_end else ends - self.lengths)[lacking]] != token
        return lacking

    def with_token(self, token: int | None, *, at_end: bool, lists: Marks | None = None, in_loss: Marks | None = None) -> Lists:
        """Append, or prepend, a token to these lists, by default all. Unless given, it has loss if the id beside it has."""
        if token is None or not len(self.values):
            return self
        lists = np.ones(len(self.lengths), np.bool_) if lists is None else lists
        ends = np.cumsum(self.lengths)
        places = (ends if at_end else ends - self.lengths)[lists]
        beside = (places - at_end).clip(0, len(self.values) - 1)
        marks, documents = self.in_loss, self.documents
        if marks is not None:
            marks = np.insert(marks, places, marks[beside] if in_loss is None else in_loss[lists])
        if documents is not None:
            documents = np.insert(documents, places, documents[beside])
        # The ids may fit into bytes while the token does not.
        values = np.insert(self.values.astype(np.int64, copy=False), places, token)
        return Lists(values, self.lengths + lists, marks, documents)


def prompted(prompts: Lists, answers: Lists) -> Lists:
    """Put each row's prompt, which has no loss, before its answer."""
    sizes = np.stack([prompts.lengths, answers.lengths], axis=1)
    starts = starts_of(sizes.reshape(-1))[:-1].reshape(sizes.shape)
    values, in_loss = np.empty(sizes.sum(), np.int64), np.zeros(sizes.sum(), np.bool_)
    values[concatenated_ranges(starts[:, 0], prompts.lengths)] = prompts.values
    in_answers = concatenated_ranges(starts[:, 1], answers.lengths)
    values[in_answers], in_loss[in_answers] = answers.values, True
    return Lists(values, sizes.sum(axis=1), in_loss)


def no_prompts(num_rows: int) -> Lists:
    """Return a prompt without ids for each row."""
    return Lists(np.zeros(0, np.int64), np.zeros(num_rows, np.int64))


def pretokenized(rows: Rows, bound: int) -> dict[str, Lists]:
    """Return the features of rows of ids, with the recipe's BOS and EOS added unless they begin and end with them.

    Ids outside [0, bound), null ids and lists without an id make a bad row.
    """
    recipe = rows.recipe
    # With a single list of ids, a message about a row needs no column name.
    notes = {role: rows.note_of("" if role == "tokens" else source.text) for role, source in recipe.fields}
    ids = {role: _stored(rows.values(source), notes[role]) for role, source in recipe.fields}
    if recipe.masks:
        ids["tokens"] = _masked(ids["tokens"], rows)
    for role, lists in ids.items():
        if len(lists.values) and (lists.values.min() < 0 or lists.values.max() >= bound):
            for row, at in _first_marked((lists.values < 0) | (lists.values >= bound), lists.lengths):
                notes[role](row, f"has token id {lists.values[at]}, outside 0 to {bound - 1}")
        if role in ("tokens", "prompt") or "prompt" not in ids:
            ids[role] = lists = _completed(lists, recipe.bos_id, at_end=False)
        if role != "prompt":
            ids[role] = _completed(lists, recipe.eos_id, at_end=True)
    if "tokens" in ids:
        return ids
    prompts = ids.pop("prompt", no_prompts(len(rows)))
    return {feature: prompted(prompts, answer) for feature, answer in zip(recipe.features, ids.values(), strict=True)}


def _completed(lists: Lists, token: int | None, *, at_end: bool) -> Lists:
    return lists.with_token(token, at_end=at_end, lists=lists.lacking(token, at_end=at_end))


def _stored(array: pa.Array, note: Note) -> Lists:
    """Return lists of ids as they are, 0 for null."""
    # A null in fixed-size lists still has items; flattening drops them.
    lengths = list_lengths(array)
    items = _without_nulls(array.flatten(), lengths, "has a null token", note)
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


def _masked(ids: Lists, rows: Rows) -> Lists:
    """Remove padding from rows of ids; add the ids with loss and the documents, if masks tell them.

    The first id of a document does not follow from the document before it, so it has no loss. The first id of a row may have
    loss, as in rows of one document.
    A row is bad if a mask does not fit it, if nothing of it is left, or if no id has loss.
    """
    notes = {role: rows.note_of(source.text) for role, source in rows.recipe.masks}
    columns = {role: rows.values(source) for role, source in rows.recipe.masks}
    documents = in_loss = None
    if note := notes.get("seq_lengths"):
        documents = _by_lengths(columns.pop("seq_lengths"), ids.lengths, note)
    values = {role: _of_ids(column, ids.lengths, notes[role]) for role, column in columns.items()}
    attended = np.ones(len(ids.values), np.bool_)
    if note := notes.get("attention_mask"):
        attended = _ones(values["attention_mask"], ids.lengths, note)
        _note_rows_without(attended, ids.lengths, note, "is 0 throughout: it is padding alone")
    if note := notes.get("labels"):
        in_loss = (values["labels"] != IGNORED) & attended
        for row, at in _first_marked(in_loss & (values["labels"] != ids.values), ids.lengths):
            label = f"has {values['labels'][at]} at id {ids.values[at]}"
            note(row, f"{label}; a label must be the id itself, not the next one, or {IGNORED}")
        _note_rows_without(in_loss, ids.lengths, note, f"is {IGNORED} throughout: no token has loss")
    elif note := notes.get("loss_mask"):
        in_loss = _ones(values["loss_mask"], ids.lengths, note) & attended
        _note_rows_without(in_loss, ids.lengths, note, "is 0 throughout: no token has loss")
    lengths = _counts(attended, ids.lengths)
    in_loss = None if in_loss is None else in_loss[attended]
    if note := notes.get("position_ids"):
        documents = _by_positions(values["position_ids"][attended], lengths, note)
    elif documents is not None:
        documents = documents[attended]
    if documents is not None:
        is_next = ~begins_run(documents)
        is_next[starts_of(lengths)[:-1][lengths > 0]] = True
        in_loss = is_next if in_loss is None else in_loss & is_next
    return Lists(ids.values[attended], lengths, in_loss, documents)


def _by_lengths(array: pa.Array, lengths: IntArray, note: Note) -> IntArray:
    """Return the number of each id's document, counted through all rows; 0 in a bad row."""
    counts, items = list_lengths(array), array.flatten()
    sizes = pc.fill_null(items, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    totals = np.diff(starts_of(sizes)[starts_of(counts)])
    is_good = totals == lengths
    for row in np.flatnonzero(~is_good).tolist():
        note(row, f"adds up to {totals[row]:,} for {lengths[row]:,} ids" if array[row].is_valid else "is null")
    for row, at in _first_marked(sizes < 0, counts):
        note(row, f"has {sizes[at]}" if items[at].is_valid else "has a null")
        is_good[row] = False
    documents, sizes = np.zeros(int(lengths.sum()), np.int64), sizes[np.repeat(is_good, counts)]
    documents[np.repeat(is_good, lengths)] = np.repeat(np.arange(len(sizes)), sizes)
    return documents


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
    fits = counts == lengths
    for row in np.flatnonzero(~fits).tolist():
        note(row, f"has {counts[row]:,} values for {lengths[row]:,} ids" if array[row].is_valid else "is null")
    values = _without_nulls(array.flatten(), counts, "has a null", note).to_numpy(zero_copy_only=False)
    fitted = np.zeros(int(lengths.sum()), values.dtype)
    fitted[np.repeat(fits, lengths)] = values[np.repeat(fits, counts)]
    return fitted


def _ones(values: npt.NDArray[Any], lengths: IntArray, note: Note) -> Marks:
    """Return the ids with 1 in a mask of 0 and 1; a row with any other value is bad."""
    marks: Marks = values == 1
    for row, at in _first_marked(~marks & (values != 0), lengths):
        note(row, f"has {values[at]} instead of 0 or 1")
    return marks


def _note_rows_without(marks: Marks, lengths: IntArray, note: Note, reason: str) -> None:
    for row in np.flatnonzero(_counts(marks, lengths) == 0).tolist():
        note(row, reason)


def _counts(marks: Marks, lengths: IntArray) -> IntArray:
    """Count the marked ids of each row."""
    ends = np.append(0, np.cumsum(marks, dtype=np.int64))
    counts: IntArray = np.diff(ends[starts_of(lengths)])
    return counts


def _first_marked(marks: Marks, lengths: IntArray) -> Iterator[tuple[int, int]]:
    """Yield for each list with a marked id: (its number, index of its first marked id among all ids)."""
    at = np.flatnonzero(marks)
    rows = find(starts_of(lengths), at)
    first = begins_run(rows)
    yield from zip(rows[first].tolist(), at[first].tolist(), strict=True)
