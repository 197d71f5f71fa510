"""Messages of a chat: what one must have, what it says, and what it does beside that: calls of tools, and thoughts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.text import cut

Message = Mapping[str, Any]

_REASONING = ("reasoning_content", "thinking", "reasoning")  # data has it by one name, templates look for one of the first two
CALLS = ("tool_calls", "function_call")
DEEDS = (*CALLS, *_REASONING)


class TemplateError(ValueError):
    """A chat template cannot be used, whatever the chat; the message says why and what to do."""


class ChatError(ValueError):
    """A chat cannot be rendered; the message goes on after the name of its row."""


def checked(number: int, message: object) -> Message:
    """A message without its keys that are null, as transformers gives it to templates; thoughts under all their names.

    Raises ChatError: it is none, the message of that number, or has no role, or no content and does nothing.
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
    """Whether a message of the assistant may carry loss: not with a weight of 0."""
    return message["role"] == "assistant" and message.get("weight") != 0


def content_of(message: Message) -> str | None:
    """The text of a message; None where that is not all of it, or there is none."""
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        content = "".join(part["text"] for part in content)
    return content.strip() if isinstance(content, str) and (content.strip() or not message.get("tool_calls")) else None


def silenced(message: Message, deeds: Sequence[str]) -> Message:
    """A message of the assistant without some of what it does, if it says nothing."""
    if message["role"] != "assistant" or has_words(message) or not any(message.get(name) for name in deeds):
        return message
    return without(message, deeds)


def without(message: Message, deeds: Sequence[str]) -> Message:
    """A message that does none of these."""
    return {key: value for key, value in message.items() if key not in deeds}


def says_something(message: Message) -> bool:
    """Whether a message has more than blanks in it, or calls a tool, or thinks."""
    return has_words(message) or any(message.get(name) for name in DEEDS)


def has_words(message: Message) -> bool:
    """Whether a message has more than blanks in it."""
    content = message.get("content")
    return not all(map(_is_blank, content if isinstance(content, list) else [content]))


def _is_blank(part: Any) -> bool:
    """Whether a content, or a part of one, is nothing but blanks: not where it is an image or a call."""
    if isinstance(part, dict) and part.get("type", "text") == "text":
        part = part.get("text")
    return part is None or (isinstance(part, str) and not part.strip())
