"""Texts and chats to tokens: a column of text, a prompt and its answer, messages, and preference pairs of both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.text import cut
from penstock_server.arrow import parsed_json, raw_texts
from penstock_server.recipes.answers import Span
from penstock_server.recipes.fields import Field, json_values
from penstock_server.recipes.messages import ChatError, has_loss, says_something
from penstock_server.recipes.recipe import Recipe, Rows
from penstock_server.recipes.token_ids import Lists, joined, repeated, with_turns
from penstock_server.recipes.tokenizer import Ids

Chat = list[Any]  # its messages
Tools = list[Any]  # definitions of the tools that a chat may call

_LOOKED_AT = 20  # characters on each side of the border between a prompt and its response


def tokenized(rows: Rows, role: str, *, opens: bool = False, closes: bool = False) -> Lists:
    """Tokenize a field of text; `opens` prepends the recipe's BOS to each, and `closes` appends its EOS."""
    recipe, source = rows.recipe, rows.field(role)
    assert recipe.tokenizer  # a dataset of text without a tokenizer is refused
    note = partial(rows.note, of=source.text)
    ids = Lists(*recipe.tokenizer.encode(_texts(rows, source), note))
    for row in np.flatnonzero(ids.lengths == 0).tolist():
        note(row, "has no tokens")
    opening, closing = _special(recipe.bos_id if opens else None), _special(recipe.eos_id if closes else None)
    return joined([repeated(opening, len(rows)), ids, repeated(closing, len(rows))])


def lacks_separator(rows: Rows) -> bool:
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


def _special(token: int | None) -> list[int]:
    """Return the ids that a special token adds to a text; none for None."""
    return [] if token is None else [token]


def _texts(rows: Rows, source: Field) -> list[str]:
    """Return the field's texts, "" for a bad one."""
    stored = rows.values(source)
    texts = []
    for row, raw in enumerate(raw_texts(stored).to_pylist()):
        text, reason = "", f"is {'null' if raw is None else 'empty'}"
        if raw:
            try:
                text, reason = raw.decode(), ""
            except UnicodeDecodeError as error:
                reason = f"is not valid UTF-8 at byte {error.start}"
        if reason:
            rows.note(row, reason, of=source.text)
        texts.append(text)
    if isinstance(stored.type, pa.JsonType):
        for row, raw in enumerate(pc.cast(stored, pa.large_binary()).to_pylist()):
            if not isinstance(parsed_json((raw or b"").decode(errors="replace")), str | None):
                rows.note(
                    row, f"is JSON, but no string: {cut(texts[row], 40)}. Make it a text with a transform", of=source.text
                )
                texts[row] = ""
    return texts


def read_chats(rows: Rows, role: str) -> list[Chat]:
    """Return the chats of a field, [] for a bad one."""
    source = rows.field(role)
    chats = _lists(rows, source, "messages")
    for row, chat in enumerate(chats):
        if chat is None:
            rows.note(row, "is null", of=source.text)
    return [chat or [] for chat in chats]


def read_tools(rows: Rows) -> list[Tools]:
    """Return the tool definitions of each row; [] without any, and for a bad row."""
    source = rows.recipe.tools
    return [[]] * len(rows) if source is None else [tools or [] for tools in _lists(rows, source, "tools")]


def _lists(rows: Rows, source: Field, what: str) -> list[list[Any] | None]:
    """Return the lists of a field, which may be JSON texts, or have JSON texts for items; None for null, [] for a bad one."""
    lists = list[list[Any] | None]()
    for row, value in enumerate(_nested(rows, source)):
        try:
            parsed = json.loads(value) if isinstance(value, str) and value else value or None
            if not isinstance(parsed, list | None):
                raise ValueError("it is no list")
            lists.append(parsed and [json.loads(item) if isinstance(item, str) else item for item in parsed])
        except (ValueError, RecursionError) as error:
            rows.note(row, f"is no list of {what} as JSON: {error}", of=source.text)
            lists.append([])
    return lists


def _nested(rows: Rows, source: Field) -> list[Any]:
    """Return the values of a nested column, or of a text column, as JSON values; None for a bad one."""
    array = rows.values(source)
    try:
        return json_values(array)
    except ValueError:  # the error does not name the row
        values = []
    for row in range(len(array)):
        try:
            values += json_values(array[row : row + 1])
        except ValueError as error:
            rows.note(row, f"cannot be read: {error}", of=source.text)
            values.append(None)
    return values


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
    for row, chat in enumerate(chats):
        text, in_loss = "", tuple[Span, ...]()
        try:
            text, in_loss = _rendered(chat, prompts[row] if prompts else [], tools[row], recipe)
        except ChatError as error:
            note(row, str(error))
        texts.append(text)
        spans.append(in_loss)
        answered.append(bool(text) and has_loss(chat[-1]))
    ids, turns = [], []
    bos, eos = _special(recipe.bos_id), _special(recipe.eos_id)
    for row, (tokens, runs) in enumerate(recipe.tokenizer.encode_marked(texts, spans, note)):
        if not len(tokens):
            note(row, "has no tokens")
        # The template may write them already.
        opening = [] if tokens[:1].tolist() == bos else bos
        is_closed = tokens[-1:].tolist() == eos or _is_closed(texts[row], spans[row] if answered[row] else (), recipe)
        closing = [] if is_closed else eos
        ids.append(np.concatenate([np.array(opening, np.int64), tokens, np.array(closing, np.int64)]))
        runs[0] += len(opening)
        runs[-1 if answered[row] or runs[-1] else -2] += len(closing)  # after the user's words an EOS has no loss
        turns.append(runs)
    return Lists(*_end_to_end(ids), _end_to_end(turns))


def _rendered(chat: Chat, prompt: Chat, tools: Tools, recipe: Recipe) -> tuple[str, tuple[Span, ...]]:
    """Render a chat after a prompt, with the spans that have loss. Raises ChatError: no span has loss."""
    assert recipe.chat
    if None in [*prompt, *chat]:
        raise ChatError("has a message that is null")
    rendered = recipe.chat.render([*prompt, *chat], tools, len(prompt))
    answers = [message for message in chat if message["role"] == "assistant"]
    if answers and not any(map(has_loss, answers)):
        raise ChatError("has a chat whose messages of the assistant all have weight 0, so no token has loss")
    if not rendered.spans or (answers and not any(map(says_something, filter(has_loss, answers)))):
        roles = dict.fromkeys(message["role"] for message in chat)  # only the end of a turn would have loss
        raise ChatError(f"has a chat whose assistant says nothing, so no token has loss; its roles: {', '.join(roles)}")
    return rendered


def _is_closed(text: str, spans: Sequence[Span], recipe: Recipe) -> bool:
    """Return whether a chat, or its last span with loss, ends with the EOS, ignoring blanks."""
    assert recipe.tokenizer
    token = None if recipe.eos_id is None else recipe.tokenizer.tokenizer.id_to_token(recipe.eos_id)
    ends = [text, *(text[start:stop] for start, stop in spans[-1:])]
    return token is not None and any(end.rstrip().endswith(token) for end in ends)


def _end_to_end(arrays: Sequence[Ids]) -> tuple[Ids, Ids]:
    return np.concatenate([*arrays, np.zeros(0, np.int64)]), np.fromiter(map(len, arrays), np.int64, len(arrays))


def preferences(rows: Rows) -> dict[str, Lists]:
    """Return both sides of each pair, after its prompt. Chats without a prompt share their common first messages as one."""
    roles = dict(rows.recipe.fields)
    if rows.recipe.chat:
        chats, tools = {role: read_chats(rows, role) for role in roles}, read_tools(rows)
        if "prompt" in chats:
            prompts = chats.pop("prompt")
        else:
            prompts = [chosen[: _num_shared(chosen, rejected)] for chosen, rejected in zip(*chats.values(), strict=True)]
            chats = {side: [chat[len(prompt) :] for chat, prompt in zip(chats[side], prompts, strict=True)] for side in chats}
        return {side: tokenized_chats(rows, side, answers, tools, prompts) for side, answers in chats.items()}
    has_prompt = "prompt" in roles
    chosen = tokenized(rows, "chosen", opens=not has_prompt, closes=True)
    prompt = tokenized(rows, "prompt", opens=True) if has_prompt else repeated([], len(rows))
    rejected = tokenized(rows, "rejected", opens=not has_prompt, closes=True)
    return {"chosen": with_turns([prompt, chosen]), "rejected": with_turns([prompt, rejected])}


def _num_shared(chosen: Chat, rejected: Chat) -> int:
    """Return the number of common first messages; at least the last message of each chat is an answer."""
    longest = max(0, min(len(chosen), len(rejected)) - 1)
    return next((i for i in range(longest) if chosen[i] != rejected[i]), longest)
