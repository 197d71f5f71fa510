"""Messages of a chat: their required keys, their text, and their deeds: tool calls and thoughts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.text import cut

Message = Mapping[str, Any]

_REASONING = ("reasoning_content", "thinking", "reasoning")  # data has one of these keys, templates read one of the first two
CALLS = ("tool_calls", "function_call")
DEEDS = (*CALLS, *_REASONING)


class TemplateError(ValueError):
    """A chat template cannot be used for any chat; the message gives the reason and the remedy."""


class ChatError(ValueError):
    """A chat cannot be rendered; the message continues after the name of its row."""


def checked(number: int, message: object) -> Message:
    """Return a message without null keys, as transformers gives it to templates, with thoughts under all their names.

    Raises ChatError: `message`, the one of that number, is not a message, has no role, or has neither content nor deeds.
    """
    plain = {key: value for key, value in message.items() if value is not None} if isinstance(message, Mapping) else {}
    if not isinstance(plain.get("role"), str):
        raise ChatError(f"has a chat whose message {number} has no role")
    if not isinstance(plain.get("content"), (str, list)) and not any(plain.get(name) for name in DEEDS):
        raise ChatError(f"has a chat whose message {number} has no content")
    if plain["role"] == "assistant" and plain.get("weight", 1) not in (0, 1):
        raise ChatError(
            f"has a chat whose message {number} has the weight {cut(repr(plain['weight']), 40)}: use 0 or 1, or leave it out"
        )
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def has_loss(message: Message) -> bool:
    """Return whether a message of the assistant may have loss: not with a weight of 0."""
    return message["role"] == "assistant" and message.get("weight") != 0


def content_of(message: Message) -> str | None:
    """Return the text of a message; None if it has other parts, or no text."""
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        content = "".join(part["text"] for part in content)
    return content.strip() if isinstance(content, str) and (content.strip() or not message.get("tool_calls")) else None


def silenced(message: Message, deeds: Sequence[str]) -> Message:
    """Return a message of the assistant without these deeds, if it says nothing."""
    if message["role"] != "assistant" or has_words(message) or not any(message.get(name) for name in deeds):
        return message
    return without(message, deeds)


def without(message: Message, deeds: Sequence[str]) -> Message:
    """Return a message without these deeds."""
    return {key: value for key, value in message.items() if key not in deeds}


def says_something(message: Message) -> bool:
    """Return whether a message has more than blanks in it, or calls a tool, or thinks."""
    return has_words(message) or any(message.get(name) for name in DEEDS)


def has_words(message: Message) -> bool:
    """Return whether a message has more than blanks in it."""
    content = message.get("content")
    return not all(map(_is_blank, content if isinstance(content, list) else [content]))


def _is_blank(part: Any) -> bool:
    """Return whether a content, or a part of one, is only blanks; an image or a call is not."""
    if isinstance(part, dict) and part.get("type", "text") == "text":
        part = part.get("text")
    return part is None or (isinstance(part, str) and not part.strip())
