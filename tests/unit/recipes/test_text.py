"""Chats as rows: how they are stored, what opens and closes them, and pairs of them."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, processors

from penstock import Spec
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.catalog.dataset import OpenSnapshot
from penstock_server.catalog.warnings import advice_on_data, advice_on_run
from penstock_server.problems import DatasetInvalid
from support.corpora import EOS, write_tokenizer

AS_JSON = "{% for m in messages %}{{ m | tojson }}{% generation %}.{% endgeneration %}{% endfor %}{{ tools | tojson }}"
LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
CHAT = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}]
HALF_OF_A_PAIR = json.dumps([{"role": "user", "content": "\ud83d"}, *CHAT[1:]])  # an emoji that was cut in two
USUAL = ["<s>", "</s>", "<|im_end|>"]


class Folder:
    """A dataset in the making: a recipe, a tokenizer with some special tokens more, and files beside it."""

    def __init__(self, root: Path) -> None:
        self.path, self._cache, self._tokenizer = root / "data" / "d", root / "cache", root / "tokenizer.json"
        self.path.mkdir(parents=True)
        write_tokenizer(self._tokenizer)

    def write(self, columns: dict[str, Any], recipe: str = "", config: dict[str, Any] | None = None, *more: str) -> None:
        tokenizer = Tokenizer.from_file(str(self._tokenizer))
        tokenizer.add_special_tokens(list(more))
        tokenizer.save(str(self._tokenizer))
        self._tokenizer.with_name("tokenizer_config.json").write_text(json.dumps(config or {}))
        (self.path / "penstock.toml").write_text(recipe)
        pq.write_table(pa.table(columns), self.path / "part.parquet")

    def closes(self, token: str) -> None:
        """The tokenizer puts this behind a text, as T5's and BART's do."""
        tokenizer = Tokenizer.from_file(str(self._tokenizer))
        special = [(token, tokenizer.token_to_id(token))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {token}", special_tokens=special)
        tokenizer.save(str(self._tokenizer))

    def all_advice_on(self, spec: Spec) -> list[str]:
        catalog = open_catalog(self.path.parent, self._tokenizer, BlockStore(self._cache))
        return list(advice_on_run(catalog.plan("d", spec)))

    def advice_on(self, spec: Spec) -> list[str]:
        """The advice on a run, but for the guessed EOS, which the tokenizer of these tests causes."""
        return [told for told in self.all_advice_on(spec) if "its rows end with" not in told]

    def rows(self, feature: str = "tokens") -> list[str]:
        """The text of each row, what has no loss in brackets; of a bad one the reason."""
        [block], tokenizer = self.served.blocks.get([0]), self.served.snapshot.recipe.tokenizer
        assert tokenizer
        texts = []
        for row in range(block.num_rows):
            turns = block.features[feature].row(row)
            parts = [tokenizer.decode(ids) if in_loss else f"[{tokenizer.decode(ids)}]" for ids, in_loss in turns]
            texts.append(block.bad.get(row, "".join(parts)))
        return texts

    @property
    def served(self) -> OpenSnapshot:
        return open_catalog(self.path.parent, self._tokenizer, BlockStore(self._cache))["d"].latest

    def advice(self) -> str:
        return "\n".join(advice_on_data([self.served]))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_template_gets_json_unchanged_and_structs_without_nulls(folder: Folder) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": None}}]}
    tools = [{"name": "f", "default": None}]
    written = [json.dumps(each) for each in (CHAT[0], {key: call[key] for key in ("role", "tool_calls")}, tools)]
    folder.write({"messages": [json.dumps([CHAT[0], call])], "tools": [json.dumps(tools)]}, "", {"chat_template": AS_JSON})
    assert folder.rows() == ["[{}].[{}].[{}]".format(*written)]
    folder.write({"messages": [[CHAT[0], call]], "tools": [tools]}, "", {"chat_template": AS_JSON})
    assert "null" not in folder.rows()[0]


def test_maps_become_objects_and_decimals_numbers(folder: Folder) -> None:
    def written(arguments: pa.DataType, value: object) -> str:
        message = pa.struct({"role": pa.string(), "content": pa.string(), "arguments": arguments})
        chat = [{"role": "assistant", "content": "fox", "arguments": value}]
        folder.write({"messages": pa.array([chat], pa.list_(message))}, "", {"chat_template": AS_JSON})
        return folder.rows()[0]

    begin, end = '[{"role": "assistant", "content": "fox", "arguments": ', "}].[null]"
    texts = pa.map_(pa.string(), pa.string())
    assert written(texts, [("x", "1"), ("unit", None)]) == begin + '{"x": "1", "unit": null}' + end
    structs = pa.struct({"a": pa.list_(pa.map_(pa.string(), pa.struct({"b": pa.int8(), "c": pa.int8()}))), "none": texts})
    assert written(structs, {"a": [[("k", {"b": 1})], None]}) == begin + '{"a": [{"k": {"b": 1}}, null]}' + end
    assert written(texts, None) == '[{"role": "assistant", "content": "fox"}].[null]'
    assert written(pa.decimal128(5, 2), Decimal("1.50")) == begin + "1.5" + end
    assert written(pa.decimal128(38, 0), Decimal(2**90)) == begin + str(2**90) + end
    assert "a date has no place in JSON" in written(pa.date32(), date(2020, 1, 1))


@pytest.mark.parametrize("recipe", ["", 'messages = "messages"'])
def test_chats_as_json_text_equal_chats_as_lists(folder: Folder, recipe: str) -> None:
    config = {"chat_template": LLAMA_2, "bos_token": EOS, "eos_token": EOS}
    folder.write({"messages": [CHAT]}, recipe, config)
    expected = folder.rows()
    texts = [json.dumps(CHAT), '{"role": "user"}', "[", "", "null", "[]", "[null]", json.dumps(CHAT[:1]), "3", HALF_OF_A_PAIR]
    folder.write({"messages": texts}, recipe, config)
    good, *bad = folder.rows()
    assert [good] == expected == [f"[{EOS}[INST] fox [/INST]] dog{EOS}"]
    said = ["as JSON: it is no list", "as JSON: Exp", "is null", "is null", "without messages", "that is null", "says nothing"]
    for reason, expected_part in zip(bad, [*said, "as JSON: it is no list", "tokenizer fails on"], strict=True):
        assert expected_part in reason


def test_texts_of_pairs_are_json_chats_when_a_template_is_named(folder: Folder) -> None:
    other = [CHAT[0], {"role": "assistant", "content": "cat"}]
    (folder.path / "llama.jinja").write_text(LLAMA_2)
    names = 'chat_template = "llama.jinja"\nbos = "<s>"\neos = "</s>"\n'
    said = {"chosen": "[<s>[INST] fox [/INST]] dog</s>", "rejected": "[<s>[INST] fox [/INST]] cat</s>"}
    prompt, own = CHAT[:1], {"chosen": CHAT[1:], "rejected": other[1:]}
    for pair in ({"chosen": CHAT, "rejected": other}, {"prompt": prompt, **own}):
        for columns in (
            pair,
            {name: json.dumps(chat) for name, chat in pair.items()},
            {**pair, "chosen": json.dumps(pair["chosen"])},
        ):
            named = "".join(f'{name} = "{name}"\n' for name in columns)
            folder.write({name: [chat] for name, chat in columns.items()}, names + named, {}, *USUAL)
            assert {side: folder.rows(side)[0] for side in said} == said
    folder.write({"chosen": ["dog"], "rejected": [json.dumps(other)]}, names)
    assert "chosen is no list of messages as JSON: Expecting value" in folder.rows("chosen")[0]


@pytest.mark.parametrize("recipe", ['bos = "<s>"\neos = "</s>"', "bos = 377\neos = 378"])
def test_bos_and_eos_are_not_added_when_the_template_writes_them(folder: Folder, recipe: str) -> None:
    folder.write({"messages": [CHAT]}, "bos = '<s>'", {"chat_template": LLAMA_2}, *USUAL)
    tokenizer = Tokenizer.from_file(str(folder._tokenizer))
    recipe = recipe.replace("377", str(tokenizer.token_to_id("<s>"))).replace("378", str(tokenizer.token_to_id("</s>")))
    folder.write({"messages": [CHAT]}, recipe, {"chat_template": LLAMA_2})
    assert folder.rows() == ["[<s>[INST] fox [/INST]] dog</s>"]


@pytest.mark.parametrize(
    ("config", "recipe", "eos", "is_guessed"),
    [
        ({"eos_token": "<|im_end|>"}, "", "<|im_end|>", False),
        ({"eos_token": {"content": "</s>"}}, "", "</s>", False),
        ({}, "", EOS, True),
        ({}, 'eos = "</s>"', "</s>", False),
    ],
)
def test_texts_end_with_the_eos_of_the_model(
    folder: Folder, config: dict[str, Any], recipe: str, eos: str, is_guessed: bool
) -> None:
    folder.write({"prompt": ["fox"], "response": [" dog"]}, recipe, config, *USUAL)
    assert folder.rows() == [f"[fox] dog{eos}"]
    told = f"d: its rows end with {EOS}, but"
    assert (told in folder.advice()) == is_guessed
    if is_guessed:
        assert "tokenizer.json also has </s>, <|im_end|>" in folder.advice()


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"added_tokens_decoder": {"SIZE": {"content": "<|turn|>"}}}},
        {"tokenizer_config.json": {"bos_token": "<|turn|>"}},
        {"tokenizer_config.json": {"additional_special_tokens": ["<|turn|>"]}},
        {"special_tokens_map.json": {"extra_special_tokens": {"turn": "<|turn|>"}}},
        {"added_tokens.json": {"<|turn|>": "SIZE"}},
    ],
    ids=str,
)
def test_added_token_is_one_token_in_a_template(folder: Folder, files: dict[str, Any]) -> None:
    folder.write({"messages": [CHAT]}, "chat_template = 'own.jinja'")
    (folder.path / "own.jinja").write_text(LLAMA_2.replace("{{ bos_token }}", "<|turn|>").replace("{{ eos_token }}", ""))
    size = Tokenizer.from_file(str(folder._tokenizer)).get_vocab_size()
    for name, content in files.items():
        folder._tokenizer.with_name(name).write_text(json.dumps(content).replace("SIZE", str(size)))
    assert folder.rows() == ["[<|turn|>[INST] fox [/INST]] dog"]
    [block] = folder.served.blocks.get([0])
    assert block.features["tokens"].tokens.values[0] == size
    assert folder.served.snapshot.vocab_size == size + 1


def test_eos_is_not_added_when_the_template_writes_it_before_a_line_break(folder: Folder) -> None:
    chatml = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>\n{% endfor %}"
    for end in ("", "</s>"):
        template = chatml + "{{ '<assistant>' if add_generation_prompt else '" + end + "' }}"
        folder.write({"messages": [CHAT]}, 'eos = "<|im_end|>"', {"chat_template": template}, *USUAL)
        assert folder.rows() == [f"[<user>fox<|im_end|>\n<assistant>]dog<|im_end|>[\n{end}]"]


def test_server_warns_of_tools_that_a_template_ignores(folder: Folder) -> None:
    plain = AS_JSON.replace("{{ tools | tojson }}", "</s>")
    tools = {"tools": [[{"name": "f"}]]}
    folder.write({"messages": [CHAT]} | tools, "", {"chat_template": plain}, *USUAL)
    assert "d: the recipe does not use tools:" in folder.advice()
    folder.write({"messages": [CHAT]} | tools, "tools = false", {"chat_template": plain})
    assert folder.advice() == ""
    folder.write(
        {"messages": [CHAT]} | tools,
        "",
        {"chat_template": [{"name": n, "template": t} for n, t in (("default", plain), ("tool_use", AS_JSON))]},
    )
    assert folder.rows()[0].endswith('[[{"name": "f"}]]')
    assert folder.advice() == ""


def test_server_warns_of_a_template_without_an_end_of_answers(folder: Folder) -> None:
    endless = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{{ '[assistant]' if add_generation_prompt }}"
    folder.write({"messages": [CHAT]}, "", {"chat_template": endless}, *USUAL)
    assert "d: its chat template writes no token after an answer" in folder.advice()
    folder.write({"messages": [CHAT]}, 'eos = "</s>"', {"chat_template": endless})
    assert folder.advice() == ""
    folder.write({"messages": [CHAT]}, "", {"chat_template": endless.replace("\n{% endfor", "</s>\n{% endfor")})
    assert folder.advice() == ""


def test_server_warns_of_marks_without_the_end_of_answers(folder: Folder) -> None:
    turn = "<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n"
    for opening in ("", "{{ raise_exception('no system') if messages[0].role != 'system' }}"):
        for recipe in ("", 'eos = "<|im_end|>"'):
            template = f"{opening}{{% for m in messages %}}{turn}{{% endfor %}}"
            folder.write({"messages": [CHAT]}, recipe, {"chat_template": template}, *USUAL)
            assert "d: its chat template writes the end of an answer after {% endgeneration %}" in folder.advice()
    template = f"{{% for m in messages %}}{turn}{{% endfor %}}"
    folder.write({"messages": [CHAT]}, 'eos = "</s>"', {"chat_template": template}, *USUAL)
    assert folder.rows() == ["[<user>]fox[<|im_end|>\n<assistant>]dog[<|im_end|>\n]</s>"]
    assert folder.advice() == ""
    inside = turn.replace("{% endgeneration %}<|im_end|>", "<|im_end|>{% endgeneration %}")
    folder.write({"messages": [CHAT]}, "", {"chat_template": f"{{% for m in messages %}}{inside}{{% endfor %}}"})
    assert folder.advice() == ""


def test_server_warns_of_a_template_without_system_messages(folder: Folder) -> None:
    for condition, is_told in ((" if m.role != 'system'", True), ("", False)):
        template = f"{{% for m in messages{condition} %}}{{{{ m.content }}}}</s>{{% endfor %}}"
        folder.write({"messages": [CHAT]}, "", {"chat_template": template}, *USUAL)
        assert ("d: its chat template drops system messages" in folder.advice()) == is_told


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"prompt": ["fox"], "completion": pa.array([[1]])}, ["completion (list<"]),
        ({"text": [b"fox"]}, ["text (binary)"]),
    ],
)
def test_columns_of_unsuitable_types_are_refused(folder: Folder, columns: dict[str, Any], said: list[str]) -> None:
    folder.write(columns)
    with pytest.raises(DatasetInvalid) as refused:
        folder.rows()
    assert [part for part in said if part not in str(refused.value)] == []


def test_server_warns_of_chats_and_answers_beside_texts(folder: Folder) -> None:
    both = {"text": ["fox"], "messages": [CHAT], "prompt": ["a"], "completion": ["b"], "response": [3]}
    both |= {"chosen": [CHAT], "rejected": [CHAT]}
    for names in (("messages", "prompt", "completion"), ("prompt", "completion"), ("chosen", "rejected")):
        folder.write({name: both[name] for name in ("text", "response", *names)})
        assert f"d: the recipe does not use {', '.join(names)}: " in folder.advice()
    for names in (("prompt", "chosen"), ("response", "completion", "rejected")):
        folder.write({name: (both | {"response": ["a"]})[name] for name in ("text", *names)})
        assert folder.advice() == ""
    folder.write(both, 'text = "text"')
    assert folder.advice() == ""


def test_pairs_of_text_and_chats_are_refused(folder: Folder) -> None:
    config = {"chat_template": LLAMA_2, "bos_token": EOS, "eos_token": EOS}
    mixed = {"prompt": ["fox"], "chosen": [CHAT[1:]], "rejected": [CHAT[1:]]}
    names = 'prompt = "prompt"\nchosen = "chosen"\nrejected = "rejected"'
    folder.write(mixed, names, config)
    with pytest.raises(DatasetInvalid, match="or all chats, but prompt is string, chosen is list"):
        folder.rows()


@pytest.mark.parametrize(
    ("recipe", "is_told"), [("", True), ('filter = "label = true"', False), ('columns = ["label"]', False)]
)
@pytest.mark.parametrize("ids", [False, True])
def test_run_is_warned_of_an_unused_label(folder: Folder, recipe: str, is_told: bool, ids: bool) -> None:
    texts = {"prompt": [[1, 2]] * 2, "completion": [[3]] * 2} if ids else {"prompt": ["fox"] * 2, "completion": [" dog"] * 2}
    folder.write(texts | {"label": [True, False]}, recipe)
    told = "d: the recipe does not use label: "
    assert (told in folder.advice()) == is_told
    assert any(sentence.startswith(told) for sentence in folder.advice_on(Spec(batch_size=1, seq_len=16))) == is_told
    assert ("label" in folder.served.snapshot.recipe.unused) == is_told


def test_run_gets_the_warnings_of_the_server(folder: Folder) -> None:
    folder.write({"prompt": ["fox"], "response": [" dog"]}, "", {}, *USUAL)
    assert folder.advice()
    assert folder.all_advice_on(Spec(batch_size=1, seq_len=16)) == folder.advice().split("\n")


NO_BLANK = "d: no blank separates"


@pytest.mark.parametrize(
    ("pairs", "recipe", "is_warned"),
    [
        ([("fox?", "dog")], "", True),
        ([("fox", "dog"), ("the", "over"), (None, "dog"), ("fox", "")], "", True),
        ([("fox", " dog")], "", False),
        ([("fox\n", "dog")], "", False),
        ([("fox", "dog"), ("fox", " dog")], "", False),
        ([("fox", "dog")], 'prompt = "{prompt}\\n"\nresponse = "response"', False),
        ([("fox", "dog"), ("fox:", "dog")], "filter = \"prompt = 'fox:'\"", True),
        ([("[INST] fox [/INST]", "dog")], "", False),
        ([("fox", "<|endoftext|>")], "", False),
        ([("狐", "犬")], "", False),
    ],
)
def test_run_is_warned_of_responses_joined_to_their_prompts(
    folder: Folder, pairs: list[tuple[str | None, str]], recipe: str, is_warned: bool
) -> None:
    prompts, responses = zip(*pairs, strict=True)
    folder.write({"prompt": prompts, "response": responses}, f'{recipe}\non_bad_row = "replace"\nmax_bad_share = 0.9')
    assert (NO_BLANK in folder.advice()) == is_warned
    assert any(sentence.startswith(NO_BLANK) for sentence in folder.advice_on(Spec(batch_size=1, seq_len=16))) == is_warned
    assert not any(
        sentence.startswith(NO_BLANK) for sentence in folder.advice_on(Spec(batch_size=1, seq_len=16, task="seq2seq"))
    )
