"""What a chat template writes around an answer: found out by a chat of ours, of which it is known what the assistant says."""

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
    """What a template makes of a chat, given some tools: see ChatTemplate. Raises ChatError: nothing."""

    def __call__(self, chat: Sequence[Message], *, prompt: bool = False, marks: tuple[str, str] = ("", "")) -> str:
        """The text, with a prompt for an answer or without; `marks` are written around what is marked as generated."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a template writes around an answer.

    prompt  to ask for one; "" if it does not do so
    tail    behind a chat that ends, as Phi-3 does an EOS
    behind  between an answer and that
    closes  whether that is more than blanks; True if the template refuses all chats of ours, and nothing is known
    opening what it was given before the question
    """

    prompt: str = ""
    tail: str = ""
    behind: str = ""
    closes: bool = True
    opening: tuple[Message, ...] = ()


def try_out(write: Write) -> Trial:
    """What a template writes around an answer. Raises TemplateError: it writes today's date."""
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
    with suppress(ChatError):  # some render one question and its answer, and no more
        again = write([*opening, *_ASKED_AGAIN])
    end = num_alike(once, again)
    for token in _TOKEN.finditer(once):  # two tokens may begin alike
        end = token.start() if token.start() < end < token.end() else end
    tail = once[end:] if again.endswith(once[end:]) else ""
    asked = asked.removesuffix(tail)
    behind = once.removesuffix(tail).rpartition(ANSWER)[2]
    prompt = prompted[len(asked) :] if prompted.startswith(asked) else ""
    return Trial(prompt, tail, behind, bool(behind.strip()), opening)


def num_alike(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
