"""Columns of types that few have: JSON, times, views, bytes, lists of any width."""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.spec import Spec
from penstock_server.batches.plan import tensors_of
from penstock_server.problems import DatasetInvalid
from penstock_server.recipes.fields import python_values
from penstock_server.recipes.tokenizer import load_tokenizer
from support.corpora import CHATML, IDS, as_json, index_of, open_blocks, write
from support.engine import open_snapshot, rows_of

# A shard of `repeated int32 tokens`, which pyarrow reads and does not write: [1, 2], [] and [3].
REPEATED = (
    "eNp9T8EKgkAQHVcZhE4eZtmFPXhxMVDRoE5e+oPoD0SEIlJTq7/oO/rMxkDoFMx7zDDz3swc9seCgHLKE/I5QUKjPBcAlOcwSxH/VEHAJBiu+PLKWWoGeTrZgsKx"
    "PjXXigSQiDyFU3dp2hEkaqONBUNCRwh6aRBIX74cDuuXfzdrw/exKZRri0JbgfMUS9HODhCHfTXc7s2U1n2fVsPQPcNHM4znrg03uyzPCm0MS96MA7/9ATK5IHM="
)


@pytest.mark.parametrize("type_", [pa.uint8(), pa.int16(), pa.uint64()])
def test_lists_of_any_integer_type_take_bos_and_eos(data: Path, type_: pa.DataType) -> None:
    write(data, "bos = 70001\neos = 70000", {"tokens": pa.array([[1, 2], [3]], pa.list_(type_))})
    [block] = open_blocks(data).get([0])
    assert rows_of(block) == [[70001, 1, 2, 70000], [70001, 3, 70000]]


@pytest.mark.parametrize("text", ["text", "{text}"])
def test_json_strings_and_text_of_the_json_type_are_read_as_text(data: Path, text: str) -> None:
    plain = ['fox "the"\n', "the", None, "dog"]
    keys = f"text = '{text}'\nfilter = \"text <> 'the'\"\ncolumns = ['text']\nsplit_by = 'text'\nvalidation = 0.5"
    storages = (pa.array(plain, storage) for storage in (pa.string(), pa.large_string(), pa.string_view()))
    raw = [pa.ExtensionArray.from_storage(pa.json_(texts.type), texts) for texts in storages]
    found = []
    with_null = pa.ExtensionArray.from_storage(pa.json_(), pa.array([json.dumps(value) for value in plain]))
    for stored in (pa.array(plain), as_json(*plain), with_null, *raw):
        write(data, keys, {"text": stored})
        blocks = open_blocks(data)
        [block] = blocks.get([0])
        found.append((rows_of(block), block.columns["text"].to_pylist(), block.splits.tolist()))
        assert blocks.rows_by_hash(lambda _: None).sum() == 2
        snapshot = open_snapshot(data, data / "../tokenizer.json")
        assert [tensor.dtype for tensor in tensors_of([snapshot], Spec()) if tensor.name == "text"] == ["utf8"]
    assert found == [found[0]] * 6
    assert found[0][1] == ['fox "the"\n', "dog"]


def test_json_value_that_is_not_a_string_makes_a_bad_row(data: Path) -> None:
    write(data, "columns = ['text']", {"text": as_json("fox", {"a": 1}, ["b"], 7)})
    [block] = open_blocks(data).get([0])
    assert list(block.bad) == [1, 2, 3]
    assert block.bad[1].startswith('text is JSON, but no string: {"a": 1}.')
    assert block.columns["text"].to_pylist()[1:] == ['{"a": 1}', '["b"]', "7"]


def test_json_in_structs_is_read_by_templates_and_filters(data: Path) -> None:
    meta = pa.StructArray.from_arrays([as_json("fox", "dog", 7, None)], ["kind"])
    write(data, "text = 'a {meta.kind}'\nfilter = \"meta.kind <> 'dog'\"", {"meta": meta})
    [block] = open_blocks(data).get([0])
    tokenizer = load_tokenizer(data / "../tokenizer.json")
    assert [tokenizer.decode(row) for row in rows_of(block)] == ["a fox<|endoftext|>", "a 7<|endoftext|>"]


def test_message_may_hold_a_time_in_nanoseconds(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    messages = [{"role": role, "content": "fox", "at": 1_000_000_001} for role in ("user", "assistant")]
    kind = pa.struct({"role": pa.string(), "content": pa.string_view(), "at": pa.timestamp("ns")})
    write(data, "", {"messages": pa.array([messages], pa.large_list(kind))})
    [block] = open_blocks(data).get([0])
    assert not block.bad


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (pa.timestamp("ns"), datetime(1970, 1, 1, microsecond=7)),
        (pa.timestamp("ns", "UTC"), datetime(1970, 1, 1, microsecond=7, tzinfo=UTC)),
        (pa.duration("ns"), timedelta(microseconds=7)),
        (pa.time64("ns"), time(microsecond=7)),
    ],
)
def test_times_are_cut_to_microseconds_at_every_depth(type_: pa.DataType, value: object) -> None:
    assert python_values(pa.array([7_999], type_)) == [value]
    for kind in (pa.list_(type_), pa.large_list(type_), pa.list_(type_, 1)):
        assert python_values(pa.array([[7_999], None], kind)) == [[value], None]
    assert python_values(pa.array([[("a", 7_999)], None], pa.map_(pa.string(), type_))) == [[("a", value)], None]
    assert python_values(pa.array([{"a": [7_999], "b": "fox"}], pa.struct({"a": pa.list_(type_), "b": pa.string()}))) == [
        {"a": [value], "b": "fox"}
    ]


def test_times_of_96_bits_are_read_beyond_the_year_2262(data: Path) -> None:
    times = [datetime(2500, 1, 1), datetime(2020, 1, 1)]
    (data / "penstock.toml").write_text('filter = "at > \'2400-01-01\'"\nsplit_by = "at"')
    table = pa.table({"tokens": pa.array([[1], [2]], IDS), "at": pa.array(times, pa.timestamp("us"))})
    for number, is_96_bits in enumerate((True, False)):
        pq.write_table(table, data / f"part-{number}.parquet", use_deprecated_int96_timestamps=is_96_bits, store_schema=False)
    blocks = open_blocks(data)
    os.utime(data / "part-0.parquet", (0, 0))  # a new date on the same content is no change
    first, second = blocks.get([0, 1])
    assert rows_of(first) == rows_of(second) == [[1]]
    assert first.splits.tolist() == second.splits.tolist()
    assert index_of(blocks, data).rows.make(lambda _: None).sum() == 2


def test_blocks_read_in_two_parts_are_complete(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(data, "columns = ['n']", {"tokens": pa.array([[n] for n in range(9)], IDS), "n": list(range(9))})
    iter_batches = pq.ParquetFile.iter_batches

    def in_parts(file: pq.ParquetFile, *given: Any, **more: Any) -> Iterator[pa.RecordBatch]:
        for rows in iter_batches(file, *given, **more):
            yield rows.slice(0, 4)
            yield rows.slice(4)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", in_parts)
    [block] = open_blocks(data).get([0])
    assert rows_of(block) == [[n] for n in range(9)]


@pytest.mark.parametrize("type_", [pa.binary(), pa.large_binary(), pa.binary_view()])
def test_passthrough_accepts_bytes_of_every_type(data: Path, type_: pa.DataType) -> None:
    write(data, 'columns = ["raw"]', {"tokens": pa.array([[1], [2]], IDS), "raw": pa.array([b"\xff", None], type_)})
    snapshot = open_snapshot(data)
    assert [tensor.dtype for tensor in tensors_of([snapshot], Spec()) if tensor.name == "raw"] == ["binary"]
    [block] = open_blocks(data).get([0])
    assert block.columns["raw"].to_pylist() == [b"\xff", b""]


def test_passthrough_column_may_differ_in_arrow_type_by_shard(data: Path) -> None:
    kinds = [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string()), pa.string_view()]
    pairs = [pa.list_(pa.field(item, pa.int8(), is_null), 2) for item, is_null in (("item", True), ("element", False))]
    shards = [
        {
            "tokens": pa.array([[1]], IDS),
            "lang": pa.array(["en"], kind),
            "x": pa.array([0.5], number),
            "pair": pa.array([[7, 8]], pair),
        }
        for kind, number, pair in zip(kinds, [pa.float32(), pa.float16()] * 2, pairs * 2, strict=True)
    ]
    write(data, 'columns = ["lang", "x", "pair"]', *shards)
    for block in open_blocks(data).get([0, 1, 2, 3]):
        made = {name: (str(column.type), *column.to_pylist()) for name, column in block.columns.items()}
        assert made.pop("pair")[1] == [7, 8]
        assert made == {"lang": ("large_string", "en"), "x": ("float", 0.5)}
    write(data, 'columns = ["x"]', shards[0], shards[1] | {"x": pa.array([0.5], pa.float64())})
    with pytest.raises(DatasetInvalid, match="column 'x' is double, but float in the first shard"):
        open_snapshot(data)


def test_repeated_field_of_protobuf_is_a_list_of_tokens(data: Path) -> None:
    shard = zlib.decompress(base64.b64decode(REPEATED))
    (data / "part-0.parquet").write_bytes(shard)
    assert "repeated int32" in str(pq.ParquetFile(data / "part-0.parquet").schema)
    blocks = open_blocks(data)
    [block] = blocks.get([0])
    assert (rows_of(block), block.bad) == ([[1, 2], [], [3]], {1: "is empty"})
    assert open_snapshot(data).vocab_size == 4


def test_shard_without_row_groups_has_no_rows(data: Path) -> None:
    write(data, "filter = \"kind = 'a'\"", {"tokens": pa.array([[1, 2], [3]], IDS), "kind": ["a", "b"]})
    schema = pq.read_schema(data / "part-0.parquet")
    pq.ParquetWriter(data / "part-1.parquet", schema).close()
    assert pq.ParquetFile(data / "part-1.parquet").num_row_groups == 0
    index = index_of(open_blocks(data), data)
    assert index.rows_per_block("all").tolist() == [1]
