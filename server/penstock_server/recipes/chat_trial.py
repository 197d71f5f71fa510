"""Text that a chat template writes around an answer, found with a trial chat whose answers are known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from penstock_server.recipes.messages import ChatError, Message, TemplateError

ANSWER = "An answer."
_ASKED = ({"role": "user", "content": "Who is there?"},)
ANSWERED = (*_ASKED, {"role": "assistant", "content": ANSWER})
_ASKED_AGAIN = (*ANSWERED, {"role": "user", "content": "And now?"})
OPENINGS: tuple[tuple[Message, ...], ...] = ((), ({"role": "system", "content": "Be kind."},))  # some templates demand one
_TOKEN = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


class Write(Protocol):
    """Renderer of chats with given tools: see ChatTemplate. Raises ChatError: the template fails."""

    def __call__(self, chat: Sequence[Message], *, prompt: bool = False, marks: tuple[str, str] = ("", "")) -> str:
        """Render a chat, with or without a prompt for an answer; `marks` surround the text of generation tags."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Text that a template writes around an answer.

    prompt  the prompt for an answer; "" without one
    tail    after the end of a chat, such as the EOS of Phi-3
    behind  between an answer and the tail
    closes  whether that is more than blanks; True if the template refuses all trial chats, and nothing is known
    opening the messages before the question
    """

    prompt: str = ""
    tail: str = ""
    behind: str = ""
    closes: bool = True
    opening: tuple[Message, ...] = ()


def try_out(write: Write) -> Trial:
    """Find the text that a template writes around an answer. Raises TemplateError: it writes today's date."""
    for opening in OPENINGS:
        try:
            return _tried(write, opening)
        except ChatError as error:
            if "'strftime_now' is undefined" in str(error):
                raise TemplateError(
                    "the chat template writes today's date (strftime_now), and a batch must be the same on every day. "
                    "Write a date into it."
                ) from error
    return Trial()


def _tried(write: Write, opening: tuple[Message, ...]) -> Trial:
    asked, prompted = write([*opening, *_ASKED]), write([*opening, *_ASKED], prompt=True)
    once = again = write([*opening, *ANSWERED])
    with suppress(ChatError):  # some templates render only one question and its answer
        again = write([*opening, *_ASKED_AGAIN])
    end = num_alike(once, again)
    for token in _TOKEN.finditer(once):  # two tokens may share a prefix
        end = token.start() if token.start() < end < token.end() else end
    tail = once[end:] if again.endswith(once[end:]) else ""
    asked = asked.removesuffix(tail)
    behind = once.removesuffix(tail).rpartition(ANSWER)[2]
    prompt = prompted[len(asked) :] if prompted.startswith(asked) else ""
    return Trial(prompt, tail, behind, bool(behind.strip()), opening)


def num_alike(a: str, b: str) -> int:
    """Return the length of the common prefix of two texts."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
