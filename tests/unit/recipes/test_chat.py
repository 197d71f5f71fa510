import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.chat import ChatTemplate, load_chat_templates, read_chat_templates
from penstock_server.recipes.messages import ChatError, TemplateError
from penstock_server.recipes.tokenizer import load_tokenizer
from support import examples
from support.chat_templates import CHATML, FORGETFUL, LLAMA_2, LLAMA_3, PHI_3, PLAIN, PROMPTLESS, STEADY, TOKENS, ZEPHYR, marked
from support.corpora import write_tokenizer

Chat = list[dict[str, Any]]

IGNORING_LISTS = CHATML.replace("message.content +", "(message.content if message.content is string else '') +")
VISION = """\
{%- for message in messages %}
    {{- message.role | capitalize + ': ' }}
    {#- says -#}
    {%- for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{{- '<end>' }}
    {#- said -#}
{%- endfor %}
{{- 'Assistant: ' if add_generation_prompt }}"""


@lru_cache
def template(text: str) -> ChatTemplate:
    return ChatTemplate(text=text, special_tokens=TOKENS)


def turns(*contents: str, system: str | None = None) -> Chat:
    """A user's and an assistant's messages, in turns."""
    chat = [{"role": ("user", "assistant")[turn % 2], "content": content} for turn, content in enumerate(contents)]
    return chat if system is None else [{"role": "system", "content": system}, *chat]


def said(text: str, chat: Chat, first: int = 0) -> list[str]:
    rendered = template(text).render(chat, first=first)
    return [rendered.text[start:stop] for start, stop in rendered.spans]


pieces = st.lists(
    st.sampled_from(["a", "Hi", " x ", "\n", "\N{SNOWMAN}", "<|im_end|>", "</s>", "{{ x }}", "b\n\n"]), max_size=3
)
contents = pieces.map("".join)
answers = contents.filter(str.strip)
chats = st.builds(
    lambda system, pairs, last: turns(*(text for pair in pairs for text in pair), *last, system=system),
    st.none() | contents,
    st.lists(st.tuples(contents, answers), max_size=3),
    st.lists(contents, max_size=1),
).filter(bool)
plain_templates = st.sampled_from(list(STEADY.values()))


@pytest.mark.parametrize(
    ("name", "text", "spans"),
    [
        (
            "CHATML",
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA <|im_end|>\n"
            "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n",
            ["A <|im_end|>", "B<|im_end|>"],
        ),
        ("LLAMA_2", "<s>[INST] Q [/INST] A </s><s>[INST] R [/INST] B </s>", [" A </s>", " B </s>"]),
        (
            "LLAMA_3",
            "<s><|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nR<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nB<|eot_id|>",
            ["A<|eot_id|>", "B<|eot_id|>"],
        ),
        (
            "ZEPHYR",
            "<|user|>\nQ</s>\n<|assistant|>\nA </s>\n<|user|>\nR</s>\n<|assistant|>\nB</s>\n",
            ["A </s>", "B</s>"],
        ),
        (
            "GEMMA",
            "<s><start_of_turn>user\nQ<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
            "<start_of_turn>user\nR<end_of_turn>\n<start_of_turn>model\nB<end_of_turn>\n",
            ["A<end_of_turn>", "B<end_of_turn>"],
        ),
        (
            "PHI_3",
            "<|user|>\nQ<|end|>\n<|assistant|>\nA <|end|>\n<|user|>\nR<|end|>\n<|assistant|>\nB<|end|>\n<|endoftext|>",
            ["A <|end|>", "B<|end|>"],
        ),
        ("PLAIN", "User: Q\nAssistant: A \nUser: R\nAssistant: B\n", ["A \n", "B\n"]),
    ],
)
def test_loss_is_on_answers_and_their_end_marks(name: str, text: str, spans: list[str]) -> None:
    for way in (STEADY[name], marked(STEADY[name])):
        rendered = template(way).render(turns("Q", "A ", "R", "B"))
        assert rendered.text == text
        assert [text[start:stop] for start, stop in rendered.spans] == spans


@examples(300)
@given(plain_templates, chats)
def test_spans_are_equal_with_and_without_marks(plain: str, chat: Chat) -> None:
    assert "generation %}" not in plain
    assert "generation" in marked(plain)
    assert template(plain).render(chat) == template(marked(plain)).render(chat)


@given(plain_templates | plain_templates.map(marked), chats)
def test_spans_are_ordered_and_one_for_each_answer(text: str, chat: Chat) -> None:
    rendered = template(text).render(chat)
    ends = [0, *(end for span in rendered.spans for end in span), len(rendered.text)]
    assert ends == sorted(ends)
    assert all(start < stop for start, stop in rendered.spans)
    assert len(rendered.spans) == sum(message["role"] == "assistant" for message in chat)


@pytest.mark.parametrize(("text", "most"), [(CHATML, 5), (marked(CHATML), 2)])
def test_answer_costs_two_renderings_and_a_marked_chat_two_in_all(
    monkeypatch: pytest.MonkeyPatch, text: str, most: int
) -> None:
    chatml, render, renderings = template(text), jinja2.Template.render, []

    def counted(*args: Any) -> str:
        renderings.append(args)
        return render(*args)

    monkeypatch.setattr(jinja2.Template, "render", counted)
    chatml.render(turns("Q", "A", "R", "B", "S"))
    assert len(renderings) == most


@pytest.mark.parametrize("blanks", ["", "\n\n"])
def test_end_of_chat_has_loss_when_nothing_else_ends_an_answer(blanks: str) -> None:
    alpaca = (
        "{% for m in messages %}{% if m.role == 'user' %}### Instruction:\n{{ m.content }}{% else %}"
        f"\n### Response:\n{{{{ m.content }}}}{blanks}{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}\n### Response:\n{% else %}{{ eos_token }}\n{% endif %}"
    )
    eos = TOKENS["eos_token"]
    assert said(alpaca, turns("Q", "A")) == [f"A{blanks}{eos}"]
    assert said(alpaca, turns("Q", "A", "R", "B")) == [f"A{blanks}", f"B{blanks}{eos}"]
    assert said(alpaca, turns("Q", "A", "R")) == [f"A{blanks}"]


def test_tool_messages_between_answers_have_no_loss() -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"name": "add", "arguments": {"x": "<\N{SNOWMAN}>"}}],
    }
    chat = [*turns("1+1?"), call, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2."}]
    expected = ['[{"name": "add", "arguments": {"x": "<\N{SNOWMAN}>"}}]<|eom_id|>', "It is 2.<|eot_id|>"]
    for text in (LLAMA_3, marked(LLAMA_3)):
        assert said(text, chat) == expected


def test_template_without_earlier_thoughts_needs_marks() -> None:
    chat = turns("Q", "A", "R", "B")
    for message in chat:
        message["reasoning_content"] = "Hm."
    assert said(FORGETFUL, chat[:2]) == ["<think>\nHm.\n</think>\n\nA<|im_end|>"]
    with pytest.raises(ChatError, match=r"changes what the assistant said when the chat goes on. Mark .* \{% generation %\}"):
        template(FORGETFUL).render(chat)
    assert said(marked(FORGETFUL), chat) == ["A<|im_end|>", "<think>\nHm.\n</think>\n\nB<|im_end|>"]


def test_answers_in_the_prompt_have_no_loss() -> None:
    for text in (PHI_3, marked(PHI_3), LLAMA_2, marked(LLAMA_2)):
        whole = template(text).render(chat := turns("Q", "A", "R", "B", "S", "C"))
        for first in range(7):
            assert template(text).render(chat, first=first).spans == whole.spans[(first // 2) :]


@pytest.mark.parametrize("text", [CHATML, marked(CHATML), PHI_3, marked(LLAMA_3)])
@pytest.mark.parametrize("weights", [(0, 1, None), (1, 0, 1), (1.0, 1, 0.0), (0, 0, 0)])
def test_message_of_weight_0_has_no_loss(text: str, weights: tuple[float | None, ...]) -> None:
    chat = turns("Q", "A", "R", "B", "S", "C")
    weighted = [{**message, "weight": weights[number // 2]} for number, message in enumerate(chat)]
    assert template(text).render(weighted).text == template(text).render(chat).text
    each = said(text, chat)
    assert said(text, weighted) == [answer for answer, weight in zip(each, weights, strict=True) if weight != 0]


@pytest.mark.parametrize("weight", [0.5, -1, "0", [1]])
def test_weights_other_than_0_and_1_are_refused(weight: object) -> None:
    with pytest.raises(ChatError, match="message 1 has the weight .*: use 0 or 1"):
        template(CHATML).render([*turns("Q"), {"role": "assistant", "content": "A", "weight": weight}])


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("asked", ["reasoning_content", "thinking"])
def test_thoughts_are_passed_under_both_names(name: str, asked: str) -> None:
    chat = turns("Q", "A")
    chat[1][name] = "Hm."
    assert said(FORGETFUL.replace("reasoning_content", asked), chat) == ["<think>\nHm.\n</think>\n\nA<|im_end|>"]


def test_header_needs_a_prompt_or_marks() -> None:
    with pytest.raises(ChatError, match="does not prompt for message 1 with add_generation_prompt. Mark"):
        template(PROMPTLESS).render(turns("Q", "A"))
    assert said(marked(PROMPTLESS), turns("Q", "A")) == ["A<|im_end|>"]
    twice = [*turns("Q", "A"), {"role": "assistant", "content": "B"}]
    thinking = CHATML.replace("'<|im_start|>assistant\\n' if", "'<|im_start|>assistant\\n<think>\\n' if")
    with pytest.raises(ChatError, match="does not begin message 1 as it asks for it"):
        template(thinking).render(twice)
    assert said(CHATML, twice) == ["A<|im_end|>", "B<|im_end|>"]


def test_answer_without_a_header_needs_no_prompt() -> None:
    calling = LLAMA_2.replace(
        "' ' + message.content.strip() + ' '",
        "('[CALLS] ' + (message.tool_calls | tojson) if message.tool_calls else ' ' + message.content.strip() + ' ')",
    )
    assert calling != LLAMA_2
    call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    assert said(calling, [*turns("Q"), call]) == ['[CALLS] [{"name": "f"}]</s>']
    assert said(LLAMA_2, [*turns("Q", "", "R", "A")]) == ["  </s>", " A </s>"]
    in_parts = LLAMA_2.replace("message.content.strip()", "message.content[0].text")
    parts = [{"role": role, "content": [{"type": "text", "text": "x"}]} for role in ("user", "assistant")]
    assert said(in_parts, parts) == [" x </s>"]


def test_first_answer_needs_a_prompt_or_marks() -> None:
    chat = turns("", "A", "Q", "B")[1:]
    assert said(PLAIN, chat) == ["A\n", "B\n"]
    assert said(marked(ZEPHYR), chat) == ["A</s>", "B</s>"]
    with pytest.raises(ChatError, match="does not prompt for message 0 with add_generation_prompt. Mark"):
        template(ZEPHYR).render(chat)


def test_marks_are_refused_when_ambiguous() -> None:
    twice = marked(PLAIN).replace("message.content + '\\n'", "message.content }}{% endgeneration %}{% generation %}{{ '\\n'", 1)
    assert twice != marked(PLAIN)
    assert "".join(said(twice, turns("Q", "A", "R", "B"))) == "A\nB\n"
    with pytest.raises(ChatError, match="2 messages of the assistant, some of them without loss, and its template marks 4"):
        template(twice).render(turns("Q", "A", "R", "B"), first=2)


def test_chat_with_tools_uses_the_template_for_tools() -> None:
    calling = CHATML.replace("message.content", "(message.tool_calls | tojson if message.tool_calls else message.content)")
    both = ChatTemplate(text=CHATML, special_tokens=TOKENS, with_tools=template(calling))
    assert (both.takes_tools, template(CHATML).takes_tools) == (True, False)
    assert len({both.digest, template(CHATML).digest, template(calling).digest}) == 3
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "find"}}]}
    rendered = both.render([*turns("find Q"), call], [{"name": "find"}])
    assert [rendered.text[slice(*span)] for span in rendered.spans] == ['[{"function": {"name": "find"}}]<|im_end|>']


@pytest.mark.parametrize("text", [CHATML, marked(CHATML)])
@pytest.mark.parametrize(
    "silent", [{"tool_calls": [{"name": "find"}]}, {"reasoning_content": "Hm."}, {"content": "secret"}], ids=str
)
def test_message_is_refused_when_its_template_drops_it(text: str, silent: dict[str, Any]) -> None:
    dropping = text.replace("message.content +", "(message.content if 'secret' not in message.content else '') +")
    with pytest.raises(ChatError, match="writes nothing of message 1: use a template that writes what the assistant says"):
        template(dropping).render([*turns("Q"), {"role": "assistant", "content": ""} | silent, *turns("R", "B")])
    spoken = {"role": "assistant", "content": "A", "tool_calls": [{"name": "find"}]}
    assert said(dropping, [*turns("Q"), spoken]) == ["A<|im_end|>"]


@pytest.mark.parametrize("text", [CHATML, marked(CHATML), LLAMA_3, marked(LLAMA_3), IGNORING_LISTS, marked(IGNORING_LISTS)])
def test_parts_are_joined_for_a_template_of_texts(text: str) -> None:
    chat = turns("Hello Q", "Hello A", system="Hello S")
    parts = [{**m, "content": [{"type": "text", "text": "Hello"}, {"text": m["content"][5:]}]} for m in chat]
    assert template(text).render(parts) == template(text).render(chat)
    image = [{"role": "user", "content": [{"type": "image"}]}, *turns("", "A")[1:]]
    with pytest.raises(ChatError, match="message 0 has contents that are not text, and its template takes text alone: use"):
        template(text).render(image)


def test_texts_become_parts_for_a_template_of_lists() -> None:
    text = VISION
    chat = turns("Q", "A", "R", "B", system="S")
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in chat]
    rendered = template(text).render(chat)
    assert rendered == template(text).render(parts)
    assert rendered.text.startswith("System: S<end>")
    assert said(text, chat) == ["A<end>", "B<end>"]


def test_contents_stay_when_a_template_takes_both_forms() -> None:
    both = VISION.replace(
        "in message.content", "in ([{'text': message.content + '!'}] if message.content is string else message.content)"
    )
    assert said(both, turns("Q", "A")) == ["A!<end>"]
    assert said(both, [*turns("Q"), {"role": "assistant", "content": [{"text": "A"}]}]) == ["A<end>"]


@pytest.mark.parametrize("text", ["{{ call.function.arguments | tojson }}", "{{ call.function.arguments }}"])
@pytest.mark.parametrize("arguments", [{"city": "R\u00f3m", "n": [1]}, '{"city": "R\u00f3m", "n": [1]}'])
def test_arguments_are_written_as_json(text: str, arguments: Any) -> None:
    calling = marked(CHATML).replace(
        "message.content + '<|im_end|>' }}{%- end",
        "message.content }}{% for call in message.tool_calls or [] %}" + text + "{% endfor %}{{ '<|im_end|>' }}{%- end",
    )
    assert calling != marked(CHATML)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    assert said(calling, [*turns("Q"), call]) == ['{"city": "R\u00f3m", "n": [1]}<|im_end|>']


def test_drops_system_is_true_when_system_messages_are_not_written() -> None:
    dropping = PLAIN.replace("messages %}", "messages if message.role != 'system' %}")
    assert [template(text).drops_system for text in (dropping, PLAIN, VISION, LLAMA_2)] == [True, False, False, False]


def test_answer_format_is_found_for_templates_with_required_messages() -> None:
    demanding = "{{ raise_exception('no system') if messages[0].role != 'system' }}" + PLAIN
    once = "{{ raise_exception('one question') if messages | length > 2 }}" + PLAIN
    for text, chat in ((demanding, turns("Q", "A", system="S")), (once, turns("Q", "A"))):
        assert not template(text).closes
        assert said(text, chat) == ["A\n"]


@pytest.mark.parametrize(
    ("text", "chat", "reason"),
    [
        (CHATML, [], "has a chat without messages"),
        (CHATML, [{"content": "x"}], "has a chat whose message 0 has no role"),
        (CHATML, [{"role": None, "content": "x"}], "has a chat whose message 0 has no role"),
        (CHATML, ["x"], "has a chat whose message 0 has no role"),
        (CHATML, [*turns("Q"), {"role": "assistant", "content": None}], "has a chat whose message 1 has no content"),
        (CHATML, [{"role": "user"}], "has a chat whose message 0 has no content"),
        (LLAMA_2, turns("Q")[:1] * 2, "has a chat that its template refuses: roles must alternate"),
        (ZEPHYR, [{"role": "poet", "content": "x"}], "has a chat that its template refuses: there is no role poet"),
        (CHATML, [{"role": "user", "content": ["x"]}], "has contents that are not text"),
        (CHATML, [{"role": "assistant", "tool_calls": [1]}], "fails on: 'dict object' has no attribute"),
        ("{{ raise_exception('x ' * 500) }}", turns("Q"), "x ..."),
        (marked(PLAIN), turns("Q\ufdd0"), "has a chat with U+FDD0 or U+FDD1 in it"),
        ("{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}", turns("Q"), "looks at or leaves its"),
        ("{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}", turns("Q"), "or leaves its"),
    ],
)  # fmt: skip
def test_chat_is_refused_with_a_short_reason_when_rendering_fails(text: str, chat: Chat, reason: str) -> None:
    with pytest.raises(ChatError) as caught:
        template(text).render(chat)
    assert reason in str(caught.value)
    assert str(caught.value).startswith("has a chat ")
    assert len(str(caught.value)) < 260


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a\n{% for %}", "wrong in line 2"),
        ("{% generation %}", "wrong in line 1"),
        ("{{ x | random }}", "No filter named 'random'"),
        ("{% break %}", "cannot be compiled"),
        (marked(CHATML).replace("{%- endgeneration -%}", ""), "wrong in line"),
        (LLAMA_3.replace("if strftime_now is defined else '26 Jul 2024'", ""), "today's date"),
    ],
)
def test_template_is_refused_when_it_is_invalid_or_writes_the_date(text: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        template(text)


def test_marks_may_be_in_macros_and_nested() -> None:
    inside = "{% macro say(m) %}[{% generation %}{{ m.content }}.{% endgeneration %}]{% endmacro %}"
    assert said(inside + "{% for m in messages %}{{ m.role }}{{ say(m) }}{% endfor %}", turns("Q", "A")) == ["Q.", "A."]
    assert said("a{% generation %}b{% generation %}c{% endgeneration %}d{% endgeneration %}", turns("Q")) == ["bcd"]
    assert said("{% generation %}{% endgeneration %}{% generation %}x{% endgeneration %}", turns("Q")) == ["x"]
    assert said(
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}{{ x }}{% generation %}{{ x }}{% endgeneration %}",
        turns("Q"),
    ) == ["1"]


def test_digest_of_a_template_is_frozen() -> None:
    # To be changed with that: under the same snapshot a run would go on with other labels, and caches would keep the old ones.
    assert ChatTemplate(text="{{ messages }}", special_tokens={}).digest == "d8b85aefc27a38d4c054764baa7ae0bc"


def test_digest_covers_the_text_and_the_tokens() -> None:
    digests = {
        ChatTemplate(text=text, special_tokens=tokens).digest
        for text in (CHATML, PLAIN)
        for tokens in ({}, {"eos_token": "</s>"}, {"eos_token": "<|end|>"}, {"bos_token": "</s>"})
    }
    assert len(digests) == 8
    turned = dict(reversed(TOKENS.items()))
    assert ChatTemplate(text=CHATML, special_tokens=turned).digest == template(CHATML).digest
    assert template(CHATML) == template(CHATML) != template(PLAIN)
    assert len({template(CHATML), template(CHATML)}) == 1


def test_template_is_found_beside_the_tokenizer(tmp_path: Path) -> None:
    tokenizer, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    assert load_chat_templates(tokenizer) == {}
    config.write_text(json.dumps({"chat_template": PLAIN}), encoding="utf-8")
    assert load_chat_templates(tokenizer)["default"] == PLAIN
    several = [{"name": "tool_use", "template": ZEPHYR}, {"name": "default", "template": CHATML}]
    for spelled in (several, {each["name"]: each["template"] for each in several}):
        config.write_text(json.dumps({"chat_template": spelled}), encoding="utf-8")
        assert (load_chat_templates(tokenizer)["default"], load_chat_templates(tokenizer).get("tool_use")) == (CHATML, ZEPHYR)
    config.write_text(json.dumps({"chat_template": several[:1]}), encoding="utf-8")
    with pytest.raises(TemplateError, match="has the chat templates tool_use, and none of them is called default"):
        load_chat_templates(tokenizer)
    (tmp_path / "chat_template.jinja").write_text(LLAMA_2, encoding="utf-8")
    assert (load_chat_templates(tokenizer)["default"], load_chat_templates(tokenizer).get("tool_use")) == (LLAMA_2, None)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(PHI_3, encoding="utf-8")
    assert load_chat_templates(tokenizer).get("tool_use") == PHI_3
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(DatasetInvalid, match="chat_template.jinja cannot be read"):
        load_chat_templates(tokenizer)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": ZEPHYR}), encoding="utf-8")
    with pytest.raises(TemplateError, match=r"tokenizer_config.json has the chat templates tool_use"):
        load_chat_templates(tokenizer)
    config.write_text("{}", encoding="utf-8")
    assert load_chat_templates(tokenizer)["default"] == ZEPHYR
    for name in ("chat_template.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to("away")
        with pytest.raises(DatasetInvalid, match=f"{name} cannot be read: .*No such file"):
            load_chat_templates(tokenizer)


def test_template_is_read_from_a_named_json_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content, expected in ((PLAIN, PLAIN), (json.dumps({"chat_template": ZEPHYR, "eos_token": "</s>"}), ZEPHYR)):
        path.write_text(content, encoding="utf-8")
        assert read_chat_templates(path) == {"default": expected}
    for content in ("{}", '{"chat_template": 3}'):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(TemplateError, match=r'config.json is JSON without a text under "chat_template"'):
            read_chat_templates(path)
    with pytest.raises(DatasetInvalid, match="away.jinja cannot be read"):
        read_chat_templates(tmp_path / "away.jinja")


def test_special_tokens_are_read_beside_the_tokenizer(tmp_path: Path) -> None:
    tokenizer, config = write_tokenizer(tmp_path / "tokenizer.json"), tmp_path / "tokenizer_config.json"
    assert load_tokenizer(tokenizer).special_tokens == {}
    older = {"eos_token": {"content": "</s>", "lstrip": False}, "bos_token": "<s>", "additional_special_tokens": ["<x>"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older), encoding="utf-8")
    newer = {"eos_token": "<|im_end|>", "pad_token": {"content": "<pad>"}, "unk_token": None, "add_bos_token": True}
    config.write_text(json.dumps(newer), encoding="utf-8")
    assert load_tokenizer(tokenizer).special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    config.write_text(json.dumps({**newer, "added_tokens_decoder": {}}), encoding="utf-8")
    assert load_tokenizer(tokenizer).special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    named = {"extra_special_tokens": {"image_token": "<image>", "eos_token": "never"}}
    config.write_text(json.dumps({**newer, "added_tokens_decoder": {}, **named}), encoding="utf-8")
    assert load_tokenizer(tokenizer).special_tokens["image_token"] == "<image>"
    assert load_tokenizer(tokenizer).special_tokens["eos_token"] == "<|im_end|>"
    config.write_text("{", encoding="utf-8")
    with pytest.raises(DatasetInvalid, match="tokenizer_config.json cannot be read"):
        load_tokenizer(tokenizer)


def render(text: str, chat: Chat) -> str:
    # Marked, so that nothing but the template's own failure stands in the way.
    return template(text + "{% generation %}{% endgeneration %}").render(chat).text


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.__class__ }}{{ x() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(content='Z') }}",
        "{{ open('/etc/passwd').read() }}",
        "{% include '/etc/passwd' %}",
        "{{ lipsum() }}",
        "{{ 1 // 0 }}",
    ],
)
def test_template_cannot_leave_the_sandbox(text: str) -> None:
    chat = turns("Q", "A")
    with pytest.raises(ChatError, match="its template fails on: "):
        render(text, chat)
    assert chat == turns("Q", "A")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Q"}'),
        ("{{ {'b': '<\N{SNOWMAN}>', 'a': 1} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":1,"b":"<\N{SNOWMAN}>"}'),
        ("{{ [1] | tojson(indent=2) }}{{ '\N{SNOWMAN}' | tojson(ensure_ascii=true) }}", '[\n  1\n]"\\u2603"'),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% for m in messages %}{% if loop.last %}{% continue %}{% endif %}{{ m.content }}{% endfor %}", "Q"),
        ("a\n    {% if true %}\nb\n    {% endif %}\nc\n", "a\nb\nc\n"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueFalse"),
        ("{{ bos_token }}{{ pad_token }}{{ pad_token is defined }}{{ messages[0].name }}<&>", "<s>False<&>"),
    ],
)
def test_template_has_what_hugging_face_gives_to_it(text: str, written: str) -> None:
    answer = "{{ messages[-1].content }}"  # without it the row would be refused
    assert render(text + answer, turns("Q", "A")) == written + "A"
