"""Prompts without answers, as reinforcement learning needs them: texts and chats, with what a reward is computed from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from penstock import DataError, RemoteDataset
from support.corpora import write, write_tokenizer
from support.servers import Serve, Server

NUM_ROWS = 24
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXTS = [f"what is {n} and the fox " + "jumps " * (n % 5) for n in range(NUM_ROWS)]
CHATS = [
    [*([{"role": "system", "content": "the dog"}] if n % 2 else []), {"role": "user", "content": text}]
    for n, text in enumerate(TEXTS)
]
REWARDS = [{"ground_truth": str(n), "style": "rule"} for n in range(NUM_ROWS)]
EXTRA = [{"index": n, "tags": [{"name": "a"}] * (n % 3), "answer": None if n % 4 else "é"} for n in range(NUM_ROWS)]


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    write_tokenizer(shared / "tokenizer.json", [*TEXTS, "<system> <user> <assistant>"])
    write(shared / "texts", "", {"prompt": TEXTS, "answer": list(range(NUM_ROWS))})
    (shared / "template.jinja").write_text(TEMPLATE)
    verl = {"data_source": ["math"] * NUM_ROWS, "prompt": CHATS, "reward_model": REWARDS, "extra_info": EXTRA}
    columns = 'chat_template = "../template.jinja"\ncolumns = ["data_source", "reward_model", "extra_info"]'
    write(shared / "chats", columns, verl)
    write(shared / "answered", 'chat_template = "../template.jinja"', {"prompt": [[{"role": "assistant", "content": "fox"}]]})
    return serve(shared, "--tokenizer", str(shared / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer(server: Server, shared: Path) -> Tokenizer:
    return Tokenizer.from_file(str(shared / "tokenizer.json"))


def dataset(server: Server, name: str, **spec: Any) -> RemoteDataset:
    settings: dict[str, Any] = {"batch_size": 4, "seq_len": 128, "shuffle": "none", "drop_last": False} | spec
    return RemoteDataset(server.url, name, rank=0, world_size=1, **settings)


def prompts_of(data: RemoteDataset) -> list[list[int]]:
    """The tokens of each sample, which are at the right."""
    return [
        ids[len(ids) - sum(mask) :]
        for batch in data
        for ids, mask in zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True)
    ]


def test_text_prompts_have_no_end_and_may_be_padded_on_the_left(server: Server, tokenizer: Tokenizer) -> None:
    assert prompts_of(dataset(server, "texts", pad_side="left")) == [tokenizer.encode(text).ids for text in TEXTS]


def test_chat_prompts_end_with_the_text_that_opens_the_answer(server: Server, tokenizer: Tokenizer) -> None:
    rendered = ["".join(f"<{m['role']}>{m['content']}\n" for m in chat) + "<assistant>" for chat in CHATS]
    assert prompts_of(dataset(server, "chats", pad_side="left")) == [tokenizer.encode(text).ids for text in rendered]


def test_structs_and_lists_of_structs_travel_as_json(server: Server) -> None:
    batches = list(dataset(server, "chats"))
    assert [source for batch in batches for source in batch["data_source"]] == ["math"] * NUM_ROWS
    assert [json.loads(text) for batch in batches for text in batch["reward_model"]] == REWARDS
    without_nulls = [{name: value for name, value in extra.items() if value is not None} for extra in EXTRA]
    assert [json.loads(text) for batch in batches for text in batch["extra_info"]] == without_nulls


@pytest.mark.parametrize("shuffle", ["none", "window"])
def test_each_prompt_comes_several_times_side_by_side(server: Server, shuffle: str) -> None:
    once = prompts_of(dataset(server, "texts", pad_side="left", shuffle=shuffle))
    data = dataset(server, "texts", pad_side="left", shuffle=shuffle, repeat=3, batch_size=6)
    assert len(data) == NUM_ROWS * 3 // 6
    assert prompts_of(data) == [prompt for prompt in once for _ in range(3)]
    schedule = server.json("/v1/datasets/texts/rows/5/schedule", repeat=3, batch_size=6, shuffle=shuffle)
    assert len(schedule["occurrences"]) == 3


def test_prompt_that_the_assistant_has_answered_is_a_bad_row(server: Server) -> None:
    with pytest.raises(DataError, match="does not end with a message to answer"):
        list(dataset(server, "answered"))


def test_prompt_beside_another_text_is_not_taken_for_a_prompt_alone(serve: Serve, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    write(tmp_path / "data" / "pairs", "", {"prompt": ["the fox"], "reply": ["the dog"]})
    images = pa.array([{"bytes": b"1"}])
    listed = {"text": ["the fox"], "image": pa.array([[b"1", b"2"]], pa.list_(pa.binary(), 2))}
    write(tmp_path / "data" / "listed", 'text = "text"\ncolumns = ["image"]', listed)
    write(tmp_path / "data" / "bytes", 'text = "text"\ncolumns = ["image"]', {"text": ["the fox"], "image": images})
    write(tmp_path / "data" / "good", "", {"text": ["the fox"]})
    server = serve(tmp_path / "data", "--tokenizer", str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="no column can be used"):
        dataset(server, "pairs")
    for name in ("bytes", "listed"):
        with pytest.raises(DataError, match="lists, structs and maps without bytes"):
            dataset(server, name)
