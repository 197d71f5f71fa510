"""What footers tell of rows before any is read: ids, nulls, and the filter that leaves out what cannot be used."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock_server.problems import BadRow, DatasetInvalid
from support.corpora import write_numbered, write_shards, write_text
from support.engine import Loader, open_snapshot


@pytest.mark.parametrize("largest", [2**32, 2**40, 2**63 + 5])
def test_ids_beyond_uint32_are_refused(data: Path, largest: int) -> None:
    write_shards(data, "tokens", [[[1, largest]]], type_=pa.list_(pa.uint64()), row_group_size=1)
    with pytest.raises(DatasetInvalid, match=f"ids from 1 to {largest:,}"):
        open_snapshot(data)


def test_negative_ids_are_refused_with_their_range(data: Path) -> None:
    write_shards(data, "tokens", [[[3, -2]]], type_=pa.list_(pa.int32()), row_group_size=1)
    with pytest.raises(DatasetInvalid, match=r"ids from -2 to 3.*on_bad_row"):
        open_snapshot(data)


@pytest.mark.parametrize("rows", [[], [[]]])
def test_shard_without_tokens_leaves_the_vocabulary(data: Path, rows: list[list[int]]) -> None:
    write_shards(data, "tokens", [[[1, 3]], rows], type_=pa.list_(pa.int32()), row_group_size=1)
    snapshot = open_snapshot(data)
    assert (snapshot.vocab_size, snapshot.token_dtype) == (4, "uint16")


def test_eos_must_be_in_the_vocabulary(data: Path) -> None:
    write_shards(data, "tokens", [[[1, 3]]], type_=pa.list_(pa.int32()), row_group_size=1)
    (data / "penstock.toml").write_text("eos = 70000")
    snapshot = open_snapshot(data)
    assert (snapshot.vocab_size, snapshot.token_dtype) == (70_001, "uint32")


def test_vocabulary_is_unknown_when_not_configured(data: Path) -> None:
    data.mkdir()
    table = pa.table({"tokens": pa.array([[1, 3]], pa.list_(pa.int32()))})
    pq.write_table(table, data / "a.parquet", write_statistics=False)
    pq.write_table(table, data / "b.parquet")
    snapshot = open_snapshot(data)
    assert (snapshot.vocab_size, snapshot.token_dtype) == (None, "uint32")


def test_null_rows_in_footers_are_refused_with_a_remedy(data: Path, tokenizer: Path) -> None:
    write_text(data, ["one", None, "two"])
    with pytest.raises(DatasetInvalid, match=r'part-000.parquet, row group 0: text is null in 1 row.*on_bad_row = "replace"'):
        open_snapshot(data, tokenizer)
    (data / "penstock.toml").write_text('on_bad_row = "replace"')
    assert open_snapshot(data, tokenizer).num_rows == 3


def test_null_rows_error_suggests_a_filter(data: Path, tokenizer: Path, load: Loader) -> None:
    data.mkdir()
    columns = {"ask": ["one", None, "two", "three"], "answer": ["four", "five", "six", None]}
    pq.write_table(pa.table(columns), data / "part-000.parquet")
    recipe = 'prompt = "ask"\nresponse = "answer"\n'
    (data / "penstock.toml").write_text(recipe)
    with pytest.raises(DatasetInvalid, match="is null in 1 row") as refusal:
        open_snapshot(data, tokenizer)
    [told] = re.findall(r"set in penstock.toml (filter = .*) to leave them out", str(refusal.value))
    (data / "penstock.toml").write_text(recipe + told)
    _, block = load()
    assert (block.stored_rows.tolist(), block.bad) == ([0, 2], {})


@pytest.mark.parametrize(
    ("columns", "toml"),
    [
        ({"text": ["one", ""]}, ""),
        ({"prompt": ["one", "two"], "response": ["four", ""]}, ""),
        ({"meta": [{"text": "one"}, {"text": ""}]}, 'text = "meta.text"'),
        ({"text": ["one", "two"], "score": [1, None]}, 'columns = ["score"]'),
        ({"tokens": [[1], [2, None]]}, ""),
        ({"tokens": [[1], None]}, ""),
    ],
)
def test_bad_row_is_named_with_its_remedy(data: Path, load: Loader, columns: dict[str, list[Any]], toml: str) -> None:
    data.mkdir()
    pq.write_table(pa.table(columns), data / "part-000.parquet")
    (data / "penstock.toml").write_text(toml)
    blocks, block = load()
    with pytest.raises(BadRow, match="row 1 of row group 0.*on_bad_row"):
        blocks.quarantine.check_block(block, 0)


def test_ids_outside_the_vocabulary_in_footers_are_refused_with_the_bound(data: Path) -> None:
    write_numbered(data, 300)
    (data / "penstock.toml").write_text("vocab_size = 200")
    with pytest.raises(DatasetInvalid, match=r"part-002.parquet: .*ids from 1 to 299.*< 200") as caught:
        open_snapshot(data)
    assert "vocab_size" in str(caught.value)


def test_negative_id_is_refused_without_a_vocabulary(data: Path) -> None:
    write_shards(data, "tokens", [[[1, -5]]], type_=pa.list_(pa.int64()), row_group_size=1)
    with pytest.raises(DatasetInvalid, match="ids from -5 to 1"):
        open_snapshot(data)


@pytest.mark.parametrize(("largest", "dtype"), [(65_535, "uint16"), (65_536, "uint32")])
def test_token_ids_have_the_smallest_dtype_of_the_footers(data: Path, largest: int, dtype: str) -> None:
    write_shards(data, "tokens", [[[1]], [[largest]]], type_=pa.list_(pa.int64()), row_group_size=1)
    assert open_snapshot(data).token_dtype == dtype
