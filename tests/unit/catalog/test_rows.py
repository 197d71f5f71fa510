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


@pytest.mark.parametrize(
    ("ids", "type_", "told"),
    [
        *(([1, largest], pa.uint64(), f"ids from 1 to {largest:,}") for largest in (2**32, 2**40, 2**63 + 5)),
        ([3, -2], pa.int32(), r"ids from -2 to 3.*on_bad_row"),
        ([1, -5], pa.int64(), "ids from -5 to 1"),
    ],
)
def test_ids_outside_uint32_are_refused_with_their_range(data: Path, ids: list[int], type_: pa.DataType, told: str) -> None:
    write_shards(data, "tokens", [[ids]], type_=pa.list_(type_), row_group_size=1)
    with pytest.raises(DatasetInvalid, match=told):
        open_snapshot(data)


@pytest.mark.parametrize(
    ("shards", "toml", "vocab_size", "dtype"),
    [
        ([[[1, 3]], []], "", 4, "uint16"),
        ([[[1, 3]], [[]]], "", 4, "uint16"),
        ([[[1, 3]]], "eos = 70000", 70_001, "uint32"),
        ([[[1]], [[65_535]]], "", 65_536, "uint16"),
        ([[[1]], [[65_536]]], "", 65_537, "uint32"),
    ],
)
def test_vocabulary_is_known_from_the_footers_and_the_recipe(
    data: Path, shards: list[list[list[int]]], toml: str, vocab_size: int, dtype: str
) -> None:
    write_shards(data, "tokens", shards, type_=pa.list_(pa.int64()), row_group_size=1)
    (data / "penstock.toml").write_text(toml)
    snapshot = open_snapshot(data)
    assert (snapshot.vocab_size, snapshot.token_dtype) == (vocab_size, dtype)


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
