"""Text to tokens: columns of text, prompts and responses, chats, and preference pairs of either."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock_server.recipes.chat import ChatError, says_something
from penstock_server.recipes.fields import Field
from penstock_server.recipes.recipe import Recipe
from penstock_server.recipes.rows import Reasons, raw_texts
from penstock_server.recipes.tokenizer import Ids
from penstock_server.recipes.turns import Lists, every, joined, with_turns
from penstock_server.recipes.values import json_values

_Chat = list[Any] | None


def preference(rows: pa.RecordBatch, side: str, recipe: Recipe, reasons: Reasons) -> Lists:
    """One side of a preference pair, after the prompt of both; without a prompt, after the messages that both begin with."""
    fields = dict(recipe.fields)
    if recipe.chat:
        answers, prompts = _parted({role: messages(rows, role, recipe, reasons) for role in fields}, side)
        return chats(answers, prompts, tools(rows, recipe, reasons), recipe, fields[side].text, reasons)
    texts = tokenized(rows, side, recipe, reasons, opens="prompt" not in fields, closes=True)
    if "prompt" not in fields:
        return with_turns([every([], rows.num_rows), texts])
    return with_turns([tokenized(rows, "prompt", recipe, reasons, opens=True), texts])


def messages(rows: pa.RecordBatch, role: str, recipe: Recipe, reasons: Reasons) -> list[_Chat]:
    """The chats of a field, None for a bad one."""
    source = dict(recipe.fields)[role]
    found: list[_Chat] = []
    for row, value in enumerate(_nested(source.array(rows), source.text, reasons)):
        try:
            chat = _from_json(value)
        except (ValueError, RecursionError) as error:
            reasons.add(row, f"{source.text} is no list of messages as JSON: {error}")
            chat = None
        if chat is None:
            reasons.add(row, f"{source.text} is null")
        found.append(chat)
    return found


def tools(rows: pa.RecordBatch, recipe: Recipe, reasons: Reasons) -> list[list[Any]]:
    """The definitions of tools that each row has; [] for none, and for bad ones."""
    if recipe.tools is None:
        return [[]] * rows.num_rows
    found: list[list[Any]] = []
    for row, value in enumerate(_nested(recipe.tools.array(rows), recipe.tools.text, reasons)):
        try:
            own = _from_json(value) or []
            found.append([_parsed(tool) if isinstance(tool, str) else tool for tool in own])
        except (ValueError, RecursionError) as error:
            reasons.add(row, f"{recipe.tools.text} is no list of tools as JSON: {error}")
            found.append([])
    return found


def _from_json(value: Any) -> list[Any] | None:
    """A list as it is, or what a text says; None for null or no text. Raises ValueError, RecursionError: it says no list."""
    made = (_parsed(value) if value else None) if isinstance(value, str) else value
    if not isinstance(made, list | None):
        raise ValueError("it is no list")
    return made


def _parsed(text: str) -> Any:
    """What JSON says. Raises ValueError, RecursionError: it is no JSON, or has half of a surrogate pair, which is no text."""
    made = json.loads(text)
    if "\\u" in text:
        json.dumps(made, ensure_ascii=False).encode()
    return made


def _nested(array: pa.Array, name: str, reasons: Reasons) -> list[Any]:
    """The values of a nested column, or of a text, as JSON would have them, None for a bad one."""
    try:
        return json_values(array)
    except (UnicodeDecodeError, OverflowError):
        return [_one_nested(array[row : row + 1], row, name, reasons) for row in range(len(array))]


def _one_nested(one: pa.Array, row: int, name: str, reasons: Reasons) -> Any:
    try:
        return json_values(one)[0]
    except UnicodeDecodeError:
        reasons.add(row, f"{name} is not valid UTF-8")
    except OverflowError:
        reasons.add(row, f"{name} has a date outside the years 1 to 9999")
    return None


def _parted(values: dict[str, list[_Chat]], side: str) -> tuple[list[_Chat], list[_Chat]]:
    """The answers of one side, and the messages before them, which are not learned."""
    if "prompt" in values:
        return values[side], values["prompt"]
    shared = [
        _shared(chosen or [], rejected or []) for chosen, rejected in zip(values["chosen"], values["rejected"], strict=True)
    ]
    answers = [None if chat is None else chat[length:] for chat, length in zip(values[side], shared, strict=True)]
    return answers, [(chat or [])[:length] for chat, length in zip(values[side], shared, strict=True)]


def _shared(chosen: list[Any], rejected: list[Any]) -> int:
    """How many messages both begin with; at least the last one of each is an answer."""
    longest = max(0, min(len(chosen), len(rejected)) - 1)
    return next((i for i in range(longest) if chosen[i] != rejected[i]), longest)


def chats(
    messages: Sequence[_Chat],
    prompts: Sequence[_Chat] | None,
    tools: Sequence[list[Any]],
    recipe: Recipe,
    name: str,
    reasons: Reasons,
) -> Lists:
    """Chats, rendered with the tools of each and tokenized; what the assistant says is learned, but for the prompt before them.

    So is the EOS of a chat that the assistant ends. BOS and EOS are added where a chat does not begin and end with them.
    """
    assert recipe.tokenizer
    texts, spans, answered = [], [], []
    for row, chat in enumerate(messages):
        try:
            text, learned = _rendered(chat, (prompts[row] or []) if prompts else [], tools[row], recipe)
        except ChatError as error:
            reasons.add(row, f"{name} {error}")
            text, learned, chat = "", (), None
        texts.append(text)
        spans.append(learned)
        answered.append([message["role"] for message in chat or []][-1:] == ["assistant"])
    ids, turns = [], []
    bos, eos = _special(recipe.bos_id), _special(recipe.eos_id)
    for row, (tokens, runs) in enumerate(recipe.tokenizer.encode_marked(texts, spans, name, reasons)):
        if not len(tokens):
            reasons.add(row, f"{name} has no tokens")
        # The template may write them itself.
        opening = [] if tokens[:1].tolist() == bos else bos
        closing = [] if tokens[-1:].tolist() == eos else eos
        ids.append(np.concatenate([np.array(opening, np.int64), tokens, np.array(closing, np.int64)]))
        runs[0] += len(opening)
        if answered[row] or runs[-1]:
            runs[-1] += len(closing)
        else:  # after the user's words an EOS is not learned
            runs[-2] += len(closing)
        turns.append(runs)
    return Lists(*_end_to_end(ids), _end_to_end(turns))


def _rendered(chat: _Chat, prompt: list[Any], tools: list[Any], recipe: Recipe) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The text of a chat after a prompt, and the spans that are learned. Raises ChatError: there is none of them."""
    assert recipe.chat
    if chat is None:
        raise ChatError("is null")
    if None in [*prompt, *chat]:
        raise ChatError("has a message that is null")
    rendered = recipe.chat.render([*prompt, *chat], tools)
    # Counted, not one a message: what the assistant says may be nothing, as in a call of a tool, or in two parts.
    answered = any(message["role"] == "assistant" for message in prompt)
    spans = rendered.spans[len(recipe.chat.render(prompt, tools).spans) if answered else 0 :]
    said = [message for message in chat if message["role"] == "assistant"]
    if not spans or (said and not any(map(says_something, said))):  # else the end of its turn alone would be learned
        roles = dict.fromkeys(message["role"] for message in chat)
        raise ChatError(f"has a chat in which the assistant says nothing, so nothing is learned; its roles: {', '.join(roles)}")
    return rendered.text, spans


def tokenized(
    rows: pa.RecordBatch, role: str, recipe: Recipe, reasons: Reasons, *, opens: bool = False, closes: bool = False
) -> Lists:
    """The ids of a field of text, each opened by the recipe's BOS and closed by its EOS where asked for."""
    assert recipe.tokenizer  # text has one, or the dataset was refused
    source = dict(recipe.fields)[role]
    opening, closing = _special(recipe.bos_id if opens else None), _special(recipe.eos_id if closes else None)
    found = Lists(*recipe.tokenizer.encode(_texts(source, rows, reasons), source.text, reasons))
    for row in np.flatnonzero(found.lengths == 0).tolist():
        reasons.add(row, f"{source.text} has no tokens")
    return joined([every(opening, rows.num_rows), found, every(closing, rows.num_rows)])


def _special(token: int | None) -> list[int]:
    return [] if token is None else [token]


def _end_to_end(arrays: Sequence[Ids]) -> tuple[Ids, Ids]:
    return np.concatenate([*arrays, np.zeros(0, np.int64)]), np.fromiter(map(len, arrays), np.int64, len(arrays))


def _texts(source: Field, rows: pa.RecordBatch, reasons: Reasons) -> list[str]:
    """The field's texts, "" for a bad one."""
    texts: list[str] = []
    found = raw_texts(source.array(rows))
    nulls = source.nulls(rows) if source.is_template and found.null_count else {}
    for row, raw in enumerate(found.to_pylist()):
        text, reason = _text(raw)
        if raw is None and nulls:
            names = [name for name, are_null in nulls.items() if are_null[row]]
            reason = f"is null, as {' and '.join(names)} {'is' if len(names) == 1 else 'are'} in this row"
        if reason:
            reasons.add(row, f"{source.text} {reason}")
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
