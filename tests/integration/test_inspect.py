"""`penstock inspect`: what datasets are, and what their rows become, without a server."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest

from support.corpora import write, write_numbered, write_pairs, write_shards, write_text, write_tokenizer
from support.servers import penstock, penstock_in_terminal


@pytest.fixture(scope="module")
def data(shared: Path) -> Path:
    write_tokenizer(shared / "tokenizer.json")
    write_pairs(shared / "pairs", [("how many foxes?", " one"), ("how many dogs?", " two")])
    write_text(shared / "texts", ["the quick brown fox", "", "a dog", "\x1b[2J " * 500], row_group_size=2)
    (shared / "texts" / "penstock.toml").write_text("on_bad_row = 'replace'\nmax_bad_share = 0.5\nfilter = \"text != 'a dog'\"")
    write_numbered(shared / "numbers", 5, num_shards=1)
    write(shared / "prefs", "columns = ['score']", {"chosen": ["yes"], "rejected": ["no no no"], "score": [0.5]})
    write(shared / "labelled", "", {"input_ids": [[5, 6, 7, 8]], "labels": [[-100, -100, 7, 8]]})
    write(shared / "both", 'mix = "pairs:1,texts:1"')
    return shared


def inspect(data: Path, tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return penstock("inspect", data, "--tokenizer", data / "tokenizer.json", "--cache-dir", tmp_path / "cache", *flags)


def test_inspect_shows_each_dataset_with_its_first_rows(data: Path, tmp_path: Path) -> None:
    done = inspect(data, tmp_path)
    assert done.returncode == 0
    assert done.stderr.endswith("1 row cannot be used (the first: text is empty); neighbours are served in their place\n")
    labelled, numbers, pairs, prefs, texts, mixture = done.stdout.split("\n\n")
    assert labelled.endswith("split=train\n    4 tokens, 2 with loss\n      ⟦5 6⟧7 8")
    assert re.match(r"numbers: 5 rows in 1 shard, snapshot [0-9a-f]{16}\n  recipe: input_ids, pre-tokenized", numbers)
    assert "1 block, about" in numbers
    assert "  row 1: part-000.parquet, row group 0, row 1, split=train\n    2 tokens, 2 with loss\n      1 1" in numbers
    [prompt] = re.findall(r"row 0: .*\n    (\d+) tokens, (\d+) with loss\n      ⟦how many foxes\?⟧ one<\|endoftext\|>\n", pairs)
    assert int(prompt[0]) > int(prompt[1]) > 0
    assert re.search(r"    chosen: .*\n      yes.*\n    rejected: .*\n      no no no.*\n      score: 0.5$", prefs)
    assert "text != 'a dog'" in texts
    assert texts.endswith("row 1: part-000.parquet, row group 0, row 1\n    cannot be used: text is empty")
    assert mixture == "both: a mixture, pairs:1,texts:1\n"


def test_inspect_shows_rows_of_one_dataset(data: Path, tmp_path: Path) -> None:
    done = inspect(data, tmp_path, "--dataset", "texts", "--row", "2", "--rows", "100", "--lines", "1")
    rows = re.findall(r"^  row (\d)", done.stdout, re.MULTILINE)
    assert (done.returncode, rows) == (0, ["2", "3"])
    assert "left out by filter: text != 'a dog'" in done.stdout
    assert "\x1b" not in done.stdout
    assert "␛[2J" in done.stdout
    assert re.search(r"\[… [\d,]+ characters …\]", done.stdout)
    whole = inspect(data, tmp_path, "--dataset", "texts", "--row", "3", "--lines", "0")
    assert whole.stdout.count("␛[2J") == 500


def test_inspect_reports_missing_names_and_rows(data: Path, tmp_path: Path) -> None:
    none = inspect(data, tmp_path, "--dataset", "pair")
    assert (none.returncode, none.stdout) == (2, "")
    assert "there is no dataset 'pair'. Did you mean 'pairs'?" in none.stderr
    beyond = inspect(data, tmp_path, "--row", "2")
    assert beyond.returncode == 1
    assert "row 2 does not exist: pairs has 2 rows, 0 to 1." in beyond.stderr
    assert "row 2 does not exist: prefs has 1 row" in beyond.stderr
    assert re.search(r"  row 2: part-000\.parquet, row group 0, row 2, split=\w+\n    3 tokens", beyond.stdout)


def test_inspect_reports_an_invalid_dataset(tmp_path: Path) -> None:
    write_numbered(tmp_path / "data" / "good", 2, num_shards=1)
    write_shards(tmp_path / "data" / "odd", "other", [[1, 2]], type_=pa.int64(), row_group_size=2)
    for named in ((), ("--dataset", "good", "--dataset", "odd")):
        done = penstock("inspect", tmp_path / "data", "--cache-dir", tmp_path / "cache", *named)
        assert done.returncode == 1
        assert done.stdout.startswith("good: 2 rows")
        assert "penstock inspect: odd: " in done.stderr


def test_inspect_dims_tokens_without_loss_in_a_terminal(data: Path, tmp_path: Path) -> None:
    arguments = ("--tokenizer", str(data / "tokenizer.json"), "--cache-dir", str(tmp_path / "cache"), "--dataset", "pairs")
    status, shown = penstock_in_terminal(80, "inspect", str(data), *arguments)
    assert status == 0
    assert "\x1b[2mhow many foxes?\x1b[0m one" in shown
    _, shown = penstock_in_terminal(80, "inspect", str(data), *arguments[:-1], "texts", "--row", "3")
    texts = re.findall(r"^ {6}.*$", re.sub(r"\x1b\[\d*m|\r", "", shown), re.MULTILINE)
    assert max(map(len, texts)) == 80


def test_inspect_shows_the_first_of_many_turns(tmp_path: Path) -> None:
    write(tmp_path / "data" / "long", "", {"input_ids": [[7, 8] * 9_000], "loss_mask": [[0, 1] * 9_000]})
    shown = penstock("inspect", tmp_path / "data", "--cache-dir", tmp_path / "cache", "--lines", "0").stdout
    assert "    18,000 tokens, 9,000 with loss\n" in shown
    text = "".join(line.strip() for line in shown.splitlines()[4:])
    assert text.replace(" ", "").count("⟦7⟧8") == 5_000
    assert text.endswith("...⟧")
