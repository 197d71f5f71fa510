"""Rows to tokens: one row group in, one record batch of token lists out. Bad rows are null, with the reason beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock_server.recipe import Recipe

_PORTION_CHARACTERS = 1 << 20
REASON = "bad"  # the column beside the features: why a row cannot be used, null where it can


def features(recipe: Recipe) -> tuple[str, ...]:
    """The token lists that an encoded row has."""
    return ("prompt", "response") if recipe.kind == "prompt_response" else ("tokens",)


def schema(recipe: Recipe, token_dtype: str) -> pa.Schema:
    """The schema of encoded rows: a list of tokens a feature, and the reason why a row is bad."""
    tokens = pa.large_list(pa.from_numpy_dtype(np.dtype(token_dtype)))
    return pa.schema([*(pa.field(name, tokens) for name in features(recipe)), pa.field(REASON, pa.string())])


def encode(rows: pa.Table, recipe: Recipe, token_dtype: str, token_bound: int) -> pa.RecordBatch:
    """The rows' tokens, in the rows' order. A row that cannot be used is null in every feature.

    Text is encoded without the tokenizer's special tokens; the recipe's EOS closes a text or a response. Token ids must
    be in [0, token_bound).

    Raises ValueError: the tokenizer fails.
    """
    reasons: list[str | None] = [None] * rows.num_rows
    if recipe.kind == "tokens":
        lists = [_close(*_checked_ids(rows.column(recipe.columns[0]), token_bound, reasons), recipe.eos_id)]
    else:
        texts = [_texts(rows.column(name), name, reasons) for name in recipe.columns]
        ends = [None] * (len(texts) - 1) + [recipe.eos_id]
        lists = [
            _tokenize(column, name, recipe, end, reasons) for column, name, end in zip(texts, recipe.columns, ends, strict=True)
        ]
    bad = np.array([reason is not None for reason in reasons], bool)
    arrays = [_list_array(values, lengths, bad, token_dtype) for values, lengths in lists]
    return pa.record_batch([*arrays, pa.array(reasons, pa.string())], schema=schema(recipe, token_dtype))


_Lists = tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]  # all values end to end, and each row's count of them


def _texts(column: pa.ChunkedArray, name: str, reasons: list[str | None]) -> list[str]:
    """The column's texts, "" for a bad one."""
    texts: list[str] = []
    for row, raw in enumerate(pc.cast(column, pa.large_binary()).to_pylist()):
        text, reason = _text(raw)
        if reason:
            reasons[row] = reasons[row] or f"{name} {reason}"
        texts.append(text)
    return texts


def _text(raw: bytes | None) -> tuple[str, str | None]:
    if raw is None:
        return "", "is null"
    if not raw:
        return "", "is empty"
    try:
        return raw.decode(), None
    except UnicodeDecodeError as error:
        return "", f"is not valid UTF-8 at byte {error.start}"


def _tokenize(texts: Sequence[str], name: str, recipe: Recipe, end: int | None, reasons: list[str | None]) -> _Lists:
    assert recipe.tokenizer  # text has one, or the dataset was refused
    closing = [] if end is None else [end]
    ids: list[npt.NDArray[np.int64]] = []
    try:
        for portion in _portions(texts):
            encodings = recipe.tokenizer.tokenizer.encode_batch_fast(portion, add_special_tokens=False)
            ids += [np.array(encoding.ids + closing, np.int64) for encoding in encodings]
    except Exception as error:  # the library raises bare Exception, as for a text that needs an unknown token it has not
        raise ValueError(f"the tokenizer {recipe.tokenizer.path.name} fails on column {name!r}: {error}") from error
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    for row in np.flatnonzero(lengths == len(closing)).tolist():
        reasons[row] = reasons[row] or f"{name} has no tokens"
    return np.concatenate(ids) if ids else np.zeros(0, np.int64), lengths


def _portions(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts, in turn, about a million characters at a time: an encoding takes some hundred bytes a token."""
    portion: list[str] = []
    length = 0
    for text in texts:
        portion.append(text)
        length += len(text)
        if length >= _PORTION_CHARACTERS:
            yield portion
            portion, length = [], 0
    yield portion


def _checked_ids(column: pa.ChunkedArray, bound: int, reasons: list[str | None]) -> _Lists:
    # Flattening drops the items of null lists, which fixed-size lists keep behind their nulls.
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    lengths = pc.fill_null(pc.cast(pc.list_value_length(array), pa.int64()), 0).to_numpy(zero_copy_only=False)
    items = array.flatten()
    sound = not items.null_count and _all_within(items, bound)
    values = items.to_numpy() if sound else _marked(items, lengths, bound, reasons)
    for row in np.flatnonzero(lengths == 0).tolist():
        reasons[row] = "is empty" if array[row].is_valid else "is null"
    return values, lengths


def _all_within(items: pa.Array, bound: int) -> bool:
    least, largest = pc.min_max(items).as_py().values()
    return least is None or (least >= 0 and largest < bound)


def _marked(items: pa.Array, lengths: npt.NDArray[np.int64], bound: int, reasons: list[str | None]) -> npt.NDArray[np.integer]:
    """The items with 0 for null, after the rows are noted that hold what is no token."""
    items = pc.cast(items, pa.int64(), safe=False)  # an id past 2^63 turns negative, so it stays outside
    outside = pc.fill_null(pc.or_(pc.less(items, 0), pc.greater_equal(items, bound)), True)
    starts = np.cumsum(lengths) - lengths
    for at in np.flatnonzero(outside.to_numpy(zero_copy_only=False)).tolist():
        row = int(np.searchsorted(starts, at, side="right")) - 1
        item = items[at].as_py()
        what = "a null token" if item is None else f"token id {item}, outside 0 to {bound - 1}"
        reasons[row] = reasons[row] or f"has {what}"
    values: npt.NDArray[np.integer] = pc.fill_null(items, 0).to_numpy(zero_copy_only=False)
    return values


def _close(values: npt.NDArray[np.integer], lengths: npt.NDArray[np.int64], end: int | None) -> _Lists:
    """The lists, each closed by a token unless it ends with it."""
    ends = np.cumsum(lengths)
    if end is None or not len(values):
        return values, lengths
    open_ = (lengths > 0) & (values[np.maximum(ends - 1, 0)] != end)
    return np.insert(values, ends[open_], end), lengths + open_


def _list_array(
    values: npt.NDArray[np.integer], lengths: npt.NDArray[np.int64], bad: npt.NDArray[np.bool_], dtype: str
) -> pa.LargeListArray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(np.where(bad, 0, lengths), out=offsets[1:])
    kept = values[np.repeat(~bad, lengths)] if bad.any() else values
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(kept.astype(dtype, copy=False)), mask=pa.array(bad))
