"""Chats: messages rendered by a tokenizer's chat template, in Jinja's sandbox.

Templates have what Hugging Face gives to them, except `strftime_now`: a batch must be the same on every day. Jinja cannot bound
the time and memory that a template takes. Serve only templates that you have read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.text import cut, one_line
from penstock_server.files import may_exist
from penstock_server.recipes.answers import (
    ANSWER,
    ANSWERED,
    Rendered,
    find_answer_format,
    rendered_by_marks,
    rendered_in_steps,
)
from penstock_server.recipes.messages import (
    ChatError,
    Forms,
    Message,
    TemplateError,
    Write,
    checked,
    find_forms,
    has_loss,
    says_something,
    text_of,
)
from penstock_server.recipes.tokenizer import read_beside, read_json_beside

_BEGIN, _END = "penstock_generation_begins", "penstock_generation_ends"  # variables written around a generation
_OTHERS = "additional_chat_templates"  # a folder, as transformers writes them since its version 5
# The last is from processors of several modalities.
TEMPLATE_FILES = ("chat_template.jinja", f"{_OTHERS}/tool_use.jinja", "chat_template.json")


class _Refused(jinja2.TemplateError):
    """The template refuses a chat by calling raise_exception."""


class _Generation(Extension):
    """Tags {% generation %} ... {% endgeneration %}: around text that the model generates."""

    tags = {"generation"}  # noqa: RUF012 - as Extension declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse the body, in a separate scope, between two variables: empty texts, or marks that locate it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in (_BEGIN, _END))
        return [begin.set_lineno(line), nodes.Scope(body).set_lineno(line), end.set_lineno(line)]


def _sandbox() -> ImmutableSandboxedEnvironment:
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    del sandbox.globals["lipsum"], sandbox.filters["random"]  # they depend on chance
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.filters["tojson"] = _to_json  # Jinja's escapes < > & and ' for HTML: the model would see \u003c in place of <
    return sandbox


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    options = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, default=_number, **options)


def _number(value: object) -> int | float:
    if isinstance(value, Decimal):  # JSON has only one kind of number
        return int(value) if value.as_tuple().exponent == 0 else float(value)
    raise TypeError(f"a {type(value).__name__} has no place in JSON")


class ChatTemplate:
    """Chat template of a tokenizer: a Jinja text, and the special tokens that it may write, by name, such as `eos_token`.

    with_tools      the template for chats with tools, if a tokenizer has two
    takes_tools     whether it reads tool definitions
    drops_system    whether it writes nothing of system messages
    closes          whether it ends an answer with more than blanks, which teaches a model to stop
    leaves_end_out  whether its generation marks exclude that end, so that nothing teaches a model to stop
    answer_end      the text that it writes after the last answer

    Raises TemplateError: the text is not a template, or refers to something missing.
    """

    def __init__(self, *, text: str, special_tokens: Mapping[str, str], with_tools: ChatTemplate | None = None) -> None:
        self._text, self._special_tokens, self._with_tools = text, special_tokens, with_tools
        sandbox = _sandbox()
        try:
            tree = sandbox.parse(text)
            self._template = sandbox.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is wrong in line {error.lineno}: {error.message}") from error
        except (SyntaxError, RecursionError) as error:
            raise TemplateError(f"the chat template cannot be compiled: {error}") from error
        names = {name.name for name in tree.find_all(nodes.Name)}
        self._is_marked, self.takes_tools = _BEGIN in names, "tools" in names or with_tools is not None
        self._forms = Forms()  # passes messages unchanged until find_forms has run
        self._forms = find_forms(self._write)
        self._answers = answers = find_answer_format(self._write)
        self.drops_system, self.answer_end = self._forms.drops_system, answers.end + answers.tail
        self.closes: bool = bool(self.answer_end.strip()) and (with_tools is None or with_tools.closes)
        self.leaves_end_out: bool = bool(with_tools and with_tools.leaves_end_out)
        if self._is_marked and self.closes:
            with suppress(ChatError):
                text, spans = self._rendered(self._write, [*answers.opening, *ANSWERED])
                self.leaves_end_out |= any(text[slice(*span)].rstrip().endswith(ANSWER) for span in spans[-1:])

    @property
    def digest(self) -> str:
        """Return a hash of everything but the messages that the rendered text and its loss depend on."""
        parts: list[object] = ["penstock chat v9", self._text, sorted(self._special_tokens.items())]
        content = json.dumps([*parts, self._with_tools.digest] if self._with_tools else parts)
        return blake2b(content.encode(), digest_size=16).hexdigest()

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = (), first: int = 0) -> Rendered:
        """Render a chat as text, with the spans that have loss: the assistant's answers and the mark that ends each turn.

        `tools` are the definitions of callable tools. No token of the messages before the `first` has loss.

        Raises ChatError: the template refuses or drops a message, or the answers cannot be located in the text.
        """
        if tools and self._with_tools:
            return self._with_tools.render(messages, tools, first)
        chat = [checked(number, message) for number, message in enumerate(messages)]
        if not chat:
            raise ChatError("has a chat without messages")
        return self._rendered(partial(self._write, tools=tools or None), chat, first)

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        """Render a chat that the assistant has to answer, with the text that opens its answer.

        Raises ChatError: the template refuses the chat, or the last message is the assistant's.
        """
        if tools and self._with_tools:
            return self._with_tools.render_prompt(messages, tools)
        chat = [checked(number, message) for number, message in enumerate(messages)]
        if not chat or chat[-1]["role"] == "assistant":
            raise ChatError("has a chat that does not end with a message to answer: a prompt ends before the answer")
        return self._write(chat, tools=tools or None, prompt=True)

    def _rendered(self, write: Write, chat: list[Message], first: int = 0) -> Rendered:
        in_loss = [number >= first and has_loss(message) for number, message in enumerate(chat)]
        if self._is_marked:
            rendered = rendered_by_marks(write, chat, in_loss)
        else:
            rendered = rendered_in_steps(write, self._answers, chat, in_loss)
        for number, message in enumerate(chat):
            if in_loss[number] and says_something(message) and _is_dropped(write, chat, number, rendered.text):
                what = f"has a chat whose template writes nothing of message {number}"
                raise ChatError(f"{what}: use a template that writes what the assistant says, and its tool calls")
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
            "messages": [self._forms.of(number, message) for number, message in enumerate(chat)],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
            **dict(zip((_BEGIN, _END), marks, strict=True)),
        }
        try:
            return self._template.render(variables)
        except MemoryError:  # as a bad row it would stay bad when memory is free again
            raise
        except Exception as error:  # a template is a program, and may raise anything
            fails = "refuses" if isinstance(error, _Refused) else "fails on"
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise ChatError(f"has a chat that its template {fails}: {cut(kind + one_line(error), 200)}") from error


def _is_dropped(write: Write, chat: list[Message], number: int, text: str) -> bool:
    """Return whether a message may say nothing, and the chat still becomes this text."""
    words = (text_of(chat[number]) or "").strip()
    silent: Message = {"role": chat[number]["role"], "content": ""}
    with suppress(ChatError):
        return not (words and words in text) and write([*chat[:number], silent, *chat[number + 1 :]]) == text
    return False


def load_chat_templates(tokenizer_path: Path) -> dict[str, str]:
    """Return the chat templates beside a tokenizer.json by name: default, and others such as tool_use.

    The first of these files counts: chat_template.jinja, with the folder additional_chat_templates; tokenizer_config.json;
    chat_template.json. Raises DatasetInvalid, TemplateError: one cannot be read, or has several templates without a default.
    """
    default, tool_use, of_processor = (tokenizer_path.parent / name for name in TEMPLATE_FILES)
    if may_exist(default):
        paths = {"default": default, "tool_use": tool_use}
        return {name: read_beside(path) for name, path in paths.items() if may_exist(path)}
    for path in (tokenizer_path.with_name("tokenizer_config.json"), of_processor):
        if templates := _templates_in(read_json_beside(path), path):
            return templates
    return {}


def read_chat_templates(path: Path) -> dict[str, str]:
    """Return the chat templates of a file that a recipe names: its text, or the "chat_template" of a JSON file.

    Raises DatasetInvalid, TemplateError: it cannot be read, has no template, or several without a default.
    """
    text = read_beside(path)
    try:
        content = json.loads(text)
    except ValueError:
        return {"default": text}
    if templates := _templates_in(content, path) if isinstance(content, dict) else {}:
        return templates
    raise TemplateError(f'{path} is JSON without a text under "chat_template". Name a file of the template itself')


def _templates_in(content: dict[str, Any], path: Path) -> dict[str, str]:
    """Return the chat templates of a JSON file by name; a single one is the default."""
    templates = content.get("chat_template")
    if isinstance(templates, list):
        templates = {str(each.get("name")): each.get("template") for each in templates if isinstance(each, dict)}
    named = templates if isinstance(templates, dict) else {"default": templates}
    if named and "default" not in named:
        what = f"{path} has the chat templates {', '.join(map(str, named))}, and none of them is called default"
        raise TemplateError(f"{what}. Put the one to use beside it as chat_template.jinja")
    return {name: text for name, text in named.items() if isinstance(text, str)}
