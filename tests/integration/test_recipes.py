"""What recipes declare, through a real server: templates, filters, transforms, chats, preference pairs, columns that travel."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from penstock import DataError, RemoteDataset
from support import corpora
from support.corpora import CHATML, EOS, write_shards, write_tokenizer
from support.servers import Serve, Server, penstock
from support.stores import placed

NUM_ROWS = 120


def write(folder: Path, columns: dict[str, Any], toml: str) -> None:
    corpora.write(folder, toml, columns, row_group_size=25)


def chat(row: int) -> list[dict[str, str | None]]:
    turns: list[dict[str, str | None]] = [{"role": "system", "content": "be brief"}] if row % 3 == 0 else []
    for turn in range(1 + row % 3):
        turns.append({"role": "user", "content": f"how many foxes, {row} or {turn}"})
        turns.append({"role": "assistant", "content": f"{row} foxes jump {turn} times"})
    return turns


@pytest.fixture(scope="module")
def data_dir(shared: Path) -> Path:
    write_tokenizer(shared / "tokenizer.json")
    (shared / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    numbers = range(NUM_ROWS)
    meta = [{"title": f"dog {n}", "lang": "en" if n % 3 else "de", "stars": n % 7} for n in numbers]
    write(
        shared / "pages",
        {
            "meta": meta,
            "body": [f"the fox {n} jumps" for n in numbers],
            "score": pa.array([n / 2 for n in numbers], pa.float32()),
            "vector": pa.array([[n, n + 1, n + 2] for n in numbers], pa.list_(pa.int16(), 3)),
            "url": [f"https://example.org/{n}/über" if n % 5 else None for n in numbers],
            "image": [bytes([n % 256, 0, 255]) * (n % 4) for n in numbers],
        },
        'text = "{meta.title}: {body}"\nbos = 5\ncolumns = ["score", "vector", "url", "image", "meta.stars"]\n'
        'filter = "meta.lang = \'en\' and score < 40"\nvalidation = 0.3\nsplit_by = "meta.stars"',
    )
    write(shared / "chats", {"messages": [chat(n) for n in numbers]}, "")
    write(
        shared / "pairs",
        {
            "prompt": [f"how many foxes, {n}" for n in numbers],
            "chosen": [f"{n} foxes" for n in numbers],
            "rejected": ["none of the dogs" for _ in numbers],
        },
        "",
    )
    common = [{"role": "user", "content": "jump"}]
    write(
        shared / "chat-pairs",
        {
            "chosen": [[*chat(n), *common, {"role": "assistant", "content": f"over {n}"}] for n in numbers],
            "rejected": [[*chat(n), *common, {"role": "assistant", "content": "no"}] for n in numbers],
        },
        "",
    )
    write(shared / "loud", {"body": ["fox", "dog"] * 30}, 'text = "shouted"\ntransform = "shout:shout"')
    (shared / "loud" / "shout.py").write_text(
        "import pyarrow as pa\nimport pyarrow.compute as pc\n\n\n"
        "def shout(rows):\n    return pa.record_batch({'shouted': pc.utf8_upper(rows['body'])})\n"
    )
    return shared


@pytest.fixture(scope="module")
def server(serve: Serve, data_dir: Path) -> Server:
    return serve(data_dir, "--tokenizer", str(data_dir / "tokenizer.json"), "--allow-transforms")


@pytest.fixture(scope="module")
def tokenizer(data_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(data_dir / "tokenizer.json"))


def dataset(server: Server, name: str, **spec: Any) -> RemoteDataset:
    settings: dict[str, Any] = {"batch_size": 4, "seq_len": 256, "pad": "longest", "drop_last": False, "shuffle": "none"} | spec
    return RemoteDataset(server.url, name, rank=0, world_size=1, **settings)


def kept() -> list[int]:
    return [n for n in range(NUM_ROWS) if n % 3 and n / 2 < 40]


def rows_of(data: RemoteDataset) -> list[dict[str, Any]]:
    """The samples of an epoch without padding, with what travels beside them."""
    rows = []
    for batch in data:
        for i, real in enumerate(batch["attention_mask"].sum(dim=1).tolist()):
            row = {
                name: value[i] if isinstance(value, list) else value[i].tolist()
                for name, value in batch.items()
                if name != "cu_seqlens"
            }
            rows.append(row | {name: row[name][:real] for name in ("input_ids", "labels")})
    return rows[: data._client.resolve(data.spec).num_samples]


def test_template_filter_and_passthrough_columns_reach_the_loop(server: Server, tokenizer: Tokenizer) -> None:
    rows = rows_of(dataset(server, "pages"))
    texts = [f"dog {n}: the fox {n} jumps" for n in kept()]
    assert [row["input_ids"] for row in rows] == [[5, *tokenizer.encode(text).ids, 0] for text in texts]
    assert [row["score"] for row in rows] == [n / 2 for n in kept()]
    assert [row["vector"] for row in rows] == [[n, n + 1, n + 2] for n in kept()]
    assert [row["url"] for row in rows] == [f"https://example.org/{n}/über" if n % 5 else "" for n in kept()]
    assert [row["image"] for row in rows] == [bytes([n % 256, 0, 255]) * (n % 4) for n in kept()]
    assert [row["meta.stars"] for row in rows] == [n % 7 for n in kept()]


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_filter_applies_to_every_packing(server: Server, packing: str) -> None:
    plain = Counter(token for row in rows_of(dataset(server, "pages")) for token in row["input_ids"])
    packed = dataset(server, "pages", packing=packing, seq_len=64, batch_size=1)
    found = Counter(token for batch in packed for token in batch["input_ids"][batch["attention_mask"].bool()].tolist())
    assert sum((found - plain).values()) == 0
    assert sum((plain - found).values()) < (64 if packing == "concat" else 1)


def test_filtered_row_is_reported_and_never_scheduled(server: Server) -> None:
    assert "meta.lang = 'en'" in server.json("/v1/datasets/pages/rows/3")["filtered_by"]
    spec: dict[str, Any] = {"batch_size": 1, "drop_last": False}
    assert server.json("/v1/datasets/pages/rows/3/schedule", **spec) == {"occurrences": []}
    [shown] = server.json("/v1/datasets/pages/rows/4/schedule", **spec)["occurrences"]
    page = server.json(f"/v1/datasets/pages/epochs/0/ranks/0/batches/{shown['step']}", format="json", **spec)
    assert page["samples"][0]["text"].endswith(f"dog 4: the fox 4 jumps{EOS}")
    assert page["samples"][0]["source"] == "part-0.parquet, row group 0, row 4"


def test_filtered_rows_are_counted_without_tokens(server: Server) -> None:
    answer = server.json_when_ready("/v1/datasets/pages/spec", batch_size=1)
    assert answer["num_samples"] == len(kept())
    assert server.json("/v1/datasets/pages")["rows_served"] == len(kept())
    with_split = [
        server.json_when_ready("/v1/datasets/pages/spec", batch_size=1, split=s)["num_samples"] for s in ("train", "validation")
    ]
    assert sum(with_split) == len(kept())


@pytest.mark.filterwarnings("ignore:no token has loss in")  # of a chat that is cut before the assistant speaks
def test_chat_has_loss_on_the_assistant(server: Server, tokenizer: Tokenizer) -> None:
    rows = rows_of(dataset(server, "chats"))
    for number, row in enumerate(rows):
        text = "".join(f"<|{turn['role']}|>{turn['content']}{EOS}" for turn in chat(number))
        assert row["input_ids"] == tokenizer.encode(text).ids
        in_loss = [token for token in row["labels"] if token != -100]
        said = "".join(f"{turn['content']}{EOS}" for turn in chat(number) if turn["role"] == "assistant")
        assert tokenizer.decode(in_loss, skip_special_tokens=False) == said
    whole = Counter(token for row in rows for token in row["labels"])
    packed = dataset(server, "chats", packing="concat", seq_len=50, batch_size=1)
    found = Counter(token for batch in packed for token in batch["labels"].flatten().tolist())
    assert sum((whole - found).values()) < 50
    assert sum((found - whole).values()) == 0


def test_preference_pair_is_two_samples_after_one_prompt(server: Server, tokenizer: Tokenizer) -> None:
    seen = 0
    for batch in dataset(server, "pairs"):
        for i in range(4):
            for side, answer in (("chosen", f"{seen} foxes"), ("rejected", "none of the dogs")):
                real = int(batch[f"{side}_attention_mask"][i].sum())
                prompt, ids = tokenizer.encode(f"how many foxes, {seen}").ids, [*tokenizer.encode(answer).ids, 0]
                assert batch[f"{side}_input_ids"][i, :real].tolist() == prompt + ids
                assert batch[f"{side}_labels"][i, :real].tolist() == [-100] * len(prompt) + ids
            seen += 1
    assert seen == NUM_ROWS
    for spec in ({"packing": "concat"}, {"overflow": "split"}):
        assert "preference pairs have two" in server.get("/v1/datasets/pairs/spec", **spec).json()["detail"]


def test_chat_pair_has_its_common_messages_as_prompt(server: Server, tokenizer: Tokenizer) -> None:
    [batch] = list(dataset(server, "chat-pairs", batch_size=NUM_ROWS))
    for side in ("chosen", "rejected"):
        for number, labels in enumerate(batch[f"{side}_labels"].tolist()):
            in_loss = tokenizer.decode([token for token in labels if token != -100], skip_special_tokens=False)
            assert in_loss == (f"over {number}" if side == "chosen" else "no") + EOS


def test_transform_source_changes_the_snapshot_and_its_errors_name_the_line(
    serve: Serve, data_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "loud"
    write(folder, {"body": ["fox"] * 9}, 'text = "shouted"\ntransform = "shout:shout"\ntokenizer = "../tokenizer.json"')
    write_tokenizer(tmp_path / "tokenizer.json")
    source = (data_dir / "loud" / "shout.py").read_text()
    fingerprints = []
    for text in (source, source.replace("utf8_upper", "utf8_lower"), source):
        (folder / "shout.py").write_text(text)
        with serve(tmp_path, "--allow-transforms") as server:
            fingerprints.append(server.json("/v1/datasets/loud")["snapshot"])
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]
    (folder / "shout.py").write_text(source + "    ")  # the same function, but another source
    failing = source.replace("    return", "    if rows.num_rows: raise KeyError('no such word')\n    return")
    (folder / "shout.py").write_text(failing)
    line = 1 + failing.splitlines().index("    if rows.num_rows: raise KeyError('no such word')")
    reason = f"loud: the transform shout:shout raises KeyError in line {line} of shout.py: 'no such word', on row group 0 of "
    with serve(tmp_path, "--allow-transforms") as server, pytest.raises(DataError, match=reason):
        list(dataset(server, "loud"))


def test_bad_rows_are_listed_counted_and_in_the_header(serve: Serve, tmp_path: Path) -> None:
    texts: list[str | None] = [f"fox {n}" for n in range(200)]
    texts[7], texts[130] = None, ""
    write(tmp_path / "holes", {"text": texts}, 'on_bad_row = "replace"\ntokenizer = "../tokenizer.json"')
    write_tokenizer(tmp_path / "tokenizer.json")
    with serve(tmp_path) as server:
        frames = server.frames("/v1/datasets/holes/epochs/0/ranks/0/batches", batch_size=10, seq_len=8)
        assert sum(frame.replaced for frame in frames) == 2
        assert max(frame.replaced for frame in frames) <= 2
        listed = server.json("/v1/datasets/holes/quarantine")
        assert listed["num_bad_rows"] == 2
        assert [(row["row"], row["row_group"], row["row_in_group"], row["reason"]) for row in listed["rows"]] == [
            (7, 0, 7, "text is null"),
            (130, 5, 5, "text is empty"),
        ]
        assert server.json("/v1/datasets/holes/quarantine", start=1, limit=1)["rows"] == listed["rows"][1:]
        assert server.json("/v1/datasets/holes")["bad_rows"]["known"] == 2


def test_nulls_in_footers_are_counted(serve: Serve, tmp_path: Path) -> None:
    texts = [f"fox {n}" if n % 50 else None for n in range(200)]
    write(tmp_path / "holes", {"text": texts}, 'on_bad_row = "replace"\ntokenizer = "../tokenizer.json"')
    write_tokenizer(tmp_path / "tokenizer.json")
    with serve(tmp_path) as server:
        with pytest.raises(DataError, match=r"4 of 200 rows .* are known to be bad, more than .*/quarantine lists them"):
            list(dataset(server, "holes", batch_size=10))
        listed = server.json("/v1/datasets/holes/quarantine")
        assert (listed["num_bad_rows"], listed["rows"]) == (4, [])
        server.json("/v1/datasets/holes/rows/50")
        assert [row["row"] for row in server.json("/v1/datasets/holes/quarantine")["rows"]] == [50]


def test_dataset_with_too_many_bad_rows_is_refused(serve: Serve, tmp_path: Path) -> None:
    texts = ["fox" if n % 10 else "" for n in range(200)]
    write(tmp_path / "holes", {"text": texts}, 'on_bad_row = "replace"\ntokenizer = "../tokenizer.json"\nmax_bad_share = 0.05')
    write_tokenizer(tmp_path / "tokenizer.json")
    with serve(tmp_path) as server:  # which knows nothing of them when it is asked for all batches at once
        answer = server.get("/v1/datasets/holes/epochs/0/ranks/0/batches", batch_size=10)
        assert (answer.status_code, answer.json()["type"]) == (500, "urn:penstock:problem:dataset-invalid")
        with pytest.raises(DataError, match=r"of 200 rows .* are known to be bad, more than max_bad_share = 0\.05 allows"):
            list(dataset(server, "holes", batch_size=10))
        assert "are known to be bad" in server.json("/v1/datasets/holes")["bad_rows"]["refusal"]
        (tmp_path / "holes" / "penstock.toml").write_text(
            'on_bad_row = "replace"\ntokenizer = "../tokenizer.json"\nmax_bad_share = 0.2'
        )
    with serve(tmp_path) as server:
        assert len(list(dataset(server, "holes", batch_size=10))) == 20


def test_counted_bad_rows_refuse_a_dataset_before_its_first_step(serve: Serve, tmp_path: Path) -> None:
    """Not in the midst of an epoch, once that many were met; and whichever process answers."""
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    texts = ["fox" if n % 10 else "" for n in range(200)]
    write(data / "holes", {"text": texts}, 'on_bad_row = "replace"\ntokenizer = "../tokenizer.json"')
    write_tokenizer(data / "tokenizer.json")
    with placed(data) as place:
        assert penstock("prepare", place, "--cache-dir", cache).returncode == 1
    with serve(data, "--processes", "2", cache_dir=cache) as server:
        answers = [httpx.get(f"{server.url}/v1/datasets/holes/spec") for _ in range(6)]
        assert [answer.status_code for answer in answers] == [500] * 6
        assert "20 of 200 rows (10.00%) are known to be bad" in answers[0].json()["detail"]
        listed = server.json("/v1/datasets/holes/quarantine")
        assert (listed["num_bad_rows"], listed["complete"], len(listed["rows"])) == (20, True, 20)


def test_window_beyond_the_cache_budget_is_warned_of(serve: Serve, tmp_path: Path) -> None:
    ids = pa.array(np.arange(64 * 40_000).reshape(-1, 64).tolist(), pa.list_(pa.int32()))
    corpora.write(tmp_path / "big", "", {"tokens": ids}, row_group_size=500)
    told = r"^big is shuffled in windows that take about (1\d,\d{3},\d{3}) bytes .* has room for 2,000,000: .*window=(\d+)\.$"
    with serve(tmp_path, "--cache-bytes", "2MB") as server:
        with pytest.warns(UserWarning, match=told) as warned:
            dataset = RemoteDataset(server.url, "big", seq_len=64)
        assert (len(warned), warned[0].filename) == (1, __file__)
        assert len(dataset) == 40_000 // 8
        [found] = re.findall(told, str(warned[0].message))
        RemoteDataset(server.url, "big", seq_len=64, window=int(found[1]))
        RemoteDataset(server.url, "big", seq_len=64, rank=1, world_size=2)  # one rank is enough to be told
        RemoteDataset(server.url, "big", seq_len=64, shuffle="none")


def test_global_shuffle_beyond_the_cache_budget_is_refused(serve: Serve, tmp_path: Path) -> None:
    ids = pa.array(np.arange(64 * 40_000).reshape(-1, 64).tolist(), pa.list_(pa.int32()))
    write(tmp_path / "big", {"tokens": ids}, "")
    with serve(tmp_path, "--cache-bytes", "2MB") as server:
        problem = server.get("/v1/datasets/big/spec", shuffle="global").json()
        assert problem["status"] == 422
        assert "and the budget is 2,000,000" in problem["detail"]
        assert "--cache-bytes" in problem["detail"]
        assert server.get("/v1/datasets/big/spec", shuffle="window").status_code == 200
    with serve(tmp_path, "--cache-bytes", "50MB") as server:
        assert server.get("/v1/datasets/big/spec", shuffle="global").status_code == 200


def test_error_in_a_nested_folder_names_the_dataset(tmp_path: Path) -> None:
    rows = [[[1], [], [3, 4]]]
    write_shards(tmp_path / "data" / "web" / "news", "tokens", rows, type_=pa.list_(pa.int32()), row_group_size=9)
    with Server(tmp_path / "data", tmp_path / "cache") as server:
        detail = server.get("/v1/datasets/web.news/epochs/0/ranks/0/batches/0", batch_size=3).json()["detail"]
        assert detail.startswith("web.news: row 1 of row group 0")
