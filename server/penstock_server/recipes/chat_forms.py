"""Forms of contents and arguments that a chat template takes, found with small chats, and messages in those forms.

A template of a text model may write a list of parts as Python spells it, one of a vision model may skip plain texts. Likewise
one template quotes arguments that are JSON text, and another writes objects as Python spells them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock_server.recipes.chat_trial import OPENINGS, Write
from penstock_server.recipes.messages import ChatError, Message

Form = Literal["text", "nested"]

_WORDS = "Who is there?"
_PARTS = [{"type": "text", "text": _WORDS}]
_ARGUMENTS = {"city": "Rome"}
_AS_PYTHON_OR_JSON = re.compile(r"""['"]text\\?['"]""")
_AS_JSON = re.compile(r'(?<!\\)"city": ?"Rome"')


@dataclass(frozen=True, slots=True)
class Forms:
    """Form that a template takes. If it takes both, or nothing is known, messages stay as they are.

    contents       by role: "text", or "nested" for lists of parts
    arguments      of calls: "text" for JSON text, or "nested" for objects
    drops_system   whether it drops the text of a system message
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
            if not all(map(_is_text_part, content)):
                raise ChatError(
                    f"has a chat whose message {number} has contents that are not text, and its template takes text alone: use "
                    f"a template that takes lists of parts, or make them texts with a transform"
                )
            made["content"] = "".join(part["text"] for part in content)
        if self.arguments and isinstance(calls := message.get("tool_calls"), list):
            made["tool_calls"] = [self._call(call) for call in calls]
        return made

    def _call(self, call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(function := call.get("function"), dict):
            return {**call, "function": self._call(function)}
        given = call.get("arguments")
        if self.arguments == "text" and isinstance(given, dict):
            return {**call, "arguments": json.dumps(given, ensure_ascii=False, default=str)}
        if self.arguments == "nested" and isinstance(given, str):
            try:
                parsed = json.loads(given)
            except (ValueError, RecursionError):
                return call
            return {**call, "arguments": parsed} if isinstance(parsed, dict) else call
        return call


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and "text" in part.get("type", "text") and isinstance(part.get("text"), str)


def find_forms(write: Write) -> Forms:
    """Find the forms that a template takes. `write` must pass chats unchanged."""
    contents: dict[str, Form] = {}
    asked: list[Message] = []
    question = ""
    for role in ("user", "assistant", "system"):
        before = asked if role == "assistant" else []
        after = asked if role == "system" else []
        as_text, as_parts = (
            _written(write, [*before, {"role": role, "content": content}, *after], drop=role == "system")
            for content in (_WORDS, _PARTS)
        )
        is_text = as_text is not None and as_text.count(_WORDS) > len(before + after)
        is_parts = (
            as_parts is not None and as_parts.count(_WORDS) > len(before + after) and not _AS_PYTHON_OR_JSON.search(as_parts)
        )
        if is_text != is_parts:
            contents[role] = "text" if is_text else "nested"
        if role == "user":
            asked = [{"role": role, "content": _PARTS if contents.get(role) == "nested" else _WORDS}]
        if role == "system":
            question = as_text or ""
    if "user" in contents:
        contents |= dict.fromkeys(("tool", "developer"), contents["user"])
    drops_system = bool(question) and "system" not in contents and question.count(_WORDS) == 1
    return Forms(contents, _form_of_arguments(write, asked), drops_system)


def _form_of_arguments(write: Write, asked: Sequence[Message]) -> Form | None:
    found = []
    for arguments in (json.dumps(_ARGUMENTS), _ARGUMENTS):
        call = {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        text = _written(write, [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}])
        found.append(text is not None and bool(_AS_JSON.search(text)))
    as_text, as_object = found
    return None if as_text == as_object else "text" if as_text else "nested"


def _written(write: Write, chat: Sequence[Message], *, drop: bool = False) -> str | None:
    """Render a chat, after an opening if the template demands one; None if it refuses all."""
    for opening in OPENINGS[: 1 if drop else None]:
        try:
            return write([*opening, *chat])
        except ChatError:
            continue
    return None
