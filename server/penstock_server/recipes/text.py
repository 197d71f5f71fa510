"""Texts and chats to tokens: a column of text, a prompt and its answer, messages, and preference pairs of both."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
from penstock_server.recipes.token_ids import Lists, no_prompts, prompted
from penstock_server.recipes.tokenizer import Note

Chat = list[Any]  # its messages
Tools = list[Any]  # definitions of the tools that a chat may call

_LOOKED_AT = 20  # characters on each side of the border between a prompt and its response


def tokenized(rows: Rows, role: str, *, opens: bool = False, closes: bool = False) -> Lists:
    """Tokenize a field of text; `opens` prepends the recipe's BOS to each, and `closes` appends its EOS."""
    recipe, source = rows.recipe, rows.field(role)
    assert recipe.tokenizer  # a dataset of text without a tokenizer is refused
    ids = _without_empty(Lists(*recipe.tokenizer.encode(_texts(rows, source), rows.note_of(source.text))), rows, source)
    ids = ids.with_token(recipe.bos_id if opens else None, at_end=False)
    return ids.with_token(recipe.eos_id if closes else None, at_end=True)


def _without_empty(ids: Lists, rows: Rows, source: Field) -> Lists:
    for row in np.flatnonzero(ids.lengths == 0).tolist():
        rows.note(row, "has no tokens", of=source.text)
    return ids


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


def _texts(rows: Rows, source: Field) -> list[str]:
    """Return the field's texts, "" for a bad one."""
    stored, note = rows.values(source), rows.note_of(source.text)
    raw = raw_texts(stored)
    texts: list[str] = valid_texts(pc.fill_null(raw, b""), note).to_pylist()
    if isinstance(stored.type, pa.JsonType):
        for row, text in enumerate(pc.cast(stored, pa.large_binary()).to_pylist()):
            if not isinstance(parsed_json((text or b"").decode(errors="replace")), str | None):
                note(row, f"is JSON, but no string: {cut(texts[row], 40)}. Make it a text with a transform")
                texts[row] = ""
    for row, text in enumerate(texts):
        if not text:
            note(row, f"is {'empty' if raw[row].is_valid else 'null'}")
    return texts


def valid_texts(raw: pa.Array, note: Note) -> pa.Array:
    """Convert bytes to text; "" for a bad row, whose bytes are not UTF-8."""
    try:
        return pc.cast(raw, pa.large_string())
    except pa.ArrowInvalid:
        texts = []
        for row, value in enumerate(raw.to_pylist()):
            try:
                texts.append(value.decode())
            except UnicodeDecodeError as error:
                note(row, f"is not valid UTF-8 at byte {error.start}")
                texts.append("")
        return pa.array(texts, pa.large_string())


def read_chats(rows: Rows, role: str) -> list[Chat]:
    """Return the chats of a field, [] for a bad one."""
    source = rows.field(role)
    chats = _lists(rows, source, "messages")
    for row in (row for row, chat in enumerate(chats) if chat is None):
        rows.note(row, "is null", of=source.text)
    return [chat or [] for chat in chats]


def read_tools(rows: Rows) -> list[Tools]:
    """Return the tool definitions of each row; [] without any, and for a bad row."""
    source = rows.recipe.tools
    return [[]] * len(rows) if source is None else [tools or [] for tools in _lists(rows, source, "tools")]


def _lists(rows: Rows, source: Field, what: str) -> list[list[Any] | None]:
    """Return the lists of a field, which may be JSON texts, or have JSON texts for items; None for null, [] for a bad one."""
    note = rows.note_of(source.text)
    lists = list[list[Any] | None]()
    for row, value in enumerate(json_values(rows.values(source), note)):
        try:
            parsed = json.loads(value) if isinstance(value, str) and value else value or None
            if not isinstance(parsed, list | None):
                raise ValueError("it is no list")
            lists.append(parsed and [json.loads(item) if isinstance(item, str) else item for item in parsed])
        except (ValueError, RecursionError) as error:
            note(row, f"is no list of {what} as JSON: {error}")
            lists.append([])
    return lists


def tokenized_chats(
    rows: Rows, role: str, chats: Sequence[Chat], tools: Sequence[Tools], prompts: Sequence[Chat] | None = None
) -> Lists:
    """Render and tokenize the chats of a field. The assistant's answers have loss, except in the `prompts` before them.

    The EOS of a chat that the assistant ends has loss. BOS and EOS are added unless a chat begins and ends with them.
    """
    recipe, source = rows.recipe, rows.field(role)
    assert recipe.tokenizer
    texts, spans = list[str](), list[tuple[Span, ...]]()
    for row, chat in enumerate(chats):
        text, in_loss = "", tuple[Span, ...]()
        try:
            text, in_loss = _rendered(chat, prompts[row] if prompts else [], tools[row], recipe)
        except ChatError as error:
            rows.note(row, str(error), of=source.text)
        texts.append(text)
        spans.append(in_loss)
    encoded = recipe.tokenizer.encode_marked(texts, spans, rows.note_of(source.text))
    ids = _without_empty(Lists(*encoded), rows, source)
    if ids.in_loss is None or not len(ids.values):
        return ids
    answered = np.array([bool(text) and has_loss(chat[-1]) for chat, text in zip(chats, texts, strict=True)], np.bool_)
    ends_in_loss = answered | ids.in_loss[np.cumsum(ids.lengths) - 1]  # after the user's words an EOS has no loss
    opens = ids.lacking(recipe.bos_id, at_end=False)  # the template may write both
    ids = ids.with_token(recipe.bos_id, at_end=False, lists=opens, in_loss=np.zeros(len(chats), np.bool_))
    ends = [_is_closed(*rendered, recipe) for rendered in zip(texts, spans, answered, strict=True)]
    closes = ids.lacking(recipe.eos_id, at_end=True) & ~np.array(ends, np.bool_)
    return ids.with_token(recipe.eos_id, at_end=True, lists=closes, in_loss=ends_in_loss)


def chat_prompts(rows: Rows) -> Lists:
    """Render and tokenize chats that end with a message to answer, and the text that opens the answer."""
    recipe, source = rows.recipe, rows.field("prompt")
    assert recipe.tokenizer
    assert recipe.chat
    texts = list[str]()
    for row, (chat, tools) in enumerate(zip(read_chats(rows, "prompt"), read_tools(rows), strict=True)):
        try:
            texts.append(recipe.chat.render_prompt(chat, tools))
        except ChatError as error:
            rows.note(row, str(error), of=source.text)
            texts.append("")
    ids = _without_empty(Lists(*recipe.tokenizer.encode(texts, rows.note_of(source.text))), rows, source)
    return ids.with_token(recipe.bos_id, at_end=False, lists=ids.lacking(recipe.bos_id, at_end=False))


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


def _is_closed(text: str, spans: Sequence[Span], answered: bool, recipe: Recipe) -> bool:
    """Return whether a chat, or its last span if the assistant ends it, ends with the EOS, ignoring blanks."""
    assert recipe.tokenizer
    token = None if recipe.eos_id is None else recipe.tokenizer.tokenizer.id_to_token(recipe.eos_id)
    ends = [text, *(text[start:stop] for start, stop in spans[-1:] if answered)]
    return token is not None and any(end.rstrip().endswith(token) for end in ends)


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
    prompt = tokenized(rows, "prompt", opens=True) if has_prompt else no_prompts(len(rows))
    return {side: prompted(prompt, tokenized(rows, side, opens=not has_prompt, closes=True)) for side in ("chosen", "rejected")}


def _num_shared(chosen: Chat, rejected: Chat) -> int:
    """Return the number of common first messages; at least the last message of each chat is an answer."""
    longest = max(0, min(len(chosen), len(rejected)) - 1)
    return next((i for i in range(longest) if chosen[i] != rejected[i]), longest)
