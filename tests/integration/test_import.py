"""`penstock import` as a person uses it: then served, trained on, stopped half-way, in little memory."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from penstock import RemoteDataset
from support.corpora import read_back, shards_in, write_tokenizer
from support.processes import Fork, until
from support.row_files import write_mds
from support.servers import Serve, penstock, penstock_in_terminal

MIB = 1 << 20


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "penstock", "import", *map(str, arguments)]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return penstock("import", *arguments)


def stories(path: Path, num_rows: int, words: int = 20) -> Path:
    """Lines with a text that begins with the row's number, and with chat messages."""
    filler = "the quick brown fox jumps over the lazy dog " * (words // 9 + 1)
    with path.open("w") as file:
        for row in range(num_rows):
            messages = [{"role": "user", "content": f"{row}?"}, {"role": "assistant", "content": filler[: row % 40]}]
            file.write(json.dumps({"text": f"{row} {filler}", "messages": messages, "score": row / 2}) + "\n")
    return path


def anything_hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*")]


def test_imported_dataset_can_be_served_and_trained_on(serve: Serve, tmp_path: Path) -> None:
    done = run(stories(tmp_path / "x.jsonl", 5_000, 90), tmp_path / "data" / "stories", "--shard-bytes", "1MB")
    assert (done.returncode, done.stderr) == (0, "")
    summary = done.stdout.splitlines()
    assert summary[0].startswith(f"{tmp_path / 'data' / 'stories'}: 5,000 rows in 3 shards, 3 row groups; 2.")
    assert summary[1:] == [
        "  text: string",
        "  messages: list<item: struct<role: string, content: string>>, 10,000 values, 2 in the longest row",
        "  score: double",
    ]
    assert read_back(tmp_path / "data" / "stories").column("messages")[41].as_py()[0] == {"role": "user", "content": "41?"}
    (tmp_path / "data" / "stories" / "penstock.toml").write_text('text = "text"')
    server = serve(tmp_path / "data", "--tokenizer", str(write_tokenizer(tmp_path / "tokenizer.json")))
    assert server.json("/v1/datasets/stories")["rows"] == 5_000
    query: dict[str, str | int] = {"format": "json", "batch_size": 1, "seq_len": 8, "shuffle": "none"}
    assert "4321 the quick" in server.get("/v1/datasets/stories/epochs/0/ranks/0/batches/4321", **query).text
    batch = next(iter(RemoteDataset(server.url, "stories", batch_size=4, seq_len=32)))
    assert batch["input_ids"].shape == (4, 32)


def test_imported_token_ids_can_be_served(serve: Serve, tmp_path: Path) -> None:
    ids = np.arange(10_000) % 100
    ids.astype("<u2").tofile(tmp_path / "train.bin")
    asked = run(tmp_path / "train.bin", tmp_path / "data" / "ids")
    assert (asked.returncode, "as in --ids uint16. Nothing was written." in asked.stderr) == (2, True)
    done = run(tmp_path / "train.bin", tmp_path / "data" / "ids", "--ids", "uint16", "--document-end", "99")
    assert done.stdout.startswith(f"{tmp_path / 'data' / 'ids'}: 100 rows in 1 shard")
    assert done.stdout.splitlines()[1].endswith(", 10,000 values, 100 in the longest row")
    data = RemoteDataset(serve(tmp_path / "data").url, "ids", packing="best_fit", seq_len=200, batch_size=1, drop_last=False)
    for batch in data:
        assert batch["input_ids"].tolist() == [[*range(100)] * 2]
        assert batch["cu_seqlens"].tolist() == [0, 100, 200]


def test_imported_ids_without_document_marks_are_one_stream(serve: Serve, tmp_path: Path) -> None:
    parts = [np.random.default_rng(size).integers(0, 65, size) for size in (150_000, 70_000)]
    files = [tmp_path / "train.bin", tmp_path / "val.bin"]
    for path, part in zip(files, parts, strict=True):
        part.astype("<u2").tofile(path)
    done = run(*files, tmp_path / "data" / "chars", "--ids", "uint16")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].startswith(f"{tmp_path / 'data' / 'chars'}: 5 rows in 1 shard")
    assert done.stdout.splitlines()[2:] == [
        f"  one stream of ids, in rows of 65,536: nothing marks documents in 2 files, such as {files[0]}. Read it with "
        "packing=concat. If an id marks documents, name it: --document-end ID."
    ]
    data = RemoteDataset(serve(tmp_path / "data").url, "chars", packing="concat", shuffle="none", seq_len=1_000, batch_size=22)
    batches = [batch["input_ids"].numpy() for batch in data]
    assert np.array_equal(np.concatenate(batches).ravel(), np.concatenate(parts))


def test_server_sees_old_or_new_shards_during_an_import(serve: Serve, tmp_path: Path) -> None:
    data, tokenizer = tmp_path / "data", write_tokenizer(tmp_path / "tokenizer.json")
    assert run(stories(tmp_path / "old.jsonl", 7), data / "stories").returncode == 0
    server = serve(data, "--tokenizer", str(tokenizer), "--poll-seconds", "0.1")
    new = stories(tmp_path / "new.jsonl", 10_000, 300)
    with closing(Fork("import", new, data / "stories", "--overwrite", "--shard-bytes", "1MB")):
        seen, deadline = {7}, time.monotonic() + 60
        while 10_000 not in seen and time.monotonic() < deadline:
            seen.add(server.json("/v1/datasets/stories")["rows"])
            time.sleep(0.01)
    assert len(shards_in(data / "stories")) > 10
    assert seen == {7, 10_000}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_import_memory_does_not_grow_with_a_shard(tmp_path: Path) -> None:
    """A compressed shard of 300 MB: the peak stays below 400 MiB."""
    rows = [{"text": f"{row} " + "word and word " * 1_400} for row in range(15_000)]
    folder = write_mds(tmp_path / "mds", {"text": "str"}, rows, shard_rows=len(rows), compression="zstd")
    with subprocess.Popen(command(folder, tmp_path / "out"), stdout=subprocess.PIPE, text=True) as process:
        peak = max(anonymous_bytes(process))
    assert process.returncode == 0
    assert sum(1 for _ in shards_in(tmp_path / "out")) == 2
    assert peak < 400 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["jsonl", pytest.param("csv", marks=pytest.mark.slow)])
def test_import_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
    """300 MB of JSON lines and of CSV: the peak stays below 400 MiB."""
    rows = [json.dumps({"text": f"{row} " + "word and word " * 140}) for row in range(1_000)]
    rows = rows if kind == "jsonl" else [f'{row},"{json.loads(line)["text"]}"' for row, line in enumerate(rows)]
    path = tmp_path / f"x.{kind}"
    with path.open("w") as file:
        file.write("" if kind == "jsonl" else "id,text\n")
        for _ in range(150):
            file.write("\n".join(rows) + "\n")
    assert path.stat().st_size > 290e6
    with subprocess.Popen(command(path, tmp_path / "out"), stdout=subprocess.PIPE, text=True) as process:
        peak = max(anonymous_bytes(process))
    assert process.returncode == 0
    assert sum(1 for _ in shards_in(tmp_path / "out")) == 2
    assert peak < 400 * MIB


def anonymous_bytes(process: subprocess.Popen[str]) -> Iterator[int]:
    """The anonymous memory of a process, time and again while it runs."""
    while process.poll() is None:
        if found := re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text()):
            yield int(found[1]) * 1024
        time.sleep(0.005)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("overwrite", [False, True])
def test_stopped_import_leaves_no_files(tmp_path: Path, how: signal.Signals, overwrite: bool) -> None:
    out_dir = tmp_path / "out"
    if overwrite:
        assert run(stories(tmp_path / "old.jsonl", 10), out_dir).returncode == 0
    path = stories(tmp_path / "x.jsonl", 60_000, 200)
    flags = ["--overwrite"] * overwrite
    with closing(Fork("import", path, out_dir, *flags)) as process:
        until(lambda: process.is_alive() and any(tmp_path.rglob(".import-*/*.parquet")), 300)  # it is writing
        process.send_signal(how)
        assert process.communicate(timeout=30) == (130, "", "penstock: stopped\n")
    assert anything_hidden(tmp_path) == []
    assert out_dir.exists() == overwrite
    if overwrite:
        assert read_back(out_dir).num_rows == 10


def test_import_reports_a_full_disk_in_one_line(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))

    path = stories(tmp_path / "x.jsonl", 20_000)
    done = subprocess.run(
        command(path, tmp_path / "out"), capture_output=True, text=True, timeout=120, check=False, preexec_fn=limit
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"penstock import: {tmp_path / 'out'} cannot be written: File too large")
    assert done.stderr.count("\n") == 1
    assert (anything_hidden(tmp_path), (tmp_path / "out").exists()) == ([], False)


def test_import_shows_progress_on_a_terminal(tmp_path: Path) -> None:
    path = stories(tmp_path / "x.jsonl", 2_000)
    status, shown = penstock_in_terminal(100, "import", path, tmp_path / "out")
    assert status == 0
    assert "2,000 rows in 1 shard" in shown
    assert "write shards: : 2.00k rows" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/none.csv", "{tmp}/out"], "{tmp}/none.csv does not exist"),
        (["{tmp}/bad.jsonl", "{tmp}/out"], "{tmp}/bad.jsonl, line 2: "),
        (["{tmp}/good.csv", "{tmp}/full"], "{tmp}/full holds Parquet files already"),
        (["{tmp}/good.csv", "{tmp}/good.csv"], "{tmp}/good.csv is a file, not a folder"),
        (["{tmp}/good.csv", "{tmp}/out", "--columns", "b, c"], "--columns: no file has a column 'b'. The columns are a."),
        (["{tmp}/good.csv", "{tmp}/out", "--shard-bytes", "9KB"], "--shard-bytes must be at least 1MB, not 9KB"),
        (["{tmp}/good.csv", "{tmp}/out", "--shard-bytes", "much"], "--shard-bytes must be at least 1MB, not much"),
        (["{tmp}/good.csv", "/dev/null/out"], "/dev/null/out cannot be written"),
    ],
)
def test_import_refuses_bad_input_in_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\noops\n')
    (tmp_path / "good.csv").write_text("a\n1\n")
    assert run(tmp_path / "good.csv", tmp_path / "full", "--columns", "a,, a").returncode == 0
    before = sorted(tmp_path.rglob("*"))
    done = run(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"penstock import: {message.format(tmp=tmp_path)}")
    assert sorted(tmp_path.rglob("*")) == before
