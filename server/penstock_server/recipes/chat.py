"""Chats: what a tokenizer's own template makes of messages, and which part of it the assistant says.

A template may mark what the assistant says with {% generation %} and {% endgeneration %}. In one that does not, it is what a
message of the assistant adds to the chat before it with the prompt to answer; that is told only of templates that render
a chat as the beginning of the same chat that goes on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import jinja2
from jinja2 import nodes

from penstock.wording import cut, one_line
from penstock_server.recipes import chat_sandbox
from penstock_server.recipes.chat_sandbox import BEGIN, END, Refused, Sandbox
from penstock_server.recipes.chat_trial import ANSWER, ANSWERED, num_alike, try_out
from penstock_server.recipes.messages import (
    CALLS,
    DEEDS,
    ChatError,
    Message,
    TemplateError,
    checked,
    content_of,
    has_words,
    idle,
    says_something,
    silenced,
    with_content,
)

Span = tuple[int, int]
_Tools = Sequence[Any] | None

_SANDBOX = Sandbox()
_MARKS = ("\ufdd0", "\ufdd1")  # noncharacters: no text has them
_WAY_OUT = "Mark what the assistant says in the template, with {% generation %} and {% endgeneration %}"
_LOST = "has a chat in which the assistant calls tools or thinks, and its template writes none of it"
_LONG = 64  # characters, and no header is: what begins with so many of an answer's is the answer


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as text. `spans` are the half-open ranges of characters that carry loss, in their order, disjoint, not empty."""

    text: str
    spans: tuple[Span, ...]


class ChatTemplate:
    """A tokenizer's chat template: a Jinja text, and the special tokens that it may write, by name, as `eos_token`.

    `with_tools` is the one for chats with tools, where a tokenizer has two. `takes_tools`: it looks at definitions of tools.
    `trial` is what it writes around an answer, as a chat of ours shows.

    Raises TemplateError: the text is no template, or needs what is not there.
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
        self.trial = try_out(self._write)

    @property
    def closes(self) -> bool:
        """Whether it ends what the assistant says with more than blanks, which teaches a model to stop."""
        closes = self.trial.closes or bool(self.trial.tail.strip())
        return closes and (self._with_tools is None or self._with_tools.closes)

    @cached_property
    def leaves_end_out(self) -> bool:
        """Whether it marks what the assistant says without what ends it, so that nothing teaches a model to stop."""
        if self._with_tools and self._with_tools.leaves_end_out:
            return True
        if not self._is_marked or not self.closes:
            return False
        try:
            rendered = self._render_marked([*self.trial.opening, *ANSWERED])
        except ChatError:
            return False
        return any(rendered.text[slice(*span)].rstrip().endswith(ANSWER) for span in rendered.spans[-1:])

    @property
    def digest(self) -> str:
        """A hash of all that the rendering and its loss depend on beside the messages."""
        parts: list[object] = ["penstock chat v7", self._text, sorted(self._special_tokens.items())]
        content = json.dumps([*parts, self._with_tools.digest] if self._with_tools else parts)
        return blake2b(content.encode(), digest_size=16).hexdigest()

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = (), first: int = 0) -> Rendered:
        """The chat as text, and the spans of it that carry loss: what the assistant says and the mark that ends its turn.

        `tools` are the definitions of those that the assistant may call. In the messages before the `first` nothing is learned.

        Raises ChatError: the template refuses the chat or fails on it, or what the assistant says cannot be told.
        """
        if tools and self._with_tools:
            return self._with_tools.render(messages, tools, first)
        chat = [checked(number, message) for number, message in enumerate(messages)]
        if not chat:
            raise ChatError("has a chat without messages")
        try:
            return self._rendered(chat, tools or None, first)
        except ChatError:
            if all("content" in message for message in chat):
                raise
            # A few templates ask whether the content of a call is none; others would write "None".
            null, empty = (list[Message]({"content": content, **message} for message in chat) for content in (None, ""))
            with suppress(ChatError):
                rendered = self._rendered(null, tools or None, first)
                allowed = self._write(empty, tools or None).count("None") + json.dumps(chat, default=str).count("None")
                if rendered.text.count("None") <= allowed:
                    return rendered
            raise

    def _rendered(self, chat: list[Message], tools: _Tools, first: int) -> Rendered:
        rendered = self._render_marked(chat, tools, first) if self._is_marked else self._render_in_steps(chat, tools, first)
        self._check_is_written(chat, tools, rendered.text)
        return rendered

    def _check_is_written(self, chat: Sequence[Message], tools: _Tools, text: str) -> None:
        """Raises ChatError: the chat would be the same text without what the assistant does where it says nothing.

        That is calls; or calls and thoughts, since many templates leave earlier thoughts out. Likewise without all parts of
        contents that are lists, where it would write them as texts.
        """
        of_calls, of_deeds = ([silenced(message, deeds) for message in chat] for deeds in (CALLS, DEEDS))
        if self._is_same(of_calls, chat, tools, text) or self._is_same(of_deeds, of_calls, tools, text):
            raise ChatError(_LOST)
        if self._is_same([with_content(message, "") for message in chat], chat, tools, text) and not self._is_same(
            [with_content(message, content_of(message) or "") for message in chat], chat, tools, text
        ):
            raise ChatError("has a chat with contents that are lists, and its template writes nothing of them: make them texts")

    def _is_same(self, others: Sequence[Message], known: Sequence[Message], tools: _Tools, text: str) -> bool:
        """Whether others than those that are known make the same text."""
        with suppress(ChatError):
            return list(others) != list(known) and self._write(others, tools) == text
        return False

    def _render_marked(self, chat: list[Message], tools: _Tools = None, first: int = 0) -> Rendered:
        text, spans = self._marked(chat, tools)
        if not any(message["role"] == "assistant" for message in chat[:first]):
            return Rendered(text, spans)
        # Which spans are of which message the marks do not tell: as many as there are just before the next answer.
        asked = list(takewhile(lambda message: message["role"] != "assistant", chat[first:]))
        before, known = self._marked([*chat[:first], *asked], tools)
        said, said_before = ([whole[slice(*span)] for span in some] for whole, some in ((text, spans), (before, known)))
        if asked and said[: len(known)] != said_before:  # without a question between them one answer may end with the other
            raise ChatError(
                "has a chat whose template changes what the assistant said in the prompt when the chat goes on, "
                "so that what is learned cannot be told"
            )
        return Rendered(text, spans[len(known) :])

    def _marked(self, chat: list[Message], tools: _Tools) -> tuple[str, tuple[Span, ...]]:
        text = self._write(chat, tools)
        marked = self._write(chat, tools, marks=_MARKS)
        begin, end = _MARKS
        if begin in text or end in text:
            raise ChatError("has a chat with U+FDD0 or U+FDD1 in it, which are no characters")
        spans: list[Span] = []
        at = depth = start = 0
        for piece in re.split(f"([{begin}{end}])", marked):
            if piece == begin:
                start = at if depth == 0 else start
                depth += 1
            elif piece == end:
                depth -= 1
                if depth == 0 and start < at:
                    spans.append((start, at))
            else:
                at += len(piece)
        if depth or marked.replace(begin, "").replace(end, "") != text:
            raise ChatError("has a chat whose template looks at or leaves its {% generation %}: put it around what is written")
        return text, tuple(spans)

    def _render_in_steps(self, chat: list[Message], tools: _Tools, first: int) -> Rendered:
        spans: list[Span] = []
        step = longest = text = ""  # of all steps the longest, which the others begin: of a long chat all of them are gigabytes
        goes_on = True
        for number, message in enumerate(chat):
            if message["role"] == "assistant" and number >= first:
                text = self._write(chat[: number + 1], tools)
                before = self._before(chat[:number], text, tools)
                step = text.removesuffix(self.trial.tail)
                goes_on = goes_on and (step.startswith(longest) or longest.startswith(step))
                longest = max(longest, step, key=len)
                if not step.startswith(before):
                    raise ChatError(f"has a chat whose template does not begin message {number} as it asks for it. {_WAY_OUT}")
                said = self._without_blanks_behind_the_end(step[len(before) :], message)
                prompted = self.trial.prompt and before.endswith(self.trial.prompt)
                if not prompted and not self._begins_at_once(said, message, chat[:number], before, tools):
                    raise ChatError(
                        f"has a chat whose template does not prompt for message {number} with add_generation_prompt. {_WAY_OUT}"
                    )
                if says_something(message) and said.strip() == self.trial.behind.strip():
                    raise ChatError(
                        _LOST if not has_words(message) else f"has a chat whose template writes nothing of message {number}"
                    )
                spans.append((len(before), len(before) + len(said)))
        if chat[-1]["role"] != "assistant":
            text = self._write(chat, tools)
        elif self.trial.tail.strip() and text.endswith(self.trial.tail) and not self.trial.closes and spans:
            # Nothing else teaches to stop.
            spans[-1] = (spans[-1][0], len(text.rstrip()))
        if not (goes_on and text.startswith(longest)):
            raise ChatError(f"has a chat whose template changes what the assistant said when the chat goes on. {_WAY_OUT}")
        return Rendered(text, tuple((start, stop) for start, stop in spans if start < stop))

    def _before(self, chat: Sequence[Message], text: str, tools: _Tools) -> str:
        """What is written before an answer to a chat, which is written to `text` with it."""
        if chat:
            return self._write(chat, tools, prompt=True)
        # Of no messages at all many templates make nothing.
        others = (self._write([{"role": "assistant", "content": other}], tools) for other in "AB")
        before = text[: min(num_alike(text, other) for other in others)]
        begin, prompt, blanks = before.rpartition(self.trial.prompt) if self.trial.prompt else (before, "", "")
        if prompt != self.trial.prompt or blanks.strip():
            raise ChatError(f"has a chat that begins with the assistant, and its template does not prompt for that. {_WAY_OUT}")
        return begin + prompt

    def _begins_at_once(self, said: str, message: Message, chat: Sequence[Message], before: str, tools: _Tools) -> bool:
        """Whether what is said begins right behind the chat before it, without a header that a prompt should have written.

        That is told by a plain answer in its place, but for a long one, which is told by itself.
        """
        content = content_of(message)
        if content and len(content) > _LONG and said.lstrip().startswith(content):
            return True
        plain = [{"type": "text", "text": ANSWER}] if isinstance(message.get("content"), list) else ANSWER
        try:
            text = self._write([*chat, {**idle(message), "content": plain}], tools)
        except ChatError:  # as of templates that want answers of some kind
            return bool(content) and said.lstrip().startswith(content or "")
        return text.startswith(before) and text[len(before) :].lstrip().startswith(ANSWER)

    def _write(
        self, chat: Sequence[Message], tools: _Tools = None, *, prompt: bool = False, marks: tuple[str, str] = ("", "")
    ) -> str:
        variables = {
            **self._special_tokens,
            "messages": chat,
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
        except MemoryError:  # as a bad row it would be kept, and be one when there is memory again
            raise
        except Exception as error:  # a template is a program, and fails like one
            raise ChatError(f"has a chat that its template fails on: {_reason(error)}") from error

    def _without_blanks_behind_the_end(self, said: str, message: Message) -> str:
        """What the assistant says up to the mark that ends it. Where blanks are all that ends it, they are the mark."""
        if not self.trial.closes:
            return said
        content, stripped = content_of(message), said.rstrip()
        if content is None:
            return stripped
        if said.lstrip().startswith(content):
            return stripped if said.lstrip()[len(content) :].strip() else said
        return said if stripped.endswith(content) else stripped


def _reason(error: Exception) -> str:
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    return cut(kind + one_line(error), 200)
