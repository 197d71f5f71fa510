"""Rows to tokens: rows in, one record batch of token lists out. Bad rows are null, with the reason beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock_server.arrow import raw_texts, take_rows
from penstock_server.order.arrays import starts_of
from penstock_server.recipes.encoders import Encoder
from penstock_server.recipes.fields import Column, is_bytes, json_values
from penstock_server.recipes.recipe import Recipe, Rows
from penstock_server.recipes.split import Place, split_hashes
from penstock_server.recipes.text import (
    chat_prompts,
    preferences,
    read_chats,
    read_tools,
    tokenized,
    tokenized_chats,
    valid_texts,
)
from penstock_server.recipes.token_ids import Lists, pretokenized, prompted
from penstock_server.recipes.tokenizer import Note

_MAX_IDS = 1 << 28  # of rows that are encoded together
REASON = "bad"  # why a row cannot be used, null if it can
ROW = "row"  # number of the row in the block, before the filter
SPLIT = "split"  # hash that decides the split; see split_hashes
TURNS = "_turns"  # after a feature's name: the lengths of a row's prompt, response, prompt, ...
DOCUMENTS = "_documents"  # likewise: the lengths of the documents that are packed into a row
COLUMN = "column:"  # before the name of a passthrough column


class Selected(NamedTuple):
    """Rows of a block that the recipe keeps: `numbers` as they are stored in the block, and the split `hashes` of each."""

    rows: pa.RecordBatch
    numbers: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, rows: pa.RecordBatch, recipe: Recipe, place: Place, first: int = 0) -> Selected:
        """Filter stored rows; `place` and `first`, the number in the block, are those of the first row. Raises FilterError."""
        kept = np.arange(rows.num_rows)
        if recipe.filter:
            kept = kept[recipe.filter.keep(rows)]
            rows = take_rows(rows, kept)
        return cls(rows, kept + first, split_hashes(rows, recipe, place, kept))

    def transformed(self, recipe: Recipe) -> Selected:
        """Apply the recipe's transform. Raises RecipeError: it fails, or returns rows that the recipe cannot read."""
        if not recipe.transform:
            return self
        rows = recipe.transform(self.rows)
        recipe.check_made(rows.schema)
        return self._replace(rows=rows)

    def take(self, rows: npt.NDArray[np.int64]) -> Selected:
        """Return some of the rows, by ascending indices."""
        return Selected(take_rows(self.rows, rows), self.numbers[rows], self.hashes[rows])

    @staticmethod
    def joined(parts: Sequence[Selected]) -> Selected:
        """Concatenate the rows of several parts of one schema."""
        if len(parts) == 1:
            return parts[0]
        batches, numbers, hashes = zip(*parts, strict=True)
        return Selected(pa.concat_batches(batches), np.concatenate(numbers), np.concatenate(hashes))


def encode(selected: Selected, recipe: Recipe, token_dtype: str, token_bound: int) -> pa.RecordBatch:
    """Tokenize rows, each by itself. A row that cannot be used is null in every feature. Ids must be in [0, token_bound)."""
    rows = Rows(selected.rows, recipe)
    if recipe.encoder and recipe.kind != "tokens":  # rows of ids need no tokenizer
        features = _features_of_processes(rows, recipe.encoder, token_bound)
    else:
        features = features_of(rows, token_bound)
    columns = {COLUMN + column.name: _passthrough(rows, column) for column in recipe.columns}
    bad = np.array([reason is not None for reason in rows.reasons], bool)
    arrays: dict[str, pa.Array] = {}
    for name, lists in features.items():
        arrays[name] = _list_array(lists.values, lists.lengths, bad, token_dtype)
        if lists.in_loss is not None:
            arrays[name + TURNS] = _list_array(*lists.turns, bad, "int32")
        if lists.documents is not None:
            arrays[name + DOCUMENTS] = _list_array(*lists.runs(lists.documents), bad, "int32")
    arrays |= columns | {REASON: pa.array(rows.reasons, pa.string()), SPLIT: pa.array(selected.hashes)}
    if recipe.filter:
        arrays[ROW] = pa.array(selected.numbers.astype(np.int32))
    return pa.record_batch(arrays)


def bytes_beside(recipe: Recipe) -> int:
    """Estimate the bytes of a row of `encode` beside its tokens and passthrough columns, with two turns and documents."""
    # End offsets of its lists, turns, documents and reason; its split hash and its number.
    a_feature = 8 + (recipe.has_turns + recipe.has_documents) * (8 + 2 * 4)
    return len(recipe.features) * a_feature + 4 + 4 + 4 * (recipe.filter is not None)


def _features_of_processes(rows: Rows, encoder: Encoder, bound: int) -> dict[str, Lists]:
    """Return what `features_of` returns, made by processes. A row that exceeds their limits is bad."""
    recipe = rows.recipe
    parts: dict[str, list[Lists]] = {name: [] for name in recipe.features}
    first = num_ids = 0
    for num_rows, reply in encoder.encode(rows.stored.select(recipe.encoded_columns), bound):
        if isinstance(reply, str):
            rows.note(first, reply)
            reply = ([], {name: [b"", bytes(4), b"" if recipe.has_turns else None] for name in recipe.features})
        reasons, features = reply
        for row, reason in reasons:
            rows.note(first + row, reason)
        for name, packed in features.items():
            parts[name].append(Lists.unpacked(*packed))
            num_ids += len(parts[name][-1].values)
        if num_ids > _MAX_IDS:
            raise ValueError(
                f"{first + num_rows:,} rows of a block of {rows.stored.nbytes:,} bytes become {num_ids:,} tokens, more than "
                f"{_MAX_IDS:,}. Use another tokenizer or template, or write shorter rows"
            )
        first += num_rows
    return {name: Lists.joined(lists) for name, lists in parts.items()}


def features_of(rows: Rows, bound: int) -> dict[str, Lists]:
    """Return the token lists of rows, by feature; notes the bad rows."""
    kind = rows.recipe.kind
    if kind == "tokens":
        return pretokenized(rows, bound)
    if kind == "text":
        return {"tokens": tokenized(rows, "text", opens=True, closes=True)}
    if kind == "prompt":
        return {"tokens": chat_prompts(rows) if rows.recipe.chat else tokenized(rows, "prompt", opens=True)}
    if kind == "prompt_response":
        return {"tokens": prompted(tokenized(rows, "prompt", opens=True), tokenized(rows, "response", closes=True))}
    if kind == "messages":
        return {"tokens": tokenized_chats(rows, "messages", read_chats(rows, "messages"), read_tools(rows))}
    return preferences(rows)


def _passthrough(rows: Rows, column: Column) -> pa.Array:
    """Return a passthrough column without nulls: NaN or "" replaces them; if the type has neither, the row is bad.

    Structs, maps and lists become JSON.
    """
    array, note = rows.values(column.field), rows.note_of(column.name)
    if column.is_nested:
        values = json_values(array, note)
        return pa.array([json.dumps(value, ensure_ascii=False, default=str) for value in values], pa.large_string())
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_fixed_size_list(array.type):
        return _vectors(array, note)
    if pa.types.is_floating(array.type):
        wide = array.cast(pa.float32()) if pa.types.is_float16(array.type) else array
        return pc.fill_null(wide, float("nan"))
    if pa.types.is_integer(array.type) or pa.types.is_boolean(array.type):
        for row in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            note(row, "is null")
        return pc.fill_null(array, False if pa.types.is_boolean(array.type) else 0)
    raw = pc.fill_null(raw_texts(array), b"")
    return raw if is_bytes(array.type) else valid_texts(raw, note)


def _vectors(array: pa.Array, note: Note) -> pa.Array:
    type_ = pa.list_(array.type.value_type, array.type.list_size)
    if not (array.null_count or array.flatten().null_count):
        return array.cast(type_)  # whether or not the file declares that it has no nulls
    vectors = array.to_pylist()
    for row, vector in enumerate(vectors):
        if vector is None or None in vector:
            note(row, "is null or holds a null")
            vectors[row] = [0] * type_.list_size
    return pa.array(vectors, type_)


def _list_array(
    values: npt.NDArray[np.integer[Any]], lengths: npt.NDArray[np.int64], bad: npt.NDArray[np.bool_], dtype: str
) -> pa.LargeListArray:
    offsets = starts_of(np.where(bad, 0, lengths))
    kept = values[np.repeat(~bad, lengths)] if bad.any() else values
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(kept.astype(dtype, copy=False)), mask=pa.array(bad))
