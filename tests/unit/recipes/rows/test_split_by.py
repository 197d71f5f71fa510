"""Rows that filters and splits look at, whatever type they are stored as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.store import BlockStore
from penstock_server.problems import DatasetInvalid, ShardUnreadable
from penstock_server.recipes.tokenizer import load_tokenizer
from support.corpora import EOS, IDS, open_blocks, write
from support.engine import open_snapshot, rows_of

SPLIT_BY = "split_by = 'kind'\nvalidation = 0.5"


@pytest.mark.parametrize("recipe", ["split_by = 'kind'", "filter = \"kind = 'a'\""])
def test_shard_is_refused_without_a_column_of_filter_or_split(data: Path, recipe: str) -> None:
    ids = pa.array([[1, 2], [3]], IDS)
    write(data, recipe, {"tokens": ids, "kind": ["a", "b"]}, {"tokens": ids})
    with pytest.raises(DatasetInvalid, match=r"part-1\.parquet: there is no column 'kind'; there are: tokens"):
        open_snapshot(data)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (pa.int64(), pa.float64()),
        (pa.float64(), pa.int64()),
        (pa.int64(), pa.string()),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.struct({"n": pa.int64()}), pa.struct({"n": pa.float64()})),
    ],
)
def test_shard_is_refused_when_equal_values_would_be_in_both_splits(data: Path, first: pa.DataType, other: pa.DataType) -> None:
    write(data, SPLIT_BY, *({"tokens": pa.array([[1]], IDS), "kind": pa.nulls(1, type_)} for type_ in (first, other)))
    with pytest.raises(DatasetInvalid) as refusal:
        open_snapshot(data)
    types = [pq.read_schema(data / f"part-{number}.parquet").field("kind").type for number in (1, 0)]
    told = "part-1.parquet: split_by reads 'kind', which is {} here and {} in the first shard"
    assert told.format(*types) in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "types"),
    [
        ([7, None], [pa.int8(), pa.int64(), pa.uint64(), pa.dictionary(pa.int8(), pa.int32())]),
        (["7", None], [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]),
        ([None, None], [pa.null(), pa.int64(), pa.string()]),
    ],
)
def test_value_has_one_split_in_all_types_of_its_kind(data: Path, values: list[Any], types: list[pa.DataType]) -> None:
    write(data, SPLIT_BY, *({"tokens": pa.array([[1]] * 2, IDS), "kind": pa.array(values, type_)} for type_ in types))
    blocks = open_blocks(data).get(list(range(len(types))))
    assert len({tuple(block.splits.tolist()) for block in blocks}) == 1


@pytest.mark.parametrize(("condition", "kept"), [("n <> 2", ["fox", "dog"]), ("lang = 'de'", ["the"]), ("n > 9", [])])
def test_text_stored_as_views_is_filtered_and_split(data: Path, condition: str, kept: list[str]) -> None:
    rows = {"text": ["fox", "the", "dog"], "lang": ["en", "de", "en"]}
    views = {name: pa.array(texts, pa.string_view()) for name, texts in rows.items()} | {"n": pa.array([1, 2, 3])}
    write(data, f"split_by = 'text'\nfilter = \"{condition}\"", views)
    blocks = open_blocks(data)
    [block] = blocks.get([0])
    tokenizer = load_tokenizer(data / "../tokenizer.json")
    assert [tokenizer.decode(ids) for ids in rows_of(block)] == [text + EOS for text in kept]
    assert blocks.rows_by_hash(lambda _: None).sum() == len(kept)


@pytest.mark.parametrize("other", [[3.0, None, 2.5], pa.array([2**64 - 1, 2, 7], pa.uint64())])
def test_filter_reads_each_shard_by_its_types(data: Path, other: Any) -> None:
    ids = pa.array([[1], [2], [3]], IDS)
    write(data, 'filter = "n > 2"', {"tokens": ids, "n": [1, 2, 3]}, {"tokens": ids, "n": other})
    blocks = open_blocks(data)
    assert [block.stored_rows.tolist() for block in blocks.get([0, 1])] == [[2], [0, 2]]
    assert blocks.rows_by_hash(lambda _: None).sum(axis=0).tolist() == [1, 2]


def test_filter_error_names_the_filter_and_the_row_group(data: Path) -> None:
    write(data, 'filter = "n * 9223372036854775807 > 0 or n = 0"', {"tokens": pa.array([[1], [2]], IDS), "n": [0, 2]})
    with pytest.raises(ShardUnreadable, match=r"does not fit 64 bits, on row group 0 of part-0.parquet"):
        open_blocks(data).get([0])


def test_filter_does_not_change_the_split_of_a_row(data: Path) -> None:
    splits = []
    for condition in ("", 'filter = "n > 4"\n'):
        write(data, f"{condition}validation = 0.5", {"text": ["fox"] * 20, "n": list(range(20))})
        [block] = open_blocks(data).get([0])
        splits.append(dict(zip(block.stored_rows.tolist(), block.splits.tolist(), strict=True)))
    assert splits[1] == {row: split for row, split in splits[0].items() if row > 4}


def test_new_shard_does_not_change_the_split_of_other_rows(data: Path) -> None:
    pq.write_table(pa.table({"tokens": pa.array([[1]] * 40, IDS)}), data / "part-1.parquet", row_group_size=20)
    (data / "penstock.toml").write_text("validation = 0.5")
    alone = [block.splits.tolist() for block in open_blocks(data).get([0, 1])]
    write(data, "validation = 0.5", {"tokens": pa.array([[1]] * 30, IDS)})
    blocks = Blocks(open_snapshot(data), BlockStore(data / "../another cache"))
    assert [block.splits.tolist() for block in blocks.get([1, 2])] == alone


@pytest.mark.parametrize(
    "type_",
    [pa.timestamp("ns"), pa.timestamp("ns", "UTC"), pa.timestamp("us"), pa.duration("ns"), pa.time64("ns")],
)
def test_split_by_accepts_times_of_every_type(data: Path, type_: pa.DataType) -> None:
    last = 86_399_999_999_999  # not of whole microseconds
    times = pa.array([1, 1, last, last], pa.int64())
    shards = [{"tokens": pa.array([[1]] * len(own), IDS), "at": own.cast(type_)} for own in (times, times[:1])]
    write(data, "split_by = 'at'\nvalidation = 0.5", *shards)
    [block, alone] = open_blocks(data).get([0, 1])
    assert alone.splits[0] == block.splits[0]  # whatever times are beside it
    assert block.splits[0] == block.splits[1] != block.splits[2] == block.splits[3]
    assert not block.bad
