import copy
from typing import Any
from unittest.mock import Mock

import pytest
from penstock_server.recipes.chat_sandbox import MAX_CHARACTERS

from penstock_server.recipes import chat_sandbox
from penstock_server.recipes.chat import ChatTemplate
from penstock_server.recipes.chat.messages import ChatError, TemplateError


def render(text: str, chat: list[dict[str, Any]]) -> str:
    # Marked, so that nothing but the template's own failure stands in the way.
    marked = text + "{% generation %}{% endgeneration %}"
    return ChatTemplate(text=marked, special_tokens={"bos_token": "<s>"}).render(chat).text


def chat() -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Q", "tags": ["x"]}, {"role": "assistant", "content": "A"}]


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.__class__ }}",
        "{{ messages['__class__'] }}",
        "{{ messages | attr('__class__') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ dict.__globals__['json'] }}",
        "{{ dict.update(messages[0], content='Z') }}",
        "{{ range.__closure__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{0.__class__}' | format(messages) }}{{ open('/etc/passwd') }}",
        "{{ messages.append(1) }}",
        "{{ messages.pop() }}",
        "{{ messages[0].update(content='Z') }}",
        "{{ messages[0].pop('content') }}",
        "{{ messages[0].tags.clear() }}",
        "{{ namespace(__call__=1) }}",
        "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
        "{{ open('/etc/passwd').read() }}",
        "{{ __import__('os') }}{{ x() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{% extends 'x' %}",
        "{{ strftime_now('%Y') }}",
        "{{ lipsum() }}",
        "{{ messages | random }}",
        "{% for x in range(1_000_000) %}{% endfor %}",
        "{% for x in range(1_000) %}{% for y in range(1_000) %}{% endfor %}{% endfor %}",
        "{{ range(10 ** 30) | length }}",
        "{{ 'x' * 100_000_000 }}",
        "{{ 100_000_000 * [1] }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'x'.ljust(10_000_000_000) }}",
        "{{ '\\t'.expandtabs(tabsize=100_000_000) }}",
        "{% for x in range(100) %}{{ 'x' * 1_000_000 }}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 1 // 0 }}",
        "{{ messages.x.y }}",
        "{{ (messages[0] | tojson)[5] + 1 }}",
        "{{ messages[0].items }}",
        "{{ raise_exception }}",
    ],
)
def test_what_leads_out_of_the_sandbox_or_past_its_bounds_is_refused(text: str) -> None:
    given, before = chat(), copy.deepcopy(chat())
    with pytest.raises((ChatError, TemplateError), match="its template fails on: |today's date|No filter named"):
        render(text, given)
    assert given == before


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Q", "tags": ["x"]}'),
        ("{{ {'b': '<\N{SNOWMAN}>', 'a': 1} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":1,"b":"<\N{SNOWMAN}>"}'),
        ("{{ [1] | tojson(indent=2) }}{{ '\N{SNOWMAN}' | tojson(ensure_ascii=true) }}", '[\n  1\n]"\\u2603"'),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% for m in messages %}{% if loop.last %}{% continue %}{% endif %}{{ m.content }}{% endfor %}", "Q"),
        ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "Q"),
        ("{{ dict(a=1).a }}{{ range(3) | list }}{{ '=' * 3 }}{{ 2 ** 3 }}{{ 'x'.ljust(2) }}|", "1[0, 1, 2]===8x |"),
        ("a\n    {% if true %}\nb\n    {% endif %}\nc\n", "a\nb\nc\n"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueFalse"),
        ("{{ bos_token }}{{ eos_token }}{{ eos_token is defined }}", "<s>False"),
        ("{{ messages[0].name }}<{{ '&' }}>", "<&>"),
        (
            "{% macro plain(x) %}{{ x }}{% endmacro %}{{ plain(1700000000) }} {{ '{}'.format(1700000000) }}",
            "1700000000 1700000000",
        ),
        ("{% set ns = namespace(at=1700000000) %}{{ ns.at }} {{ dict(at=1700000000).at }}", "1700000000 1700000000"),
    ],
)
def test_templates_have_what_hugging_face_gives_to_them(text: str, written: str) -> None:
    answer = "{{ messages[-1].content }}"  # without it the row would be refused
    assert render(text + answer, chat()) == written + str(chat()[-1]["content"])


def test_a_chat_at_the_bound_is_written_and_one_past_it_is_not() -> None:
    at_bound = [{"role": "user", "content": "x" * MAX_CHARACTERS}]
    template = ChatTemplate(text="{{ messages[0].content }}{{ messages[0].more }}", special_tokens={})
    assert len(template.render(at_bound).text) == MAX_CHARACTERS
    with pytest.raises(ChatError, match="more than 16,777,216 characters"):
        template.render([{**at_bound[0], "more": "x"}])


def test_a_lack_of_memory_makes_no_chat_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "render", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        render("", chat())
