"""Chats: messages rendered by a tokenizer's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

import jinja2
from jinja2 import nodes

from penstock.text import cut, one_line
from penstock_server.recipes import chat_sandbox
from penstock_server.recipes.chat_forms import Forms, find_forms
from penstock_server.recipes.chat_sandbox import BEGIN, END, Refused, Sandbox
from penstock_server.recipes.chat_spans import LOST, Rendered, rendered_by_marks, rendered_in_steps
from penstock_server.recipes.chat_trial import ANSWER, ANSWERED, Write, try_out
from penstock_server.recipes.messages import (
    CALLS,
    DEEDS,
    ChatError,
    Message,
    TemplateError,
    checked,
    content_of,
    has_loss,
    silenced,
)

_SANDBOX = Sandbox()


class ChatTemplate:
    """Chat template of a tokenizer: a Jinja text, and the special tokens that it may write, by name, such as `eos_token`.

    `with_tools` is the template for chats with tools, if a tokenizer has two. `takes_tools`: it reads tool definitions.
    `trial` is the text that it writes around an answer, found with a chat of ours.

    Raises TemplateError: the text is not a template, or refers to something missing.
    """

    def __init__(self, *, text: str, special_tokens: Mapping[str, str], with_tools: ChatTemplate | None = None) -> None:
        self._text, self._special_tokens, self._with_tools = text, special_tokens, with_tools
        try:
            tree = _SANDBOX.parse(text)
            self._template = _SANDBOX.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is wrong in line {error.lineno}: {error.message}.") from error
        except (SyntaxError, RecursionError) as error:
            raise TemplateError(f"the chat template cannot be compiled: {error}.") from error
        names = {name.name for name in tree.find_all(nodes.Name)}
        self._is_marked, self.takes_tools = BEGIN in names, "tools" in names or with_tools is not None
        self.forms = Forms()  # pass messages unchanged until find_forms has run
        self.forms = find_forms(self._write)
        self.trial = try_out(self._write)

    @property
    def closes(self) -> bool:
        """Return whether the template ends an answer with more than blanks, which teaches a model to stop."""
        closes = self.trial.closes or bool(self.trial.tail.strip())
        return closes and (self._with_tools is None or self._with_tools.closes)

    @cached_property
    def leaves_end_out(self) -> bool:
        """Return whether its generation marks exclude the end of an answer, so that nothing teaches a model to stop."""
        if self._with_tools and self._with_tools.leaves_end_out:
            return True
        if not self._is_marked or not self.closes:
            return False
        try:
            rendered = rendered_by_marks(self._write, [*self.trial.opening, *ANSWERED])
        except ChatError:
            return False
        return any(rendered.text[slice(*span)].rstrip().endswith(ANSWER) for span in rendered.spans[-1:])

    @property
    def digest(self) -> str:
        """Return a hash of everything but the messages that the rendered text and its loss depend on."""
        parts: list[object] = ["penstock chat v8", self._text, sorted(self._special_tokens.items())]
        content = json.dumps([*parts, self._with_tools.digest] if self._with_tools else parts)
        return blake2b(content.encode(), digest_size=16).hexdigest()

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = (), first: int = 0) -> Rendered:
        """Render a chat as text, with the spans that have loss: the assistant's answers and the mark that ends each turn.

        `tools` are the definitions of callable tools. No token of the messages before the `first` has loss.

        Raises ChatError: the template refuses the chat or fails on it, or the answers cannot be located in the text.
        """
        if tools and self._with_tools:
            return self._with_tools.render(messages, tools, first)
        chat = [checked(number, message) for number, message in enumerate(messages)]
        if not chat:
            raise ChatError("has a chat without messages")
        write = partial(self._write, tools=tools or None)
        try:
            return self._rendered(write, chat, first)
        except ChatError:
            if all("content" in message for message in chat):
                raise
            # A few templates test whether the content of a call is null; others would write "None".
            null, empty = (list[Message]({"content": content, **message} for message in chat) for content in (None, ""))
            with suppress(ChatError):
                rendered = self._rendered(write, null, first)
                allowed = write(empty).count("None") + json.dumps(chat, default=str).count("None")
                if rendered.text.count("None") <= allowed:
                    return rendered
            raise

    def _rendered(self, write: Write, chat: list[Message], first: int) -> Rendered:
        if self._is_marked:
            rendered = rendered_by_marks(write, chat, first)
        else:
            rendered = rendered_in_steps(write, self.trial, chat, first)
        _check_is_written(write, chat, rendered.text, first)
        return rendered

    def _write(
        self,
        chat: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        prompt: bool = False,
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        variables = {
            **self._special_tokens,
            "messages": [self.forms.of(number, message) for number, message in enumerate(chat)],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
            BEGIN: marks[0],
            END: marks[1],
        }
        try:
            return chat_sandbox.render(self._template, variables)
        except Refused as error:
            raise ChatError(f"has a chat that its template refuses: {_reason(error)}") from error
        except MemoryError:  # as a bad row it would stay bad when memory is free again
            raise
        except Exception as error:  # a template is a program, and may raise anything
            raise ChatError(f"has a chat that its template fails on: {_reason(error)}") from error


def _check_is_written(write: Write, chat: list[Message], text: str, first: int) -> None:
    """Check that the text depends on what the assistant does and says.

    Raises ChatError: the text is the same without the calls of messages that say nothing, or without their calls and
    thoughts, since many templates leave earlier thoughts out. Likewise without the words of a message from the `first` on.
    """
    without_calls, without_deeds = ([silenced(message, deeds) for message in chat] for deeds in (CALLS, DEEDS))
    if _is_same(write, without_calls, chat, text) or _is_same(write, without_deeds, without_calls, text):
        raise ChatError(LOST)
    for number, message in enumerate(chat[first:], first):
        words = content_of(message)
        if not has_loss(message) or not words or words in text or any(map(message.get, DEEDS)):
            continue
        others = [*chat[:number], {**message, "content": ""}, *chat[number + 1 :]]
        if _is_same(write, others, chat, text):
            raise ChatError(
                f"has a chat whose template writes nothing of message {number}: use a template that writes what the assistant "
                f"says"
            )


def _is_same(write: Write, others: list[Message], known: list[Message], text: str) -> bool:
    """Return whether messages that differ from the known ones make the same text."""
    with suppress(ChatError):
        return others != known and write(others) == text
    return False


def _reason(error: Exception) -> str:
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    return cut(kind + one_line(error), 200)
