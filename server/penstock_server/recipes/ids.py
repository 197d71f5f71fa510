"""Pre-tokenized rows: lists of token ids as they are stored, checked, opened and closed."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock_server.arrow import list_lengths
from penstock_server.order.arrays import IntArray, starts_of
from penstock_server.recipes.masks import masked
from penstock_server.recipes.rows import Rows
from penstock_server.recipes.tokenizer import Note
from penstock_server.recipes.turns import Lists, every, first_marked, with_turns


def pretokenized(rows: Rows, bound: int) -> dict[str, Lists]:
    """Return the features of rows of ids, with the recipe's BOS and EOS added unless they begin and end with them.

    Ids outside [0, bound), null ids and lists without an id make a bad row.
    """
    recipe = rows.recipe
    # With a single list of ids, a message about a row needs no column name.
    notes = {role: partial(rows.note, of="" if role == "tokens" else source.text) for role, source in recipe.fields}
    ids = {role: _stored(rows.values(source), notes[role]) for role, source in recipe.fields}
    if recipe.masks:
        ids["tokens"] = masked(ids["tokens"], rows)
    for role, lists in ids.items():
        _note_outside(lists, bound, notes[role])
    if "tokens" in ids:
        return {"tokens": _closed(_opened(ids["tokens"], recipe.bos_id), recipe.eos_id)}
    first = ["prompt"] if "prompt" in ids else [*ids]
    ids |= {role: _opened(ids[role], recipe.bos_id) for role in first}
    prompts = ids.pop("prompt", every([], len(rows)))
    answers = zip(recipe.features, ids.values(), strict=True)
    return {feature: with_turns([prompts, _closed(own, recipe.eos_id)]) for feature, own in answers}


def _stored(array: pa.Array, note: Note) -> Lists:
    """Return lists of ids as they are, 0 for null."""
    # A null in fixed-size lists still has items; flattening drops them.
    lengths, items = list_lengths(array), array.flatten()
    if items.null_count:
        for row, _ in first_marked(items.is_null().to_numpy(zero_copy_only=False), lengths):
            note(row, "has a null token")
        items = pc.fill_null(items, 0)
    for row in np.flatnonzero(lengths == 0).tolist():
        note(row, f"is {'empty' if array[row].is_valid else 'null'}")
    return Lists(items.to_numpy(), lengths)


def _note_outside(lists: Lists, bound: int, note: Note) -> None:
    ids = lists.values
    if len(ids) and (ids.min() < 0 or ids.max() >= bound):
        for row, at in first_marked((ids < 0) | (ids >= bound), lists.lengths):
            note(row, f"has token id {ids[at]}, outside 0 to {bound - 1}")


def _opened(lists: Lists, token: int | None) -> Lists:
    return _bounded(lists, token, at_end=False)


def _closed(lists: Lists, token: int | None) -> Lists:
    return _bounded(lists, token, at_end=True)


def _bounded(lists: Lists, token: int | None, *, at_end: bool) -> Lists:
    """Prepend a token to each list that does not begin with it; with `at_end`, append it unless the list ends with it.

    The token has loss if its neighbour has.
    """
    values, lengths = lists.values, lists.lengths
    if token is None or not len(values):
        return lists
    ends = np.cumsum(lengths)
    begins = ends - lengths
    borders, items = (ends, ends - 1) if at_end else (begins, begins)
    # An empty list has no item: the value read in its place is another list's, or clipped, and is ignored.
    bare = (lengths > 0) & (values[items.clip(0, len(values) - 1)] != token)
    # The ids may fit into bytes while the token does not.
    longer = np.insert(values.astype(np.int64, copy=False), borders[bare], token)
    turns, documents = (parts and _with_longer(*parts, bare, at_end=at_end) for parts in (lists.turns, lists.documents))
    return Lists(longer, lengths + bare, turns, documents)


def _with_longer(
    turns: IntArray, num_turns: IntArray, longer: npt.NDArray[np.bool_], *, at_end: bool
) -> tuple[IntArray, IntArray]:
    """Lengthen the turns, or documents, of lists by a token: the first non-empty one, or with `at_end` the last."""
    starts, turns = starts_of(num_turns), turns.copy()
    if at_end:
        own = starts[1:][longer] - 1
    else:
        own = starts[:-1][longer]
        own += turns[own] == 0
    turns[own] += 1
    return turns, num_turns
