"""Text to tokens: a column of text, or a prompt and its answer."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.text import cut
from penstock_server.arrow import parsed_json, raw_texts
from penstock_server.recipes.fields import Field
from penstock_server.recipes.rows import Rows
from penstock_server.recipes.turns import Lists, every, joined

_LOOKED_AT = 20  # characters on each side of the border between a prompt and its response


def tokenized(rows: Rows, role: str, *, opens: bool = False, closes: bool = False) -> Lists:
    """Tokenize a field of text; `opens` prepends the recipe's BOS to each, and `closes` appends its EOS."""
    recipe, source = rows.recipe, rows.field(role)
    assert recipe.tokenizer  # a dataset of text without a tokenizer is refused
    note = partial(rows.note, of=source.text)
    found = Lists(*recipe.tokenizer.encode(_texts(rows, source), note))
    for row in np.flatnonzero(found.lengths == 0).tolist():
        note(row, "has no tokens")
    opening, closing = special(recipe.bos_id if opens else None), special(recipe.eos_id if closes else None)
    return joined([every(opening, len(rows)), found, every(closing, len(rows))])


def have_bare_borders(rows: Rows) -> bool:
    """Return whether prompt and response run together in each of some rows. A row without either does not count."""
    prompts, responses = (_texts(rows, rows.field(role)) for role in ("prompt", "response"))
    pairs = [(p[-_LOOKED_AT:], r[:_LOOKED_AT]) for p, r in zip(prompts, responses, strict=True) if p and r]
    return bool(pairs) and all(_run_together(rows, *pair) for pair in pairs)


def _run_together(rows: Rows, prompt: str, response: str) -> bool:
    # Other scripts have no blanks between words, and a prompt may end with a marker such as [/INST].
    last, first = prompt[-1], response[0]
    if not ((last + first).isascii() and (last.isalnum() or last in ".,:;!?") and first.isalnum()):
        return False
    tokenizer = rows.recipe.tokenizer
    assert tokenizer
    ids, _ = tokenizer.encode([prompt, response], lambda *_: None)
    return prompt[-5:] + response[:5] in tokenizer.decode(ids.tolist())  # a tokenizer may put a blank before each text


def special(token: int | None) -> list[int]:
    """Return the ids that a special token adds to a text; none for None."""
    return [] if token is None else [token]


def _texts(rows: Rows, source: Field) -> list[str]:
    """Return the field's texts, "" for a bad one."""
    texts: list[str] = []
    stored = rows.values(source)
    found, no_strings = raw_texts(stored), _no_strings(stored)
    nulls = source.nulls(rows.stored) if source.is_template and found.null_count else {}
    for row, raw in enumerate(found.to_pylist()):
        text, reason = _text(raw)
        if raw is None and nulls:
            names = [name for name, are_null in nulls.items() if are_null[row]]
            reason = f"is null, as {' and '.join(names)} {'is' if len(names) == 1 else 'are'} in this row"
        if row in no_strings:
            text, reason = "", f"is JSON, but no string: {cut(text, 40)}. Make it a text with a transform"
        if reason:
            rows.note(row, reason, of=source.text)
        texts.append(text)
    return texts


def _no_strings(stored: pa.Array) -> set[int]:
    """Return the rows of a JSON column whose values are neither strings nor null; none for any other column."""
    if not isinstance(stored.type, pa.JsonType):
        return set()
    texts = [(raw or b"").decode(errors="replace") for raw in pc.cast(stored, pa.large_binary()).to_pylist()]
    return {row for row, text in enumerate(texts) if not isinstance(parsed_json(text), str | None)}


def _text(raw: bytes | None) -> tuple[str, str]:
    """Decode a text; also return why it is bad, "" for a good one."""
    if raw is None:
        return "", "is null"
    if not raw:
        return "", "is empty"
    try:
        return raw.decode(), ""
    except UnicodeDecodeError as error:
        return "", f"is not valid UTF-8 at byte {error.start}"
