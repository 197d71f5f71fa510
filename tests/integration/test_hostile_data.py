"""Data folders of an attacker: datasets are refused, or rows are bad, within bounds; other datasets are served.

Before these bounds, on 2 cores: a template that loops kept the server from starting, one that allocates took 6 GB. A tokenizer
that replaces a letter by 1 MB took 10.4 GB, and an exploding regex hung its requests. A shard of 22 KB with 1.5 GB of zeros
took 1 GB, and its count never ended. Now processes end after 15 seconds of CPU, for rows after 5, or at 2 GiB.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.corpora import write, write_numbered, write_text, write_tokenizer
from support.processes import Watch, until
from support.servers import Serve, Server

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ALLOCATE = "{% set it = namespace(x='12345678') %}{% for i in range(40) %}{% set it.x = it.x ~ it.x %}{% endfor %}"
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)
CHAT = [{"role": "user", "content": "who"}, {"role": "assistant", "content": "a fox"}]
EVIL = [{"role": "user", "content": "evil"}, {"role": "assistant", "content": "a fox"}]
MAX_BYTES = 700 << 20  # of the server itself; its processes have their own limit


def write_chats(data: Path, name: str, template: str) -> None:
    folder = write(
        data / name, 'chat_template = "chat.jinja"\ntokenizer = "../tokenizer.json"', {"messages": [CHAT] * 9 + [EVIL]}
    )
    (folder / "chat.jinja").write_text(template)


def write_texts(data: Path, name: str, texts: list[str], **changes: Any) -> None:
    folder = write_text(data / name, texts)
    (folder / "penstock.toml").write_text('tokenizer = "tokenizer.json"')
    (folder / "tokenizer.json").write_text(json.dumps(json.loads((data / "tokenizer.json").read_text()) | changes))


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replaced(letter: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": letter}, "content": "x" * (1 << 20)}


@pytest.fixture(scope="module")
def data(shared: Path) -> Path:
    write_tokenizer(shared / "tokenizer.json")
    write_numbered(shared / "good", 20)
    return shared


@pytest.fixture(scope="module")
def server(serve: Serve, data: Path) -> Server:
    write_chats(data, "loops", LOOP + CHATML)
    write_chats(data, "allocates", ALLOCATE + CHATML)
    write_chats(data, "loops-on-a-row", "{% if messages[0].content == 'evil' %}" + LOOP + "{% endif %}" + CHATML)
    write_texts(data, "letter", ["a fox"], normalizer=replaced("a"))
    write_texts(data, "letter-of-a-row", ["a fox"] * 9 + ["Ω" * 3000], normalizer=replaced("Ω"))
    write_texts(data, "regex", ["a fox"] * 9 + [("a" * 22 + "b") * 2000], pre_tokenizer=regex("(a|a)+$"))
    return serve(data, "--poll-seconds", "0")


def refused(server: Server) -> dict[str, str]:
    return {each["name"]: each["error"] for each in server.json("/v1/datasets")["refused"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"), [("loops", "seconds"), ("allocates", "MiB of memory"), ("letter", "MiB of memory")]
)
def test_tokenizer_or_template_that_explodes_is_refused_at_opening(server: Server, name: str, reason: str) -> None:
    assert f"{name}: its tokenizer or chat template takes more than " in refused(server)[name]
    assert f"{reason} when it is loaded and tried on short texts" in refused(server)[name]
    server.json("/v1/datasets/good/epochs/0/ranks/0/batches/0", format="json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [("loops-on-a-row", "takes more than 5 sec"), ("letter-of-a-row", "takes more than 2,048 MiB"), ("regex", "")],
)
def test_row_that_explodes_is_bad_and_its_neighbours_are_not(server: Server, name: str, reason: str) -> None:
    assert server.get(f"/v1/datasets/{name}/rows/0").json()["num_tokens"]
    with Watch(server.pid) as memory:
        row = server.json(f"/v1/datasets/{name}/rows/9")
    assert reason in row["bad"]
    assert memory.peak < MAX_BYTES
    server.json("/v1/datasets/good/epochs/0/ranks/0/batches/0", format="json")
    assert server.json(f"/v1/datasets/{name}/quarantine")["num_bad_rows"] == 1


def test_killed_worker_makes_no_row_bad(serve: Serve, tmp_path: Path) -> None:
    """The kernel kills when memory is short, which says nothing about the row."""
    write_tokenizer(tmp_path / "tokenizer.json")
    write_texts(tmp_path, "texts", ["a fox"] * 9)
    server = serve(tmp_path)
    for process in _below(server.pid):
        os.kill(process, signal.SIGKILL)
    until(lambda: server.get("/v1/datasets/texts/epochs/0/ranks/0/batches/0", batch_size=1).status_code == 200)
    assert server.json("/v1/datasets/texts/quarantine")["num_bad_rows"] == 0


def test_processes_end_with_the_server(serve: Serve, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    write_texts(tmp_path, "texts", ["a fox"] * 9)
    server = serve(tmp_path)
    server.json("/v1/datasets/texts/rows/0")
    processes = _below(server.pid)
    assert len(processes) >= 3  # the nursery, a loader and a worker
    server.kill()
    until(lambda: not any(Path(f"/proc/{process}/cmdline").exists() and _lives(process) for process in processes))


def _lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _below(pid: int) -> list[int]:
    """All processes below one, in any depth."""
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return children + [below for child in children for below in _below(child)]


def write_zeros(path: Path, num_rows: int, length: int) -> None:
    offsets = pa.array(np.arange(num_rows + 1, dtype=np.int32) * length)
    zeros = pa.ListArray.from_arrays(offsets, pa.array(np.zeros(num_rows * length, np.int32)))
    path.parent.mkdir()
    pq.write_table(pa.table({"tokens": zeros}), path, compression="zstd")


def test_shard_of_many_zeros_is_refused_with_its_sizes(serve: Serve, tmp_path: Path) -> None:
    write_numbered(tmp_path / "good", 20)
    write_zeros(tmp_path / "zeros" / "part.parquet", 300, 1 << 20)
    server = serve(tmp_path)
    assert "would become 1,258,291,200 bytes of values in memory" in refused(server)["zeros"]
    server.json("/v1/datasets/good/epochs/0/ranks/0/batches/0", format="json")


def test_page_that_grows_is_refused_before_it_is_read(serve: Serve, tmp_path: Path) -> None:
    write_numbered(tmp_path / "good", 20)
    (tmp_path / "page").mkdir()
    table = pa.table({"tokens": pa.array([[0] * 1_000_000] * 40, pa.list_(pa.int32()))})
    options: dict[str, Any] = {
        "compression": "zstd",
        "use_dictionary": False,
        "data_page_size": 1 << 30,
        "write_batch_size": 1 << 30,
    }
    pq.write_table(table, tmp_path / "page" / "part.parquet", **options)
    server = serve(tmp_path)
    problem = server.get("/v1/datasets/page/rows/0").json()
    assert "bytes that grow to 160," in problem["detail"]
    assert problem["type"].endswith(":shard-unreadable")


@pytest.mark.parametrize("has_type", [True, False])
def test_long_text_of_a_dictionary_is_refused_with_its_sizes(serve: Serve, tmp_path: Path, has_type: bool) -> None:
    """653 bytes that are 65 GB of text. `has_type`: Arrow reads the column as a dictionary, otherwise as text."""
    folder = tmp_path / "text"
    folder.mkdir()
    write_tokenizer(folder / "tokenizer.json")
    (folder / "penstock.toml").write_text('tokenizer = "tokenizer.json"')
    repeated = pa.DictionaryArray.from_arrays(pa.array(np.zeros(65_000, np.int32)), pa.array(["0" * 1_000_000]))
    pq.write_table(pa.table({"text": repeated}), folder / "part.parquet", store_schema=has_type)
    server = serve(tmp_path)
    with Watch(server.pid) as memory:
        problem = server.get("/v1/datasets/text/rows/0").json()
    assert re.search(
        r"rows of it take [\d,]+ bytes of memory, more than 1,073,741,824; 65,000 rows are stored in", problem["detail"]
    )
    assert memory.peak < 2 << 30


def test_deep_schema_is_refused(serve: Serve, tmp_path: Path) -> None:
    write_numbered(tmp_path / "good", 20)
    nested: pa.DataType = pa.int32()
    for _ in range(200):
        nested = pa.struct([("a", nested)])
    (tmp_path / "deep").mkdir()
    pq.write_table(pa.table({"tokens": pa.array([], nested)}), tmp_path / "deep" / "part.parquet")
    assert "too deeply nested" in refused(serve(tmp_path))["deep"]


def test_files_outside_the_data_folder_are_refused(serve: Serve, tmp_path: Path) -> None:
    data, outside = tmp_path / "data", tmp_path / "outside"
    write_numbered(data / "good", 20)
    write_numbered(outside / "shards", 5)
    write_tokenizer(outside / "tokenizer.json")
    for name, toml in (("named", 'tokenizer = "../../outside/tokenizer.json"'), ("linked", 'tokenizer = "tokenizer.json"')):
        (write_text(data / name, ["a fox"]) / "penstock.toml").write_text(toml)
    (data / "linked" / "tokenizer.json").symlink_to(outside / "tokenizer.json")
    (data / "folder").symlink_to(outside / "shards")
    (data / "shard").mkdir()
    (data / "shard" / "part.parquet").symlink_to(outside / "shards" / "part-000.parquet")
    why = refused(serve(data))
    assert why.keys() == {"named", "linked", "folder", "shard"}
    assert "is outside the data folder. Put it into the data folder, or name its folder with --assets DIR" in why["named"]
    for name in ("linked", "folder", "shard"):
        assert "is reached by a symlink out of the data folder. To follow such symlinks, use --follow-symlinks" in why[name]
    assert str(tmp_path) not in json.dumps(why)  # callers see names relative to the data folder
    assert why["named"].startswith("named/../../outside/tokenizer.json ")
    assert refused(serve(data, "--assets", str(outside))) == {}
    assert refused(serve(data, "--follow-symlinks")).keys() == {"named"}


def test_transform_runs_only_if_the_operator_allows_it(serve: Serve, tmp_path: Path) -> None:
    write_numbered(tmp_path / "good", 20)
    folder = write_numbered(tmp_path / "code", 20)
    (folder / "penstock.toml").write_text('transform = "own:same"')
    (folder / "own.py").write_text(f"open({str(tmp_path / 'has-run')!r}, 'w')\n\ndef same(batch):\n    return batch\n")
    why = refused(serve(tmp_path))["code"]
    assert why.startswith("code: its recipe has a transform, which is code in the data folder. Use --allow-transforms")
    assert not (tmp_path / "has-run").exists()
    assert refused(serve(tmp_path, "--allow-transforms")) == {}
    assert (tmp_path / "has-run").exists()


def test_responses_name_no_absolute_path(serve: Serve, tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_text(data / "no-tokenizer", ["a fox"])
    for name, toml in (("toml", "nonsense"), ("key", 'colour = "red"'), ("missing", 'tokenizer = "none.json"')):
        (write_text(data / name, ["a fox"]) / "penstock.toml").write_text(toml)
    (write_numbered(data / "failing", 9) / "penstock.toml").write_text('transform = "own:fail"')
    (data / "failing" / "own.py").write_text("def fail(batch):\n    return open(__file__ + 'x') if batch.num_rows else batch\n")
    (data / "torn").mkdir()
    (data / "torn" / "part.parquet").write_bytes(b"PAR1PAR1")
    write_numbered(data / "good", 9)
    server = serve(data, "--allow-transforms")
    shard = write_numbered(data / "cut", 9) / "part-000.parquet"
    server.get("/v1/datasets/cut")
    texts = [
        server.get(path).text for path in ("/v1/datasets", "/v1/datasets/failing/rows/0", "/v1/datasets/failing/quarantine")
    ]
    texts += [server.get(f"/v1/datasets/{name}").text for name in (*refused(server), "cut", "none")]
    shard.write_bytes(b"")
    texts.append(server._client.post(f"{server.url}/v1/datasets/cut/refresh").text)
    assert not [text for text in texts if str(tmp_path) in text or "Traceback" in text]
    assert "toml/penstock.toml cannot be read" in texts[0]
