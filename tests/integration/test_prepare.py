"""`penstock prepare`: the index and the cache ahead of time, whenever it is stopped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from support.corpora import write, write_shards, write_text, write_tokenizer
from support.processes import Fork
from support.servers import Serve, penstock


def prepare(data: Path, cache: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return penstock("prepare", data, "--cache-dir", cache, *flags)


def inodes(cache: Path) -> dict[str, int]:
    """The files of counts; one that is made again has another inode."""
    return {path.name: path.stat().st_ino for path in cache.iterdir() if path.suffix in (".lengths", ".index")}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    texts = [
        [f"{n} " + "the quick brown fox " * (1 + n % 30) for n in range(start, start + 800)] for start in range(0, 8000, 800)
    ]
    write_shards(tmp_path / "data" / "long", "text", texts, type_=pa.string(), row_group_size=100)
    (tmp_path / "data" / "long" / "penstock.toml").write_text('tokenizer = "../tokenizer.json"')
    write_tokenizer(tmp_path / "data" / "tokenizer.json")
    return tmp_path / "data"


def test_prepared_dataset_is_served_immediately(serve: Serve, data: Path, tmp_path: Path) -> None:
    done = prepare(data, tmp_path / "cache", "--pack-seq-len", "256")
    assert done.returncode == 0
    assert (told := re.search(r"long: 8,000 rows, ([\d,]+) tokens, 0 bad rows; ([\d,]+) rows in split=validation", done.stdout))
    assert "80 of 80 blocks are in the cache\n" in done.stdout
    packed = re.findall(r"long: ([\d,]+) samples of 256 tokens(.*), [\d.]+% of them padding", done.stdout)
    assert [split for _, split in packed] == ["", " of split=train", " of split=validation"]
    server = serve(data, cache_dir=tmp_path / "cache")
    made = inodes(tmp_path / "cache")
    facts = server.json("/v1/datasets/long")
    assert facts["index"] == {"blocks_done": 80, "blocks": 80, "seconds_left": None}
    for split, counts in facts["splits"].items():
        spec = server.json("/v1/datasets/long/spec", packing="rows", split=split, seq_len=256)
        assert spec["num_samples"] == counts["rows"]
    assert f"{facts['splits']['validation']['rows']:,}" == told[2]
    assert f"{sum(counts['tokens'] for counts in facts['splits'].values()):,}" == told[1]
    inspected = penstock("inspect", data, "--cache-dir", tmp_path / "cache").stdout
    lengths = facts["row_tokens"]
    assert lengths["median"] <= lengths["p90"] <= lengths["p99"] <= lengths["longest"] <= facts["tokens"]
    assert f"99% at most {lengths['p99']:,}, all at most {lengths['longest']:,}\n" in done.stdout
    assert f"in the cache; {told[1]} tokens; {told[2]} rows in split=validation\n" in inspected
    assert f"  half of the rows have at most {lengths['median']:,} tokens, 90% at most {lengths['p90']:,}, " in inspected
    # Not one 503 on the way: all that a packing needs is there.
    for split in ("all", "train", "validation"):
        for packing in ("rows", "concat", "best_fit"):
            url = "/v1/datasets/long/epochs/0/ranks/0/batches/0"
            answer = server.get(url, packing=packing, split=split, seq_len=256, batch_size=1)
            assert answer.status_code == 200, answer.text
    assert inodes(tmp_path / "cache") == made
    num_samples = server.json("/v1/datasets/long/spec", packing="best_fit", split="train", seq_len=256)["num_samples"]
    assert f"{num_samples:,}" == packed[1][0]


def test_prepare_prints_quantiles_of_prompts_and_responses(serve: Serve, tmp_path: Path) -> None:
    columns = {"prompt": [[7] * n for n in range(1, 101)], "response": [[8] * (1 + n % 3) for n in range(100)]}
    write(tmp_path / "data" / "pairs", "", columns, row_group_size=30)
    told = prepare(tmp_path / "data", tmp_path / "cache").stdout
    for line in (
        "half of the rows have at most 52 tokens, 90% at most 92, 99% at most 101, all at most 102",
        "half of the prompts have at most 50 tokens, 90% at most 90, 99% at most 99, all at most 100",
        "half of the responses have at most 2 tokens, 90% at most 3, 99% at most 3, all at most 3",
    ):
        assert f"pairs: {line}\n" in told
        assert f"  {line}\n" in penstock("inspect", tmp_path / "data", "--cache-dir", tmp_path / "cache").stdout
    facts = serve(tmp_path / "data", cache_dir=tmp_path / "cache").json("/v1/datasets/pairs")
    assert facts["prompt_tokens"] == {"median": 50, "p90": 90, "p99": 99, "longest": 100}
    assert facts["response_tokens"] == {"median": 2, "p90": 3, "p99": 3, "longest": 3}


def test_prepare_packs_once_without_a_validation_split(data: Path, tmp_path: Path) -> None:
    with (data / "long" / "penstock.toml").open("a") as recipe:
        recipe.write("\nvalidation = 0")
    assert prepare(data, tmp_path / "cache", "--pack-seq-len", "256").returncode == 0
    assert len(list((tmp_path / "cache").glob("*-bins-*.index"))) == 1


def test_prepare_refuses_a_wrong_seq_len_before_reading(data: Path, tmp_path: Path) -> None:
    done = prepare(data, tmp_path / "cache", "--pack-seq-len", "256", "--pack-seq-len", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--pack-seq-len must be a seq_len from 1 to" in done.stderr
    assert not (tmp_path / "cache").exists()


def test_prepare_names_the_line_of_a_transform_when_it_warns(tmp_path: Path) -> None:
    code = "import warnings\n\ndef clean(batch):\n    warnings.warn('odd value')\n    return batch\n"
    write(tmp_path / "data" / "a", 'transform = "clean:clean"\nvocab_size = 9', {"tokens": [[1, 2]] * 9})
    (tmp_path / "data" / "a" / "clean.py").write_text(code)
    for command in ("prepare", "inspect"):
        done = penstock(command, tmp_path / "data", "--allow-transforms", "--cache-dir", tmp_path / "cache")
        assert (done.returncode, "a/clean.py:4: UserWarning: odd value\n" in done.stderr) == (0, True)


def test_prepare_resumes_after_an_interrupt(data: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with closing(Fork("prepare", data, "--cache-dir", cache)):
        deadline = time.monotonic() + 60
        while len(list(cache.glob("*.lengths"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    before = inodes(cache)
    assert prepare(data, cache).returncode == 0
    after = inodes(cache)
    assert len(after) == 10 + 1  # tokens of each shard, and rows
    assert {name: after[name] for name in before} == before


def test_prepare_keeps_to_the_cache_budget(data: Path, tmp_path: Path) -> None:
    done = prepare(data, tmp_path / "cache", "--cache-bytes", "700KB")
    assert done.returncode == 0
    full = r"long: (\d+) of 80 blocks are in the cache: its budget, 700,000 bytes, is full. Raise --cache-bytes, or each use"
    [num_stored] = re.findall(full, done.stdout)
    assert 5 < int(num_stored) < 80
    assert sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.block")) <= 700_000


def test_tokenizing_processes_do_not_import_pandas_each(data: Path, tmp_path: Path) -> None:
    """pyarrow tries to import it for the first array of a process."""
    importers = tmp_path / "importers"
    (tmp_path / "installed").mkdir()
    code = f"import os\nprint(os.getpid(), file=open({str(importers)!r}, 'a'))\nraise ImportError\n"
    (tmp_path / "installed" / "pandas.py").write_text(code)
    command = [sys.executable, "-m", "penstock", "prepare", str(data), "--cache-dir", str(tmp_path / "cache")]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")}, check=True, timeout=60)
    assert len({*importers.read_text().splitlines()}) == 1


def test_prepare_reports_a_cache_that_cannot_be_written(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "prepare", str(data), "--cache-dir", str(tmp_path / "cache")]
    limited = ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash", *command]  # no file may be longer than 8 KiB
    done = subprocess.run(limited, capture_output=True, text=True, check=False, timeout=60)
    assert "the block cache cannot be written to: [Errno 27] File too large" in done.stderr
    assert re.search(r"long: \d+ of 80 blocks are in the cache: some could not be stored there", done.stdout)
    assert (done.returncode, "long: blocks could not be stored in" in done.stderr) == (1, True)


def test_prepare_reports_bad_rows_and_continues_with_other_datasets(data: Path, tmp_path: Path) -> None:
    write_text(data / "bad", ["one", "", "two"])
    (data / "bad" / "penstock.toml").write_text('tokenizer = "../tokenizer.json"')
    done = prepare(data, tmp_path / "cache")
    assert done.returncode == 1
    assert "row 1 of row group 0 in part-000.parquet: text is empty" in done.stderr
    assert "80 of 80 blocks are in the cache" in done.stdout
    with (data / "long" / "penstock.toml").open("a") as recipe:
        recipe.write("\nfilter = \"text = ''\"")
    done = prepare(data, tmp_path / "cache", "--dataset", "long")
    assert done.returncode == 1
    assert "long has no row that its filter keeps" in done.stderr
    missing = prepare(data, tmp_path / "cache", "--dataset", "lang")
    assert missing.returncode == 2
    assert "there is no dataset 'lang'. Did you mean 'long'?" in missing.stderr
