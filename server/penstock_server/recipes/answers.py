"""Spans of the assistant's answers in a chat's text.

A template may mark them with {% generation %} and {% endgeneration %}. Without marks, the answer of message n is what
render(chat[:n + 1]) adds to render(chat[:n], add_generation_prompt=True). That works only if the template renders a chat as a
prefix of the same chat with more messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

from penstock_server.recipes.messages import OPENINGS, ChatError, Message, TemplateError, Write

Span = tuple[int, int]

ANSWER = "An answer."
_ASKED = ({"role": "user", "content": "Who is there?"},)
ANSWERED = (*_ASKED, {"role": "assistant", "content": ANSWER})
_ASKED_AGAIN = (*ANSWERED, {"role": "user", "content": "And now?"})
_TOKEN = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_MARKS = ("\ufdd0", "\ufdd1")  # noncharacters: they occur in no text
_REMEDY = "Mark what the assistant says in the template, with {% generation %} and {% endgeneration %}"


class Rendered(NamedTuple):
    """Chat as text. `spans` are the half-open character ranges that have loss, sorted, disjoint, not empty."""

    text: str
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, text: str, spans: Iterable[Span]) -> Rendered:
        """Leave out empty spans."""
        return cls(text, tuple((start, stop) for start, stop in spans if start < stop))


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Text that a template writes around an answer, found with a small chat.

    prompt       the prompt for an answer; "" without one
    end          between an answer and the tail
    tail         after the end of a chat, such as the EOS of Phi-3
    has_header   whether text precedes an answer, and no prompt has it
    opening      the messages before the question
    """

    prompt: str = ""
    end: str = ""
    tail: str = ""
    has_header: bool = False
    opening: tuple[Message, ...] = ()


def find_answer_format(write: Write) -> AnswerFormat:
    """Find the text that a template writes around an answer. Raises TemplateError: it writes today's date."""
    for opening in OPENINGS:
        try:
            return _answer_format(write, opening)
        except ChatError as error:
            if "'strftime_now' is undefined" in str(error):
                what = "the chat template writes today's date (strftime_now), and a batch must be the same on every day"
                raise TemplateError(f"{what}. Write a date into it") from error
    return AnswerFormat()


def _answer_format(write: Write, opening: tuple[Message, ...]) -> AnswerFormat:
    asked, prompted = write([*opening, *_ASKED]), write([*opening, *_ASKED], prompt=True)
    once = again = write([*opening, *ANSWERED])
    with suppress(ChatError):  # some templates render only one question and its answer
        again = write([*opening, *_ASKED_AGAIN])
    at = next((i for i, (a, b) in enumerate(zip(once, again, strict=False)) if a != b), min(len(once), len(again)))
    for token in _TOKEN.finditer(once):  # two tokens may share a prefix
        at = token.start() if token.start() < at < token.end() else at
    tail = once[at:] if again.endswith(once[at:]) else ""
    asked = asked.removesuffix(tail)
    prompt = prompted[len(asked) :] if prompted.startswith(asked) else ""
    before, _, end = once.removesuffix(tail).rpartition(ANSWER)
    has_header = not prompt and before.rstrip() != asked.rstrip()
    return AnswerFormat(prompt, end, tail, has_header, opening)


def rendered_by_marks(write: Write, chat: Sequence[Message], in_loss: Sequence[bool]) -> Rendered:
    """Render a chat with a template that marks the answers; `in_loss` says which messages may have loss.

    Raises ChatError: the marks do not surround the written text, or do not tell which answer has loss.
    """
    text, marked = write(chat), write(chat, marks=_MARKS)
    begin, end = _MARKS
    if begin in text or end in text:
        raise ChatError("has a chat with U+FDD0 or U+FDD1 in it, which are no characters")
    spans: list[Span] = []
    at = depth = start = 0
    for piece in re.split(f"([{begin}{end}])", marked):
        if piece not in _MARKS:
            at += len(piece)
            continue
        start = at if depth == 0 else start
        depth += 1 if piece == begin else -1
        if depth == 0:
            spans.append((start, at))
    if depth or marked.replace(begin, "").replace(end, "") != text:
        raise ChatError("has a chat whose template looks at or leaves its {% generation %} blocks, which must only be written")
    answers = [has_loss for message, has_loss in zip(chat, in_loss, strict=True) if message["role"] == "assistant"]
    if not all(answers):  # marks do not say which message they belong to
        if len(spans) != len(answers):
            raise ChatError(
                f"has a chat with {len(answers)} messages of the assistant, some of them without loss, and its template marks "
                f"{len(spans)} texts: which of them has loss is unknown. Mark one text a message"
            )
        spans = [span for span, has_loss in zip(spans, answers, strict=True) if has_loss]
    return Rendered.of(text, spans)


def rendered_in_steps(write: Write, answers: AnswerFormat, chat: Sequence[Message], in_loss: Sequence[bool]) -> Rendered:
    """Render a chat with a template that does not mark the answers; `in_loss` says which messages may have loss.

    Raises ChatError: the answers cannot be located in the text.
    """
    closes = bool(answers.end.strip())
    spans: list[Span] = []
    longest = ""  # the longest step; the others are its prefixes, and for a long chat would take gigabytes
    is_stable = True
    for number in compress(range(len(chat)), in_loss):
        before, text = write(chat[:number], prompt=True), write(chat[: number + 1])
        step = text.removesuffix(answers.tail)
        is_stable = is_stable and (step.startswith(longest) or longest.startswith(step))
        longest = max(longest, step, key=len)
        if not step.startswith(before):
            raise ChatError(f"has a chat whose template does not begin message {number} as it asks for it. {_REMEDY}")
        if answers.has_header or (number == 0 and not before.endswith(answers.prompt)):
            raise ChatError(
                f"has a chat whose template does not prompt for message {number} with add_generation_prompt. {_REMEDY}"
            )
        spans.append((len(before), len(step.rstrip()) if closes else len(step)))
    if not in_loss[-1]:
        text = write(chat)
    elif answers.tail.strip() and text.endswith(answers.tail) and not closes:
        spans[-1] = (spans[-1][0], len(text.rstrip()))  # nothing else teaches the model to stop
    if not (is_stable and text.startswith(longest)):
        raise ChatError(f"has a chat whose template changes what the assistant said when the chat goes on. {_REMEDY}")
    return Rendered.of(text, spans)
