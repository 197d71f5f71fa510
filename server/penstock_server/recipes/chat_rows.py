"""Rows of chats to tokens: messages, as lists or as JSON, rendered with the tools of each row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from penstock_server.recipes.chat_spans import Span
from penstock_server.recipes.fields import Field
from penstock_server.recipes.messages import ChatError, has_loss, says_something
from penstock_server.recipes.recipe import Recipe
from penstock_server.recipes.rows import Rows
from penstock_server.recipes.texts import special
from penstock_server.recipes.tokenizer import Ids, Note
from penstock_server.recipes.turns import Lists
from penstock_server.recipes.values import json_values

Chat = list[Any]  # its messages
Tools = list[Any]  # definitions of the tools that a chat may call


def read_chats(rows: Rows, role: str) -> list[Chat]:
    """Return the chats of a field, [] for a bad one."""
    source, found = rows.field(role), []
    for row, value in enumerate(_nested(rows, source)):
        try:
            chat = _from_json(value)
            if chat is None:
                rows.note(row, "is null", of=source.text)
        except (ValueError, RecursionError) as error:
            rows.note(row, f"is no list of messages as JSON: {error}", of=source.text)
            chat = []
        found.append(chat or [])
    return found


def read_tools(rows: Rows) -> list[Tools]:
    """Return the tool definitions of each row; [] without any, and for a bad row."""
    source = rows.recipe.tools
    if source is None:
        return [[]] * len(rows)
    found: list[Tools] = []
    for row, value in enumerate(_nested(rows, source)):
        try:
            own = _from_json(value) or []
            found.append([_parsed(tool) if isinstance(tool, str) else tool for tool in own])
        except (ValueError, RecursionError) as error:
            rows.note(row, f"is no list of tools as JSON: {error}", of=source.text)
            found.append([])
    return found


def tokenized_chats(
    rows: Rows, role: str, chats: Sequence[Chat], tools: Sequence[Tools], prompts: Sequence[Chat] | None = None
) -> Lists:
    """Render the chats of a field with the tools of each row, and tokenize them. The assistant's answers have loss.

    Answers in the `prompts` before them do not. The EOS of a chat that the assistant ends has loss. BOS and EOS are added
    unless a chat begins and ends with them.
    """
    recipe = rows.recipe
    assert recipe.tokenizer
    note = partial(rows.note, of=rows.field(role).text)
    texts, spans, answered = [], [], []
    for row, (chat, own_tools) in enumerate(zip(chats, tools, strict=True)):
        try:
            text, in_loss = _rendered(chat, prompts[row] if prompts else [], own_tools, recipe)
        except ChatError as error:
            note(row, str(error))
            text, in_loss, chat = "", (), []
        texts.append(text)
        spans.append(in_loss)
        answered.append(any(map(has_loss, chat[-1:])))
    ids, turns = [], []
    bos, eos = special(recipe.bos_id), special(recipe.eos_id)
    for row, (tokens, runs) in enumerate(recipe.tokenizer.encode_marked(texts, spans, note)):
        if not len(tokens):
            note(row, "has no tokens")
        # The template may write them already.
        opening = [] if tokens[:1].tolist() == bos else bos
        closing = (
            [] if tokens[-1:].tolist() == eos or _is_closed(texts[row], spans[row] if answered[row] else (), recipe) else eos
        )
        ids.append(np.concatenate([np.array(opening, np.int64), tokens, np.array(closing, np.int64)]))
        runs[0] += len(opening)
        runs[-1 if answered[row] or runs[-1] else -2] += len(closing)  # after the user's words an EOS has no loss
        turns.append(runs)
    return Lists(*_end_to_end(ids), _end_to_end(turns))


def _is_closed(text: str, spans: Sequence[Span], recipe: Recipe) -> bool:
    """Return whether a chat, or its last span with loss, ends with the EOS, ignoring blanks."""
    assert recipe.tokenizer
    token = None if recipe.eos_id is None else recipe.tokenizer.tokenizer.id_to_token(recipe.eos_id)
    ends = [text, *(text[start:stop] for start, stop in spans[-1:])]
    return token is not None and any(end.rstrip().endswith(token) for end in ends)


def _from_json(value: Any) -> list[Any] | None:
    """Parse a list from JSON text. A list stays, other values become None. Raises ValueError, RecursionError: not a list."""
    made = (_parsed(value) if value else None) if isinstance(value, str) else value
    if not isinstance(made, list | None):
        raise ValueError("it is no list")
    return made


def _parsed(text: str) -> Any:
    """Parse JSON. Raises ValueError, RecursionError: invalid JSON, or half of a surrogate pair, which is not text."""
    made = json.loads(text)
    if "\\u" in text:
        json.dumps(made, ensure_ascii=False).encode()
    return made


def _nested(rows: Rows, source: Field) -> list[Any]:
    """Return the values of a nested column, or of a text column, as JSON values; None for a bad one."""
    array, note = rows.values(source), partial(rows.note, of=source.text)
    try:
        return json_values(array)
    except (UnicodeError, OverflowError):
        return [_one_nested(array[row : row + 1], row, note) for row in range(len(array))]


def _one_nested(one: pa.Array, row: int, note: Note) -> Any:
    try:
        return json_values(one)[0]
    except UnicodeDecodeError:
        note(row, "is not valid UTF-8")
    except UnicodeEncodeError:
        note(row, "has a JSON value with half of a surrogate pair, which is no text")
    except OverflowError:
        note(row, "has a date outside the years 1 to 9999")
    return None


def _rendered(chat: Chat, prompt: Chat, tools: Tools, recipe: Recipe) -> tuple[str, tuple[Span, ...]]:
    """Render a chat after a prompt, with the spans that have loss. Raises ChatError: no span has loss."""
    assert recipe.chat
    if None in [*prompt, *chat]:
        raise ChatError("has a message that is null")
    rendered = recipe.chat.render([*prompt, *chat], tools, len(prompt))
    answers = [message for message in chat if message["role"] == "assistant"]
    said = list(filter(has_loss, answers))
    if answers and not said:
        raise ChatError("has a chat in which every message of the assistant has weight 0, so no token has loss")
    if not rendered.spans or (said and not any(map(says_something, said))):  # only the end of its turn would have loss
        roles = dict.fromkeys(message["role"] for message in chat)
        raise ChatError(f"has a chat in which the assistant says nothing, so no token has loss; its roles: {', '.join(roles)}")
    return rendered.text, rendered.spans


def _end_to_end(arrays: Sequence[Ids]) -> tuple[Ids, Ids]:
    return np.concatenate([*arrays, np.zeros(0, np.int64)]), np.fromiter(map(len, arrays), np.int64, len(arrays))
