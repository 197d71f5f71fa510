"""Which part of a chat's text the assistant says.

A template may mark that with {% generation %} and {% endgeneration %}. In one that does not, it is what a message of the
assistant adds to the chat before it with the prompt to answer; that is told only of templates that render a chat as the
beginning of the same chat that goes on.
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
_MARKS = ("\ufdd0", "\ufdd1")  # noncharacters: no text has them
_WAY_OUT = "Mark what the assistant says in the template, with {% generation %} and {% endgeneration %}"
_LONG = 64  # characters, and no header is: what begins with so many of an answer's is the answer


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as text. `spans` are the half-open ranges of characters that carry loss, in their order, disjoint, not empty."""

    text: str
    spans: tuple[Span, ...]


def rendered_by_marks(write: Write, chat: Sequence[Message], first: int = 0) -> Rendered:
    """A chat by a template that marks what the assistant says. In the messages before the `first` no token has loss.

    Raises ChatError: the marks are not around what is written, or do not tell what is said before the first.
    """
    text, spans = _marked(write, chat)
    answers = [number for number, message in enumerate(chat) if message["role"] == "assistant"]
    if all(number >= first and has_loss(chat[number]) for number in answers):
        return Rendered(text, spans)
    # Which spans are of which message the marks do not tell: as many as there are just before the next answer.
    said, kept, start = [text[slice(*span)] for span in spans], list[Span](), 0
    for carries_loss, run in groupby(answers, lambda number: number >= first and has_loss(chat[number])):
        *_, last = run
        after = next((number for number in answers if number > last), len(chat))
        before, known = _marked(write, chat[:after]) if after < len(chat) else (text, spans)
        # Without a question between them one answer may end with the other.
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
    """A chat by a template without marks, as it is after each answer. In the messages before the `first` no token has loss.

    Raises ChatError: what the assistant says cannot be told.
    """
    spans: list[Span] = []
    longest = text = ""  # of all steps the longest, which the others begin: of a long chat all of them are gigabytes
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
    ):  # nothing else teaches to stop
        spans[-1] = (spans[-1][0], len(text.rstrip()))
    if not (goes_on and text.startswith(longest)):
        raise ChatError(f"has a chat whose template changes what the assistant said when the chat goes on. {_WAY_OUT}")
    return Rendered(text, tuple((start, stop) for start, stop in spans if start < stop))


def _before(write: Write, trial: Trial, chat: Sequence[Message], text: str) -> str:
    """What is written before an answer to a chat, which is written to `text` with it."""
    if chat:
        return write(chat, prompt=True)
    # Of no messages at all many templates make nothing.
    others = (write([{"role": "assistant", "content": other}]) for other in "AB")
    before = text[: min(num_alike(text, other) for other in others)]
    begin, prompt, blanks = before.rpartition(trial.prompt) if trial.prompt else (before, "", "")
    if prompt != trial.prompt or blanks.strip():
        raise ChatError(f"has a chat that begins with the assistant, and its template does not prompt for that. {_WAY_OUT}")
    return begin + prompt


def _said(write: Write, trial: Trial, chat: Sequence[Message], before: str, step: str) -> str:
    """What the last message of a chat says, which is written to `step` with it, and to `before` with the prompt for it."""
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
    """Whether the last answer begins right behind the chat before it, without a header that a prompt should have written.

    That is told by a plain answer in its place, but for a long one, which is told by itself.
    """
    *asked, message = chat
    content = content_of(message)
    if content and len(content) > _LONG and said.lstrip().startswith(content):
        return True
    plain = [{"type": "text", "text": ANSWER}] if isinstance(message.get("content"), list) else ANSWER
    try:
        text = write([*asked, {**without(message, DEEDS), "content": plain}])
    except ChatError:  # as of templates that want answers of some kind
        return bool(content) and said.lstrip().startswith(content or "")
    return text.startswith(before) and text[len(before) :].lstrip().startswith(ANSWER)


def _without_blanks_behind_the_end(trial: Trial, said: str, message: Message) -> str:
    """What the assistant says up to the mark that ends it. Where blanks are all that ends it, they are the mark."""
    if not trial.closes:
        return said
    content, stripped = content_of(message), said.rstrip()
    if content is None:
        return stripped
    if said.lstrip().startswith(content):
        return stripped if said.lstrip()[len(content) :].strip() else said
    return said if stripped.endswith(content) else stripped
