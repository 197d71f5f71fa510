"""Messages of a chat: their checks, what the assistant says in them, and the form that a template takes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from penstock.text import cut
from penstock_server.recipes.fields import RecipeError

Message = Mapping[str, Any]
Form = Literal["text", "nested"]

OPENINGS: tuple[tuple[Message, ...], ...] = ((), ({"role": "system", "content": "Be kind."},))  # some templates demand one
_REASONING = ("reasoning_content", "thinking", "reasoning")  # data has one of these keys, templates read one of the first two
_DEEDS = ("tool_calls", "function_call", *_REASONING)
_WORDS = "Who is there?"
_PARTS = [{"type": "text", "text": _WORDS}]
_ARGUMENTS = {"city": "Rome"}
_AS_PYTHON_OR_JSON = re.compile(r"""['"]text\\?['"]""")
_AS_JSON = re.compile(r'(?<!\\)"city": ?"Rome"')


class TemplateError(RecipeError):
    """A chat template cannot be used for any chat; the message gives the reason and the remedy."""


class ChatError(ValueError):
    """A chat cannot be rendered; the message continues after the name of its row."""


class Write(Protocol):
    """Renderer of chats with given tools: see ChatTemplate. Raises ChatError: the template fails."""

    def __call__(self, chat: Sequence[Message], *, prompt: bool = False, marks: tuple[str, str] = ("", "")) -> str:
        """Render a chat, with or without a prompt for an answer; `marks` surround the text of generation tags."""


def checked(number: int, message: object) -> Message:
    """Return a message without null keys, and with its reasoning under each name that templates use.

    Raises ChatError: it cannot be rendered.
    """
    plain = {key: value for key, value in message.items() if value is not None} if isinstance(message, Mapping) else {}
    if not isinstance(plain.get("role"), str):
        raise ChatError(f"has a chat whose message {number} has no role")
    if not isinstance(plain.get("content"), (str, list)) and not any(plain.get(name) for name in _DEEDS):
        raise ChatError(f"has a chat whose message {number} has no content")
    if plain["role"] == "assistant" and plain.get("weight", 1) not in (0, 1):
        weight = cut(repr(plain["weight"]), 40)
        raise ChatError(f"has a chat whose message {number} has the weight {weight}: use 0 or 1, or leave it out")
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def has_loss(message: Message) -> bool:
    """Return whether a message of the assistant may have loss: not with a weight of 0."""
    return message["role"] == "assistant" and message.get("weight") != 0


def text_of(message: Message) -> str | None:
    """Return the content of a message that is a text, or a list of texts alone; None for any other."""
    content = message.get("content")
    if isinstance(content, list) and all(map(_is_text_part, content)):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else None


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and "text" in str(part.get("type", "text")) and isinstance(part.get("text"), str)


def says_something(message: Message) -> bool:
    """Return whether a message has more than blanks in it, or calls a tool, or thinks."""
    content = message.get("content")
    is_blank = all(map(_is_blank, content if isinstance(content, list) else [content]))
    return not is_blank or any(message.get(name) for name in _DEEDS)


def _is_blank(part: Any) -> bool:
    """Return whether a content, or a part of one, is only blanks; an image or a call is not."""
    if _is_text_part(part) or (isinstance(part, dict) and part.get("type", "text") == "text"):
        part = part.get("text")
    return part is None or (isinstance(part, str) and not part.strip())


@dataclass(frozen=True, slots=True)
class Forms:
    """Form that a template takes: JSON text, or nested objects and lists. Otherwise messages stay as they are.

    contents      by role: "text", or "nested" for lists of parts
    arguments     of calls: "text" for JSON text, or "nested" for objects
    drops_system  whether it drops the text of a system message
    """

    contents: Mapping[str, Form] = field(default_factory=dict)
    arguments: Form | None = None
    drops_system: bool = False

    def of(self, number: int, message: Message) -> Message:
        """Convert a message to the form that the template takes. Raises ChatError: its content has parts that are not text."""
        made = dict(message)
        form, content = self.contents.get(message["role"]), message.get("content")
        if form == "nested" and isinstance(content, str):
            made["content"] = [{"type": "text", "text": content}]
        if form == "text" and isinstance(content, list):
            if (text := text_of(message)) is None:
                what = f"message {number} has contents that are not text, and its template takes text alone"
                raise ChatError(f"has a chat whose {what}: use another template, or make them texts with a transform")
            made["content"] = text
        if self.arguments and isinstance(calls := message.get("tool_calls"), list):
            made["tool_calls"] = [self._call(call) for call in calls]
        return made

    def _call(self, call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(function := call.get("function"), dict):
            return {**call, "function": self._call(function)}
        arguments = call.get("arguments")
        if self.arguments == "text" and isinstance(arguments, dict):
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False, default=str)}
        if self.arguments == "nested" and isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                parsed = json.loads(arguments)
                return {**call, "arguments": parsed} if isinstance(parsed, dict) else call
        return call


def find_forms(write: Write) -> Forms:
    """Find the forms that a template takes with small chats. `write` must pass chats unchanged."""
    contents: dict[str, Form] = {}
    asked: list[Message] = [{"role": "user", "content": "Hello."}]
    for role in ("user", "assistant", "system"):
        before, after = (asked if role == "assistant" else []), (asked if role == "system" else [])
        as_text, as_parts = (
            _written(write, [*before, {"role": role, "content": content}, *after]) for content in (_WORDS, _PARTS)
        )
        form = _form(_WORDS in as_text, _WORDS in as_parts and not _AS_PYTHON_OR_JSON.search(as_parts))
        if form:
            contents[role] = form
        if form == "nested" and role == "user":
            asked = [{"role": "user", "content": [{"type": "text", "text": "Hello."}]}]
    if "user" in contents:
        contents |= dict.fromkeys(("tool", "developer"), contents["user"])
    takes = []
    for arguments in (json.dumps(_ARGUMENTS), _ARGUMENTS):
        call = {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        text = _written(write, [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}])
        takes.append(bool(_AS_JSON.search(text)))
    return Forms(contents, _form(*takes), drops_system="system" not in contents and bool(as_text) and _WORDS not in as_text)


def _form(takes_text: bool, takes_nested: bool) -> Form | None:
    return None if takes_text == takes_nested else "text" if takes_text else "nested"


def _written(write: Write, chat: Sequence[Message]) -> str:
    """Render a chat after the first opening that the template accepts; "" if it accepts none."""
    for opening in OPENINGS:
        with suppress(ChatError):
            return write([*opening, *chat])
    return ""
