"""Chats, their tools and what of them has loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.tokenizer import load_tokenizer
from support.corpora import CHATML, EOS, as_json, open_blocks, write
from support.engine import open_snapshot, rows_of

TOOLED = "{% if tools %}{{ tools | tojson }}{{ tools | length }}{% endif %}" + CHATML
FIND = {"type": "function", "function": {"name": "find", "parameters": {"what": "fox"}}}
CALL = {"type": "function", "function": {"name": "call", "parameters": {"times": 2}}}
ASKED = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}]


def as_text(tools: Any) -> Any:
    return None if tools is None else json.dumps(tools)


def as_texts(tools: Any) -> Any:
    return None if tools is None else [json.dumps(tool) for tool in tools]


def test_json_values_are_parsed_at_every_depth(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": TOOLED.replace(".content", " | tojson")}))
    call = {"name": "find", "arguments": {"what": "fox", "deep": [{"n": 1}, None]}}
    chat = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog", "tool_calls": [call]}]
    one_call = pa.StructArray.from_arrays([pa.array(["find"]), as_json(call["arguments"])], ["name", "arguments"])
    calls = pa.ListArray.from_arrays(pa.array([None, 0, 1], pa.int32()), one_call)
    fields = [pa.array(["user", "assistant"]), as_json("fox", "dog"), calls]
    structs = pa.StructArray.from_arrays(fields, ["role", "content", "tool_calls"])
    chats = [as_json(chat), pa.ListArray.from_arrays([0, 2], as_json(*chat)), pa.ListArray.from_arrays([0, 2], structs)]
    one_tool = pa.ListArray.from_arrays([0, 1], as_json(FIND))
    found = []
    for column in (pa.array([json.dumps(chat)]), *chats):
        write(data, "", {"messages": column, "tools": one_tool})
        [block] = open_blocks(data).get([0])
        assert not block.bad
        found.append(rows_of(block))
    assert found == [found[0]] * 4


def test_eos_has_no_loss_after_an_answer_of_weight_0(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML.replace(EOS, "")}))
    chat = [*ASKED, *ASKED]
    weights = ([None, 1, None, 0], [None, 0, None, 1], [None, 0, None, 0])
    rows = [[{**message, "weight": weight} for message, weight in zip(chat, row, strict=True)] for row in weights]
    write(data, f"eos = '{EOS}'", {"messages": rows})
    [block] = open_blocks(data).get([0])
    tokenizer = load_tokenizer(data / "../tokenizer.json")
    found = [[tokenizer.decode(ids) for ids, in_loss in block.features["tokens"].row(row) if in_loss] for row in (0, 1)]
    assert [[text for text in row if text] for row in found] == [["dog"], [f"dog{EOS}"]]
    assert block.bad == {2: "messages has a chat whose messages of the assistant all have weight 0, so no token has loss"}


@pytest.mark.parametrize(
    ("recipe", "columns"),
    [('messages = "talk"', ["talk"]), ('chosen = "talk"\nrejected = "poor"', ["talk", "poor"])],
)
def test_bad_chat_is_reported_with_its_column(data: Path, recipe: str, columns: list[str]) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": EOS}))
    write(data, recipe, {column: [ASKED, None, ASKED[:1]] for column in columns})
    [block] = open_blocks(data).get([0])
    assert block.bad[1] == "talk is null"
    assert block.bad[2].startswith("talk has a chat whose assistant says nothing")


@pytest.mark.parametrize("written", [as_text, as_texts, lambda tools: tools])
@pytest.mark.parametrize("column", ["tools", "functions"])
def test_tools_reach_the_template_in_every_stored_form(data: Path, written: Callable[[Any], Any], column: str) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": TOOLED}))
    stored = [[FIND, CALL], [CALL], [], None]
    recipe = "" if column == "tools" else f'tools = "{column}"'
    write(data, recipe, {"messages": [ASKED] * 4, column: [written(tools) for tools in stored]})
    tokenizer = load_tokenizer(data / "../tokenizer.json")

    [block] = open_blocks(data).get([0])

    bare = f"<|user|>fox{EOS}<|assistant|>dog{EOS}"
    texts = [f"{json.dumps(tools)}{len(tools)}{bare}" if tools else bare for tools in stored]
    assert [tokenizer.decode(row) for row in rows_of(block)] == texts
    snapshot = open_snapshot(data, data / "../tokenizer.json")
    assert f" with {column}" in snapshot.recipe.describe()
    assert snapshot.recipe.identity["tools"] == column


def test_tools_that_are_not_json_make_a_bad_row(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": TOOLED}))
    write(data, "", {"messages": [ASKED] * 4, "tools": ["[", '{"a": 1}', "null", ""]})
    [block] = open_blocks(data).get([0])
    assert sorted(block.bad) == [0, 1]
    assert all(reason.startswith("tools is no list of tools as JSON: ") for reason in block.bad.values())


@pytest.mark.parametrize(
    ("template", "recipe", "reason"),
    [
        (CHATML, 'tools = "functions"', "the chat template does not look at any"),
        (TOOLED, 'tools = "number"', "column 'number' is int64, but tools must be lists of definitions"),
        (TOOLED, 'tools = "absent"', "there is no column 'absent'"),
        (TOOLED, 'tools = "functions"\ntext = "functions"', "tools are given, but rows are no chats"),
    ],
)
def test_declared_tools_are_refused_when_they_would_not_be_used(data: Path, template: str, recipe: str, reason: str) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    write(data, recipe, {"messages": [ASKED], "functions": ["[]"], "number": [1]})
    with pytest.raises(DatasetInvalid, match=reason):
        open_snapshot(data, data / "../tokenizer.json")


@pytest.mark.parametrize("nothing", [pa.nulls(1), pa.array([[]], pa.list_(pa.null()))])
@pytest.mark.parametrize("names", ["ab", "ba"])
def test_tools_may_be_null_throughout_a_shard(data: Path, nothing: pa.Array, names: str) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": TOOLED}))
    write(data, "", {"messages": [ASKED]})
    (data / "part-0.parquet").unlink()
    for name, tools in zip(names, (nothing, [json.dumps([FIND])]), strict=True):
        pq.write_table(pa.table({"messages": [ASKED], "tools": tools}), data / f"{name}.parquet")
    tokenizer = load_tokenizer(data / "../tokenizer.json")
    blocks = open_blocks(data).get([0, 1])
    texts = [tokenizer.decode(row) for block in blocks for row in rows_of(block)]
    assert sorted(json.dumps([FIND]) in text for text in texts) == [False, True]


@pytest.mark.parametrize("first", [{}, {"tools": [3]}])
def test_tools_are_refused_when_only_later_shards_have_them(data: Path, first: dict[str, Any]) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": TOOLED}))
    write(data, "", {"messages": [ASKED]} | first)
    pq.write_table(pa.table({"messages": [ASKED], "tools": ["[]"]}), data / "part-1.parquet")
    with pytest.raises(
        DatasetInvalid,
        match=r"part-1.parquet.* column 'tools' is not in the first shard, .* say in penstock.toml: tools = false",
    ):
        open_snapshot(data, data / "../tokenizer.json")
    for template, recipe in ((CHATML, ""), (TOOLED, "tools = false")):
        (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        (data / "penstock.toml").write_text(recipe)
        assert open_snapshot(data, data / "../tokenizer.json").num_rows == 2


@pytest.mark.parametrize("tooled", [TOOLED, "{{ strftime_now('%d') }}" + CHATML, "{% broken"])
@pytest.mark.parametrize("recipe", ["", "tools = false"])
def test_template_for_tools_changes_nothing_when_rows_have_none(data: Path, tooled: str, recipe: str) -> None:
    (data / "../chat_template.jinja").write_text(CHATML)
    write(data, recipe, {"messages": [ASKED]} | ({"tools": ["[]"]} if recipe else {}))
    before = open_snapshot(data, data / "../tokenizer.json").fingerprint
    (data / "../additional_chat_templates").mkdir()
    (data / "../additional_chat_templates/tool_use.jinja").write_text(tooled)
    assert open_snapshot(data, data / "../tokenizer.json").fingerprint == before


def test_template_for_tools_refuses_tools_when_only_later_shards_have_them(data: Path) -> None:
    (data / "../chat_template.jinja").write_text(CHATML)
    (data / "../additional_chat_templates").mkdir()
    (data / "../additional_chat_templates/tool_use.jinja").write_text(TOOLED)
    write(data, "", {"messages": [ASKED]})
    pq.write_table(pa.table({"messages": [ASKED], "tools": ["[]"]}), data / "part-1.parquet")
    with pytest.raises(DatasetInvalid, match=r"part-1.parquet.* column 'tools' is not in the first shard"):
        open_snapshot(data, data / "../tokenizer.json")


def test_chat_is_bad_when_a_message_is_null(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    asked, said = {"role": "user", "content": "fox", "name": "Al"}, {"role": "assistant", "content": "dog"}
    write(data, "", {"messages": [[asked, said], [asked, None, said]]})
    [block] = open_blocks(data).get([0])
    assert block.bad == {1: "messages has a message that is null"}


def test_chat_is_bad_when_no_token_has_loss(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    said = [
        [("user", "fox"), ("assistant", "dog")],
        [("user", "fox"), ("model", "dog")],
        [("user", "fox")],
        [("user", "fox"), ("assistant", " \n")],  # of which the template still closes the turn
        [("user", "fox"), ("assistant", ""), ("user", "fox"), ("assistant", "dog")],
    ]
    write(data, "", {"messages": [[{"role": role, "content": text} for role, text in chat] for chat in said]})
    [block] = open_blocks(data).get([0])
    silent = "messages has a chat whose assistant says nothing, so no token has loss; its roles: "
    assert block.bad == {1: f"{silent}user, model", 2: f"{silent}user", 3: f"{silent}user, assistant"}


@pytest.mark.parametrize("text", [None, " ", ""])
def test_chat_is_bad_when_the_text_of_an_answer_is_blank_or_null(data: Path, text: str | None) -> None:
    """In JSON, since a template of parts writes null as None."""
    parts = "{% for part in message.content %}{{ part.text }}{% endfor %}"
    (data / "../tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHATML.replace("{{ message.content }}", parts)})
    )
    chats = [[ASKED[0], {"role": "assistant", "content": [{"type": "text", "text": said}]}] for said in ("dog", text)]
    write(data, "", {"messages": [json.dumps(chat) for chat in chats]})
    [block] = open_blocks(data).get([0])
    assert block.bad == {
        1: "messages has a chat whose assistant says nothing, so no token has loss; its roles: user, assistant"
    }


def test_chat_is_bad_when_a_part_of_it_has_a_null_type(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    chats = [[ASKED[0], {"role": "assistant", "content": [{"type": type_, "text": "dog"}]}] for type_ in ("text", None)]
    write(data, "", {"messages": [json.dumps(chat) for chat in chats]})
    [block] = open_blocks(data).get([0])
    assert list(block.bad) == [1]
    assert "message 1 has contents that are not text" in block.bad[1]


def test_bos_and_eos_of_a_chat_do_not_shift_its_loss(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    chat = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}]
    write(data, "bos = 1\neos = 2", {"messages": [chat]})
    blocks = open_blocks(data)
    [block] = blocks.get([0])
    [(asked, is_in_loss), (said, _)] = block.features["tokens"].row(0)
    tokenizer = open_snapshot(data, data / "../tokenizer.json").recipe.tokenizer
    assert tokenizer
    assert (asked[0], said[-1], is_in_loss) == (1, 2, False)
    assert tokenizer.decode(asked[1:]) == f"<|user|>fox{EOS}<|assistant|>"
    assert tokenizer.decode(said[:-1]) == f"dog{EOS}"


def test_eos_has_no_loss_after_a_message_of_the_user(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    asked, said = {"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}
    write(data, "eos = 2", {"messages": [[asked, said], [asked, said, asked]]})
    [block] = open_blocks(data).get([0])
    whole, ends_open = (list(block.features["tokens"].row(row)) for row in (0, 1))
    assert [(turn[-1], is_in_loss) for turn, is_in_loss in whole][-1] == (2, True)
    assert [(turn[-1], is_in_loss) for turn, is_in_loss in ends_open if len(turn)][-1] == (2, False)


@pytest.mark.parametrize(
    ("columns", "ends"),
    [
        (["prompt", "response"], [(True, False), (False, True)]),
        (["prompt", "chosen", "rejected"], [(True, False), (False, True)]),
        (["chosen", "rejected"], [(True, True)]),
    ],
)
def test_bos_opens_the_prompt_and_eos_closes_the_answer(data: Path, columns: list[str], ends: list[tuple[bool, bool]]) -> None:
    write(data, "bos = 1\neos = 2", {name: ["fox"] for name in columns})
    [block] = open_blocks(data).get([0])
    for feature in block.features.values():
        turns = [turn for turn, _ in feature.row(0) if turn]
        assert [(turn[0] == 1, turn[-1] == 2) for turn in turns] == ends


def test_chat_is_bad_when_a_date_exceeds_the_year_9999(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    type_ = pa.list_(pa.struct({"role": pa.string(), "content": pa.string(), "at": pa.timestamp("s")}))
    chats = [[{"role": "assistant", "content": "dog", "at": at}] for at in (0, 10**12)]
    write(data, "", {"messages": pa.array(chats, type_)})
    [block] = open_blocks(data).get([0])
    assert block.bad == {1: "messages cannot be read: a date is outside the years 1 to 9999"}
