"""Opening datasets: how the recipe is decided, and what is refused, with a message that helps."""

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from penstock_server.catalog.view import read_mixture
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.config import read_recipe
from penstock_server.recipes.infer import MASKS, ROLES
from support.corpora import CHATML, EOS, write, write_numbered, write_pairs, write_shards, write_text
from support.engine import Opener, open_snapshot


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({"input_ids": [[1]], "text": ["a"]}, "tokens"),
        ({"tokens": [[1]]}, "tokens"),
        ({"text": ["a"], "prompt": ["a"], "response": ["a"]}, "text"),
        ({"prompt": ["a"], "response": ["a"], "score": [1.0]}, "prompt_response"),
    ],
)
def test_without_a_recipe_the_columns_decide(data: Path, tokenizer: Path, columns: dict[str, list[object]], kind: str) -> None:
    data.mkdir()
    pq.write_table(pa.table(columns), data / "a.parquet")
    assert open_snapshot(data, tokenizer).recipe.kind == kind


def test_unknown_columns_are_refused_with_an_example(data: Path, tokenizer: Path) -> None:
    data.mkdir()
    pq.write_table(pa.table({"instruction": ["a"], "output": ["b"]}), data / "a.parquet")
    with pytest.raises(DatasetInvalid, match=r'instruction .*"content", or prompt = "question" and response = "answer"\.'):
        open_snapshot(data, tokenizer)


def test_recipe_names_columns_tokenizer_and_tokens(data: Path, tokenizer: Path) -> None:
    write_shards(data, "content", [["one"]], type_=pa.string(), row_group_size=1)
    (data / "penstock.toml").write_text('text = "content"\ntokenizer = "../tokenizer.json"\neos = false\npad = 7\n')
    recipe = open_snapshot(data).recipe
    assert (recipe.kind, recipe.token_columns, recipe.eos_id, recipe.pad_id) == ("text", ("content",), None, 7)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("text = content", "cannot be read: Invalid value"),
        ('text = "text"\ntext = "body"', r"cannot be read: Cannot overwrite a value \(at [^.]*\)\.$"),
        ('txet = "content"', "unknown key 'txet'.*Known keys: tokens, text"),
        ("text = 3", r"text must be a text, not 3\.$"),
        ('text = ""', r"text must be a text, not ''\.$"),
        ('columns = ["text", "text"]', "columns must be a list of different names, not"),
        ("validation = 1.0", r"validation must be a share from 0 to below 1, not 1\.0\.$"),
        ("validation = false", "validation must be a share from 0 to below 1, not False"),
        ('response = "text"', "name either tokens, or text, or prompt with or without response"),
        ('text = "body"', "no column 'body'; there are: text"),
        ('tokens = "text"', "'text' is string, but tokens must be lists of integers"),
        ('tokenizer = "none.json"', "none.json cannot be read: No such file"),
        ('eos = "<nope>"', "eos = '<nope>' is not in the vocabulary"),
        ("eos = 4000", "eos = 4000 is not in the vocabulary"),
        ("split_special_tokens = 1", r"split_special_tokens must be true or false, not 1\.$"),
        ("vocab_size = 0", "vocab_size must be a whole number from 1"),
        ('on_bad_row = "ignore"', 'on_bad_row must be "fail" or "replace"'),
        ("vocab_size = 9", "vocab_size is given, but the tokenizer already tells it"),
        ('vocab_size = 9\ntokenizer = "../tokenizer.json"', "vocab_size is given, but the tokenizer already"),
        (f"eos = 0x{'f' * 5000}", r"penstock\.toml cannot be read: Exceeds the limit .* digits"),
        (r'tokenizer = "a\u0000b"', r"tokenizer must be a text, not 'a\\x00b'\.$"),
        (f"{'a.' * 60_000}a = 1", "cannot be read: a key has more than 100 dots"),
        (f"text = '{'a' * 200_000}'", "cannot be read: it has more than 131,072 characters"),
    ],
)
def test_wrong_recipe_is_refused_with_its_key(data: Path, tokenizer: Path, toml: str, message: str) -> None:
    write_text(data, ["one"])
    (data / "penstock.toml").write_text(toml)
    with pytest.raises(DatasetInvalid, match=message):
        open_snapshot(data, tokenizer)


def test_special_token_of_ids_must_be_an_id(data: Path) -> None:
    write_numbered(data, 3)
    (data / "penstock.toml").write_text('eos = "</s>"')
    with pytest.raises(DatasetInvalid, match=r"eos = '</s>' is a text, but rows are token ids: .* Give the id\."):
        open_snapshot(data)


def test_unreadable_recipe_is_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_numbered(data, 3)
    (data / "penstock.toml").write_text("vocab_size = 777")
    with_recipe = open_snapshot(data).fingerprint

    def stale(path: str | Path, **options: Any) -> os.stat_result:
        if Path(path).name == "penstock.toml":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return Path(path).stat(follow_symlinks=False, **options)

    monkeypatch.setattr(os, "lstat", stale)
    monkeypatch.setattr(Path, "lstat", stale)
    assert open_snapshot(data).fingerprint == with_recipe
    (data / "penstock.toml").unlink()
    with pytest.raises(DatasetInvalid, match=r"penstock\.toml cannot be read: .*No such file"):
        open_snapshot(data)


@pytest.mark.parametrize(
    "name", ["penstock.toml", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "own.jinja", "own.py"]
)
def test_pipe_is_not_waited_for(data: Path, tokenizer: Path, name: str) -> None:
    write(data, "", {"messages": [[{"role": "user", "content": "one"}]]})
    for file, content in {
        "tokenizer.json": tokenizer.read_text(),
        "chat_template.jinja": CHATML,
        "own.jinja": CHATML,
        "own.py": "def same(rows):\n    return rows\n",
        "penstock.toml": 'tokenizer = "tokenizer.json"\neos = "<|endoftext|>"\n'
        + {"own.jinja": 'chat_template = "own.jinja"', "own.py": 'transform = "own:same"'}.get(name, ""),
    }.items():
        (data / file).write_text(content)
    open_snapshot(data)
    (data / name).unlink(missing_ok=True)
    os.mkfifo(data / name)
    with pytest.raises(DatasetInvalid, match=f"{name} cannot be read: .*it is not a regular file"):
        open_snapshot(data)
    (data / name).unlink()  # Hypothesis reads the files of all modules, and the transform is one


def test_text_without_a_tokenizer_is_refused(data: Path) -> None:
    write_text(data, ["one"])
    with pytest.raises(DatasetInvalid, match=r"--tokenizer FILE .* or name one in .*penstock.toml"):
        open_snapshot(data)


@pytest.mark.parametrize("content", ["", "{}", '{"model": 1}', "hello", "\x00\x01"])
def test_invalid_tokenizer_is_refused(data: Path, tmp_path: Path, open_all: Opener, content: str) -> None:
    write_text(data, ["one"])
    (tmp_path / "broken.json").write_text(content)
    with pytest.raises(DatasetInvalid, match=r"broken.json is not a tokenizer"):
        open_all(tmp_path / "broken.json")


def test_tokenizer_without_an_eos_is_refused(data: Path, tokenizer: Path) -> None:
    write_text(data, ["one"])
    tokenizer.write_text(tokenizer.read_text().replace("<|endoftext|>", "<|unusual|>"))
    with pytest.raises(DatasetInvalid, match=r'eos = "<the token>" or its id, or eos = false'):
        open_snapshot(data, tokenizer)


@pytest.mark.parametrize("toml", ["", "eos = false"])
def test_eos_of_a_chat_template_is_refused_with_its_place_when_nothing_names_it(data: Path, tokenizer: Path, toml: str) -> None:
    tokenizer.write_text(tokenizer.read_text().replace(EOS, "<|unusual|>"))
    tokenizer.with_name("tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHATML.replace(EOS, "{{ eos_token }}")})
    )
    said = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]]
    write(data / "chat", toml, {"messages": said})
    where = 'tokenizer_config.json beside .*/tokenizer.json, as {"eos_token": "..."}, or in penstock.toml: eos = "<the token>"'
    with pytest.raises(DatasetInvalid, match=rf"writes eos_token, but nothing says what that is. Name it in the {where}\."):
        open_snapshot(data / "chat", tokenizer)
    (data / "chat" / "penstock.toml").write_text('eos = "<|unusual|>"')
    assert open_snapshot(data / "chat", tokenizer).num_rows == 1


def test_split_special_tokens_is_refused_for_ids_and_chats(data: Path, tokenizer: Path) -> None:
    write_numbered(data / "ids", 3)
    (data / "ids" / "penstock.toml").write_text("split_special_tokens = true")
    with pytest.raises(DatasetInvalid, match="is for texts, but rows are token ids or chats"):
        open_snapshot(data / "ids", tokenizer)
    (data / "chat").mkdir()
    said = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]]
    pq.write_table(pa.table({"messages": said}), data / "chat" / "a.parquet")
    (data / "chat" / "penstock.toml").write_text("split_special_tokens = true")
    with pytest.raises(DatasetInvalid, match="rows are token ids or chats"):
        open_snapshot(data / "chat", tokenizer)


KEYS = (
    *ROLES,
    *MASKS,
    "tokenizer",
    "filter",
    "split_by",
    "eos",
    "vocab_size",
    "columns",
    "validation",
    "on_bad_row",
    "mix",
    "x",
)
VALUES = st.one_of(
    st.sampled_from(
        ["text", "{text}", "{{text}} {n}", "n", "../tokenizer.json", "text = 'a'", "length(text) < 9", "meta.a", "\0"]
    ),
    st.booleans(),
    st.integers(),
    st.integers().map(hex),
    st.floats(),
    st.text(),
    st.lists(st.text() | st.integers(), max_size=2),
)
RECIPES = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4).map(
    lambda given: "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())
)


@given(RECIPES | st.text())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_recipe_is_read_or_refused(data: Path, tokenizer: Path, toml: str) -> None:
    data.mkdir(exist_ok=True)
    (data / "penstock.toml").write_text(toml, "utf-8", "replace")
    schema = pa.schema(
        {"text": pa.string(), "n": pa.int64(), "ids": pa.list_(pa.int32()), "meta": pa.struct({"a": pa.bool_()})}
    )
    with suppress(DatasetInvalid):
        read_recipe(data, schema, tokenizer)
    with suppress(DatasetInvalid):
        read_mixture("mixed", data, ["n"])


@pytest.mark.parametrize("text", [f"x = {'[' * 100_000}", f"{'a.' * 3_000}a = 1"], ids=["lists", "tables"])
def test_deeply_nested_recipe_refuses_one_dataset(data: Path, open_all: Opener, text: str) -> None:
    write_numbered(data / "good", 3)
    write_numbered(data / "deep", 3)
    (data / "deep" / "penstock.toml").write_text(text)
    catalog = open_all()
    assert list(catalog.datasets) == ["good"]
    assert "penstock.toml" in catalog.refused["deep"]
    catalog.poll()  # and looks at the others


def test_declared_chat_template_needs_messages(data: Path, tokenizer: Path) -> None:
    (data / "chat").mkdir(parents=True)
    said = [[{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}]]
    pq.write_table(pa.table({"messages": said}), data / "chat" / "a.parquet")
    (data / "chat" / "mine.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}")
    (data / "chat" / "penstock.toml").write_text('chat_template = "mine.jinja"')
    assert open_snapshot(data / "chat", tokenizer).recipe.kind == "messages"
    write_text(data / "plain", ["one"])
    (data / "plain" / "penstock.toml").write_text('chat_template = "mine.jinja"')
    with pytest.raises(DatasetInvalid, match="chat_template renders messages, but rows are made of text. Leave it out, or"):
        open_snapshot(data / "plain", tokenizer)


def test_untrained_tokenizer_is_refused(data: Path, tmp_path: Path) -> None:
    write_text(data, ["one"])
    Tokenizer(models.BPE()).save(str(tmp_path / "empty.json"))
    with pytest.raises(DatasetInvalid, match=r"empty.json is a tokenizer with an empty vocabulary"):
        open_snapshot(data, tmp_path / "empty.json")


def test_prompts_and_responses_are_opened_together(data: Path, tokenizer: Path) -> None:
    write_pairs(data, [("a", "b"), ("c", "d")])
    snapshot = open_snapshot(data, tokenizer)
    assert (snapshot.recipe.token_columns, snapshot.num_rows) == (("prompt", "response"), 2)
    assert np.array_equal(snapshot.rows_per_block, [2])
