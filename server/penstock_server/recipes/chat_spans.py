"""Spans of the assistant's answers in a chat's text.

A template may mark them with {% generation %} and {% endgeneration %}. Without marks, an answer is the text that a message of
the assistant adds to the previous chat with the prompt to answer. That works only if the template renders a chat as a prefix
of the same chat with more messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock_server.recipes.chat_trial import ANSWER, Trial, Write, num_alike
from penstock_server.recipes.messages import DEEDS, ChatError, Message, content_of, has_loss, has_words, says_something, without

Span = tuple[int, int]

LOST = "has a chat in which the assistant calls tools or thinks, and its template writes none of it"
_MARKS = ("\ufdd0", "\ufdd1")  # noncharacters: they occur in no text
_WAY_OUT = "Mark what the assistant says in the template, with {% generation %} and {% endgeneration %}"
_LONG = 64  # characters; no header is as long: text that begins with 64 characters of an answer is the answer


@dataclass(frozen=True, slots=True)
class Rendered:
    """Chat as text. `spans` are the half-open character ranges that have loss, sorted, disjoint, not empty."""

    text: str
    spans: tuple[Span, ...]


def rendered_by_marks(write: Write, chat: Sequence[Message], first: int = 0) -> Rendered:
    """Render a chat with a template that marks the answers. No token of the messages before the `first` has loss.

    Raises ChatError: the marks do not surround the written text, or do not separate the answers before the first.
    """
    text, spans = _marked(write, chat)
    answers = [number for number, message in enumerate(chat) if message["role"] == "assistant"]
    if all(number >= first and has_loss(chat[number]) for number in answers):
        return Rendered(text, spans)
    # Marks do not say which message a span belongs to: count the spans of the chat just before the next answer.
    said, kept, start = [text[slice(*span)] for span in spans], list[Span](), 0
    for carries_loss, run in groupby(answers, lambda number: number >= first and has_loss(chat[number])):
        *_, last = run
        after = next((number for number in answers if number > last), len(chat))
        before, known = _marked(write, chat[:after]) if after < len(chat) else (text, spans)
        # Two answers without a question between them may end together.
        if after > last + 1 and said[: len(known)] != [before[slice(*span)] for span in known]:
            raise ChatError(
                "has a chat whose template changes what the assistant said in a message without loss when the chat goes on, "
                "so that what has loss cannot be told"
            )
        kept += spans[start : len(known)] if carries_loss else ()
        start = len(known)
    return Rendered(text, tuple(kept))


def _marked(write: Write, chat: Sequence[Message]) -> tuple[str, tuple[Span, ...]]:
    text = write(chat)
    marked = write(chat, marks=_MARKS)
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


def rendered_in_steps(write: Write, trial: Trial, chat: Sequence[Message], first: int) -> Rendered:
    """Render a chat with a template without marks, after each answer. No token of the messages before the `first` has loss.

    Raises ChatError: the answers cannot be located in the text.
    """
    spans: list[Span] = []
    longest = text = ""  # the longest step; the others are its prefixes, and for a long chat would take gigabytes
    goes_on = True
    for number, message in enumerate(chat):
        if message["role"] == "assistant" and number >= first:
            text = write(chat[: number + 1])
            step = text.removesuffix(trial.tail)
            goes_on = goes_on and (step.startswith(longest) or longest.startswith(step))
            longest = max(longest, step, key=len)
            before = _before(write, trial, chat[:number], text)
            said = _said(write, trial, chat[: number + 1], before, step)
            spans.append((len(before), len(before) + len(said) * has_loss(message)))
    if chat[-1]["role"] != "assistant":
        text = write(chat)
    elif (
        trial.tail.strip() and text.endswith(trial.tail) and not trial.closes and has_loss(chat[-1])
    ):  # nothing else teaches the model to stop
        spans[-1] = (spans[-1][0], len(text.rstrip()))
    if not (goes_on and text.startswith(longest)):
        raise ChatError(f"has a chat whose template changes what the assistant said when the chat goes on. {_WAY_OUT}")
    return Rendered(text, tuple((start, stop) for start, stop in spans if start < stop))


def _before(write: Write, trial: Trial, chat: Sequence[Message], text: str) -> str:
    """Return the text before an answer to a chat; `text` is the chat with the answer."""
    if chat:
        return write(chat, prompt=True)
    # Many templates cannot render an empty chat.
    others = (write([{"role": "assistant", "content": other}]) for other in "AB")
    before = text[: min(num_alike(text, other) for other in others)]
    begin, prompt, blanks = before.rpartition(trial.prompt) if trial.prompt else (before, "", "")
    if prompt != trial.prompt or blanks.strip():
        raise ChatError(f"has a chat that begins with the assistant, and its template does not prompt for that. {_WAY_OUT}")
    return begin + prompt


def _said(write: Write, trial: Trial, chat: Sequence[Message], before: str, step: str) -> str:
    """Return the last message's text: `step` is the chat with it, and `before` the chat with the prompt for it."""
    number, message = len(chat) - 1, chat[-1]
    if not step.startswith(before):
        raise ChatError(f"has a chat whose template does not begin message {number} as it asks for it. {_WAY_OUT}")
    said = _without_blanks_behind_the_end(trial, step[len(before) :], message)
    prompted = trial.prompt and before.endswith(trial.prompt)
    if not prompted and not _begins_at_once(write, chat, before, said):
        raise ChatError(
            f"has a chat whose template does not prompt for message {number} with add_generation_prompt. {_WAY_OUT}"
        )
    if says_something(message) and said.strip() == trial.behind.strip():
        raise ChatError(f"has a chat whose template writes nothing of message {number}" if has_words(message) else LOST)
    return said


def _begins_at_once(write: Write, chat: Sequence[Message], before: str, said: str) -> bool:
    """Return whether the last answer follows the previous chat directly, without a header that a prompt should have.

    A plain answer in its place shows it; a long answer is compared directly.
    """
    *asked, message = chat
    content = content_of(message)
    if content and len(content) > _LONG and said.lstrip().startswith(content):
        return True
    plain = [{"type": "text", "text": ANSWER}] if isinstance(message.get("content"), list) else ANSWER
    try:
        text = write([*asked, {**without(message, DEEDS), "content": plain}])
    except ChatError:  # such as a template that demands answers of some kind
        return bool(content) and said.lstrip().startswith(content or "")
    return text.startswith(before) and text[len(before) :].lstrip().startswith(ANSWER)


def _without_blanks_behind_the_end(trial: Trial, said: str, message: Message) -> str:
    """Return an answer up to the mark that ends it. If only blanks end it, they are the mark."""
    if not trial.closes:
        return said
    content, stripped = content_of(message), said.rstrip()
    if content is None:
        return stripped
    if said.lstrip().startswith(content):
        return stripped if said.lstrip()[len(content) :].strip() else said
    return said if stripped.endswith(content) else stripped
