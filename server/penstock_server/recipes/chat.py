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
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import jinja2
from jinja2 import nodes

from penstock.wording import cut, one_line
from penstock_server.recipes import chat_sandbox
from penstock_server.recipes.chat_sandbox import BEGIN, END, Refused, Sandbox
from penstock_server.recipes.messages import ChatError, Message, checked, content_of, silenced

Span = tuple[int, int]
_Tools = Sequence[Any] | None

_SANDBOX = Sandbox()
_MARKS = ("\ufdd0", "\ufdd1")  # noncharacters: no text has them
_WAY_OUT = "Mark what the assistant says in the template, with {% generation %} and {% endgeneration %}"
_TOKEN = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_ASKED = ({"role": "user", "content": "Who is there?"},)
_ANSWERED = (*_ASKED, {"role": "assistant", "content": "An answer."})
_ASKED_AGAIN = (*_ANSWERED, {"role": "user", "content": "And now?"})


class TemplateError(ValueError):
    """A chat template cannot be used, whatever the chat; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as text. `spans` are the half-open ranges of characters that carry loss, in their order, disjoint, not empty."""

    text: str
    spans: tuple[Span, ...]


class ChatTemplate:
    """A tokenizer's chat template: a Jinja text, and the special tokens that it may write, by name, as `eos_token`.

    `with_tools` is the one for chats with tools, where a tokenizer has two. `takes_tools`: it looks at definitions of tools.
    `trial` is what it makes of a chat of ours, "" if it refuses that.

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
        self._prompt, self._tail, self._closes_turns, self.trial = self._try_out()

    @property
    def closes(self) -> bool:
        """Whether it ends what the assistant says with more than blanks, which teaches a model to stop."""
        closes = self._closes_turns or bool(self._tail.strip())
        return closes and (self._with_tools is None or self._with_tools.closes)

    @property
    def digest(self) -> str:
        """A hash of all that the rendering and its loss depend on beside the messages."""
        parts: list[object] = ["penstock chat v6", self._text, sorted(self._special_tokens.items())]
        content = json.dumps([*parts, self._with_tools.digest] if self._with_tools else parts)
        return blake2b(content.encode(), digest_size=16).hexdigest()

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Rendered:
        """The chat as text, and the spans of it that carry loss: what the assistant says and the mark that ends its turn.

        `tools` are the definitions of those that the assistant may call.

        Raises ChatError: the template refuses the chat or fails on it, or what the assistant says cannot be told.
        """
        if tools and self._with_tools:
            return self._with_tools.render(messages, tools)
        chat = [checked(number, message) for number, message in enumerate(messages)]
        if not chat:
            raise ChatError("has a chat without messages")
        try:
            return self._rendered(chat, tools or None)
        except ChatError:
            if all("content" in message for message in chat):
                raise
            # A few templates ask whether the content of a call is none, where others would write None.
            with suppress(ChatError):
                return self._rendered([{"content": None, **message} for message in chat], tools or None)
            raise

    def _rendered(self, chat: list[Message], tools: _Tools) -> Rendered:
        rendered = self._render_marked(chat, tools) if self._is_marked else self._render_in_steps(chat, tools)
        if self._loses_what_it_does(chat, tools, rendered.text):
            raise ChatError("has a chat in which the assistant calls tools or thinks, and its template writes none of it")
        return rendered

    def _loses_what_it_does(self, chat: Sequence[Message], tools: _Tools, text: str) -> bool:
        """Whether the chat would be the same text without what the assistant does where it says nothing: calls and thoughts."""
        others = [silenced(message) for message in chat]
        if others == list(chat):
            return False
        with suppress(ChatError):
            return self._write(others, tools) == text
        return False

    def _render_marked(self, chat: list[Message], tools: _Tools) -> Rendered:
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
        return Rendered(text, tuple(spans))

    def _render_in_steps(self, chat: list[Message], tools: _Tools) -> Rendered:
        spans: list[Span] = []
        step = longest = text = ""  # of all steps the longest, which the others begin: of a long chat all of them are gigabytes
        goes_on = True
        for number, message in enumerate(chat):
            if message["role"] == "assistant":
                text = self._write(chat[: number + 1], tools)
                before = self._before(chat[:number], text, message, tools)
                step = text.removesuffix(self._tail)
                goes_on = goes_on and (step.startswith(longest) or longest.startswith(step))
                longest = max(longest, step, key=len)
                if not step.startswith(before):
                    raise ChatError(f"has a chat whose template does not begin message {number} as it asks for it. {_WAY_OUT}")
                said = self._without_blanks_behind_the_end(step[len(before) :], message)
                prompted = self._prompt and before.endswith(self._prompt)
                if not prompted and not self._begins_at_once(said, message, chat[:number], before, tools):
                    raise ChatError(
                        f"has a chat whose template does not prompt for message {number} with add_generation_prompt. {_WAY_OUT}"
                    )
                spans.append((len(before), len(before) + len(said)))
        if chat[-1]["role"] != "assistant":
            text = self._write(chat, tools)
        elif self._tail.strip() and text.endswith(self._tail) and not self._closes_turns:  # nothing else teaches to stop
            spans[-1] = (spans[-1][0], len(text.rstrip()))
        if not (goes_on and text.startswith(longest)):
            raise ChatError(f"has a chat whose template changes what the assistant said when the chat goes on. {_WAY_OUT}")
        return Rendered(text, tuple((start, stop) for start, stop in spans if start < stop))

    def _before(self, chat: Sequence[Message], text: str, answer: Message, tools: _Tools) -> str:
        """What is written before an answer to a chat, which is written to `text` with it."""
        if chat:
            return self._write(chat, tools, prompt=True)
        # Of no messages at all many templates make nothing.
        other = "B" if (content_of(answer) or "").startswith("A") else "A"
        before = text[: _num_alike(text, self._write([{"role": "assistant", "content": other}], tools))]
        begin, prompt, blanks = before.rpartition(self._prompt) if self._prompt else (before, "", "")
        if prompt != self._prompt or blanks.strip():
            raise ChatError(f"has a chat that begins with the assistant, and its template does not prompt for that. {_WAY_OUT}")
        return begin + prompt

    def _begins_at_once(self, said: str, message: Message, chat: Sequence[Message], before: str, tools: _Tools) -> bool:
        """Whether what is said begins right behind the chat before it, without a header that a prompt should have written.

        Of calls and of nothing that is told by a plain answer in their place.
        """
        if content := content_of(message):
            return said.lstrip().startswith(content)
        answer = _ANSWERED[-1]["content"]
        try:
            text = self._write([*chat, {"role": "assistant", "content": answer}], tools)
        except ChatError:
            return False
        return text.startswith(before) and text[len(before) :].lstrip().startswith(answer)

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
        content, stripped = content_of(message), said.rstrip()
        if content is None:
            return stripped if self._closes_turns else said
        if said.lstrip().startswith(content):
            return stripped if said.lstrip()[len(content) :].strip() else said
        return said if stripped.endswith(content) else stripped

    def _try_out(self) -> tuple[str, str, bool, str]:
        """What the template writes to prompt for an answer, and after a chat that ends, as Phi-3 does an EOS; "" for nothing.

        And whether it writes more than blanks between an answer and that; and all that it wrote.

        Raises TemplateError: it writes today's date.
        """
        try:
            asked, prompted = self._write(_ASKED), self._write(_ASKED, prompt=True)
            once, again = self._write(_ANSWERED), self._write(_ASKED_AGAIN)
        except ChatError as error:
            if "'strftime_now' is undefined" not in str(error):
                return "", "", True, ""
            raise TemplateError(
                "the chat template writes today's date (strftime_now), and a batch must be the same on every day. "
                "Write a date into it."
            ) from error
        end = _num_alike(once, again)
        for token in _TOKEN.finditer(once):  # two tokens may begin alike
            end = token.start() if token.start() < end < token.end() else end
        tail = once[end:] if again.endswith(once[end:]) else ""
        asked = asked.removesuffix(tail)
        _, _, behind = once.removesuffix(tail).rpartition(_ANSWERED[-1]["content"])
        prompt = prompted[len(asked) :] if prompted.startswith(asked) else ""
        return prompt, tail, bool(behind.strip()), prompted + again


def _num_alike(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _reason(error: Exception) -> str:
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    return cut(kind + one_line(error), 200)
