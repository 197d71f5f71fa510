"""Rows that are odd, and recipes that are: what is bad is one row with a reason, what cannot be is said when it is opened."""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models

from corpora import EOS, write_tokenizer
from penstock.spec import Spec
from penstock_server.batches.tensor import tensors_of
from penstock_server.counts.index import Index
from penstock_server.problems import DatasetRefused, ShardUnreadable
from penstock_server.recipes import encode as encode_module
from penstock_server.recipes.chat import says_something
from penstock_server.recipes.rows import Reasons
from penstock_server.recipes.tokenizer import load_tokenizer
from penstock_server.recipes.values import python_values
from penstock_server.snapshots import snapshot as snapshot_module
from penstock_server.storage import quarantine as quarantine_module
from penstock_server.storage.block import Block
from penstock_server.storage.blocks import Blocks
from penstock_server.storage.cache import CacheFolder
from penstock_server.storage.decode import completed
from penstock_server.storage.store import BlockStore
from planned import open_snapshot

IDS = pa.list_(pa.int32())
# A shard of `repeated int32 tokens`, which pyarrow reads and does not write: [1, 2], [] and [3].
REPEATED = (
    "eNp9T8EKgkAQHVcZhE4eZtmFPXhxMVDRoE5e+oPoD0SEIlJTq7/oO/rMxkDoFMx7zDDz3swc9seCgHLKE/I5QUKjPBcAlOcwSxH/VEHAJBiu+PLKWWoGeTrZgsKx"
    "PjXXigSQiDyFU3dp2hEkaqONBUNCRwh6aRBIX74cDuuXfzdrw/exKZRri0JbgfMUS9HODhCHfTXc7s2U1n2fVsPQPcNHM4znrg03uyzPCm0MS96MA7/9ATK5IHM="
)
CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def write(folder: Path, toml: str, *shards: dict[str, Any]) -> None:
    for number, columns in enumerate(shards):
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet")
    (folder / "penstock.toml").write_text(toml)


def open_blocks(folder: Path) -> Blocks:
    return Blocks(open_snapshot(folder, folder / "../tokenizer.json"), BlockStore(CacheFolder(folder / "../cache")))


def index_of(blocks: Blocks, folder: Path) -> Index:
    return Index("data", open_snapshot(folder, folder / "../tokenizer.json"), blocks)


def rows_of(block: Block, feature: str = "tokens") -> list[list[int]]:
    tokens = block.features[feature].tokens
    spans = zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True)
    return [tokens.values[start : start + length].tolist() for start, length in spans]


def broken_text(*texts: bytes) -> pa.Array:
    """A column of text whose bytes nobody has checked."""
    return pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())


@pytest.mark.parametrize("type_", [pa.uint8(), pa.int16(), pa.uint64()])
def test_lists_of_any_width_are_opened_and_closed_by_any_token(data: Path, type_: pa.DataType) -> None:
    write(data, "bos = 70001\neos = 70000", {"tokens": pa.array([[1, 2], [3]], pa.list_(type_))})
    [block] = open_blocks(data).get([0])
    assert rows_of(block) == [[70001, 1, 2, 70000], [70001, 3, 70000]]


def test_a_recipe_that_is_a_link_to_nothing_is_not_passed_over(data: Path) -> None:
    write(data, "filter = 'n > 1'", {"tokens": pa.array([[1], [2]], IDS), "n": [1, 2]})
    (data / "penstock.toml").rename(data / "../recipe.toml")
    (data / "penstock.toml").symlink_to("../recipe.toml")
    assert open_snapshot(data).recipe.filter
    (data / "../recipe.toml").unlink()
    with pytest.raises(DatasetRefused, match=r"penstock\.toml cannot be read: .*No such file"):
        open_snapshot(data)


@pytest.mark.parametrize("recipe", ["split_by = 'kind'", "filter = \"kind = 'a'\""])
def test_a_shard_without_a_column_that_filter_or_split_need_is_refused(data: Path, recipe: str) -> None:
    ids = pa.array([[1, 2], [3]], IDS)
    write(data, recipe, {"tokens": ids, "kind": ["a", "b"]}, {"tokens": ids})
    with pytest.raises(DatasetRefused, match=r"part-1\.parquet: there is no column 'kind'; there are: tokens"):
        open_snapshot(data)


SPLIT_BY = "split_by = 'kind'\nvalidation = 0.5"


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (pa.int64(), pa.float64()),
        (pa.float64(), pa.int64()),
        (pa.decimal128(9, 2), pa.decimal128(9, 3)),
        (pa.bool_(), pa.int8()),
        (pa.int64(), pa.string()),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.list_(pa.int64()), pa.list_(pa.float64())),
        (pa.struct({"n": pa.int64()}), pa.struct({"n": pa.float64()})),
        (pa.struct({"n": pa.int64()}), pa.struct({"m": pa.int64()})),
        (pa.map_(pa.string(), pa.int64()), pa.map_(pa.string(), pa.float64())),
    ],
)
def test_a_shard_whose_values_would_be_in_both_splits_is_refused(data: Path, first: pa.DataType, other: pa.DataType) -> None:
    write(data, SPLIT_BY, *({"tokens": pa.array([[1]], IDS), "kind": pa.nulls(1, type_)} for type_ in (first, other)))
    with pytest.raises(DatasetRefused) as refusal:
        open_snapshot(data)
    types = [pq.read_schema(data / f"part-{number}.parquet").field("kind").type for number in (1, 0)]
    told = "part-1.parquet: split_by reads 'kind', which is {} here and {} in the first shard"
    assert told.format(*types) in str(refusal.value)


def test_a_field_of_another_kind_that_rows_are_split_by_is_refused_beside_a_transform(data: Path) -> None:
    (data / "same.py").write_text("def same(rows):\n    return rows\n")
    shards = [{"tokens": pa.array([[1]], IDS), "meta": [{"n": n}]} for n in (7, 7.0)]
    write(data, "split_by = 'meta.n'\ntransform = 'same:same'", *shards)
    with pytest.raises(DatasetRefused, match=r"part-1\.parquet: split_by reads 'meta\.n', which is double here"):
        open_snapshot(data)


@pytest.mark.parametrize(
    ("values", "types"),
    [
        ([7, None], [pa.int8(), pa.int64(), pa.uint64(), pa.dictionary(pa.int8(), pa.int32())]),
        ([0.5, None], [pa.float64(), pa.float32()]),
        (["7", None], [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]),
        ([b"7", None], [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(1)]),
        ([Decimal("0.50"), None], [pa.decimal128(9, 2), pa.decimal128(20, 2)]),
        ([datetime(2024, 1, 1), None], [pa.timestamp("us"), pa.timestamp("s"), pa.timestamp("ns")]),
        ([[7], None], [pa.list_(pa.int32()), pa.large_list(pa.int64())]),
        ([None, None], [pa.null(), pa.int64(), pa.string()]),
    ],
)
def test_a_value_is_in_one_split_however_its_kind_of_type_is_stored(
    data: Path, values: list[Any], types: list[pa.DataType]
) -> None:
    write(data, SPLIT_BY, *({"tokens": pa.array([[1]] * 2, IDS), "kind": pa.array(values, type_)} for type_ in types))
    blocks = open_blocks(data).get(list(range(len(types))))
    assert len({tuple(block.splits.tolist()) for block in blocks}) == 1


def test_a_split_is_told_of_text_that_is_no_utf8(data: Path) -> None:
    ids = pa.array([[1], [2], [3]], IDS)
    write(data, "split_by = 'kind'\nvalidation = 0.5", {"tokens": ids, "kind": broken_text(b"\xff", b"\xff", b"fox")})
    [block] = open_blocks(data).get([0])
    assert block.splits[0] == block.splits[1] != block.splits[2]
    assert not block.bad


@pytest.mark.parametrize(("condition", "kept"), [("n <> 2", ["fox", "dog"]), ("lang = 'de'", ["the"]), ("n > 9", [])])
def test_rows_whose_text_is_stored_as_views_are_filtered_and_split(data: Path, condition: str, kept: list[str]) -> None:
    rows = {"text": ["fox", "the", "dog"], "lang": ["en", "de", "en"]}
    views = {name: pa.array(texts, pa.string_view()) for name, texts in rows.items()} | {"n": pa.array([1, 2, 3])}
    write(data, f"split_by = 'text'\nfilter = \"{condition}\"", views)
    blocks = open_blocks(data)
    [block] = blocks.get([0])
    tokenizer = load_tokenizer(data / "../tokenizer.json")
    assert [tokenizer.decode(ids) for ids in rows_of(block)] == [text + EOS for text in kept]
    assert sum(rows.sum() for rows in blocks.rows_of_shards()) == len(kept)


@pytest.mark.parametrize("other", [[3.0, None, 2.5], pa.array([2**64 - 1, 2, 7], pa.uint64())])
def test_a_filter_reads_each_shard_by_its_own_types(data: Path, other: Any) -> None:
    ids = pa.array([[1], [2], [3]], IDS)
    write(data, 'filter = "n > 2"', {"tokens": ids, "n": [1, 2, 3]}, {"tokens": ids, "n": other})
    blocks = open_blocks(data)
    assert [block.stored_rows.tolist() for block in blocks.get([0, 1])] == [[2], [0, 2]]
    assert [rows.sum() for rows in blocks.rows_of_shards()] == [1, 2]


def test_a_shard_that_a_filter_cannot_be_used_on_is_refused_when_it_is_opened(data: Path) -> None:
    ids = pa.array([[1], [2], [3]], IDS)
    write(data, "filter = \"n > '2'\"", {"tokens": ids, "n": ["1", "2", "3"]}, {"tokens": ids, "n": [1, 2, 3]})
    told = r"part-1\.parquet: the filter .* fails: .*; n is int64 here and string in the first shard\. Give all shards of"
    with pytest.raises(DatasetRefused, match=told):
        open_snapshot(data)


def test_a_filter_moves_no_row_to_the_other_split(data: Path) -> None:
    splits = []
    for condition in ("", 'filter = "n > 4"\n'):
        write(data, f"{condition}validation = 0.5", {"text": ["fox"] * 20, "n": list(range(20))})
        [block] = open_blocks(data).get([0])
        splits.append(dict(zip(block.stored_rows.tolist(), block.splits.tolist(), strict=True)))
    assert splits[1] == {row: split for row, split in splits[0].items() if row > 4}


def test_a_shard_that_comes_before_others_moves_no_row_of_theirs_to_the_other_split(data: Path) -> None:
    pq.write_table(pa.table({"tokens": pa.array([[1]] * 40, IDS)}), data / "part-1.parquet", row_group_size=20)
    (data / "penstock.toml").write_text("validation = 0.5")
    alone = [block.splits.tolist() for block in open_blocks(data).get([0, 1])]
    write(data, "validation = 0.5", {"tokens": pa.array([[1]] * 30, IDS)})
    blocks = Blocks(open_snapshot(data), BlockStore(CacheFolder(data / "../another cache")))
    assert [block.splits.tolist() for block in blocks.get([1, 2])] == alone


def test_json_that_only_parquet_knows_for_json_is_text(data: Path) -> None:
    texts = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["fox", "the", "dog"]))
    pq.write_table(pa.table({"text": texts}), data / "part-0.parquet", store_schema=False)
    (data / "penstock.toml").write_text('filter = "text <> \'the\'"\ncolumns = ["text"]')
    blocks = open_blocks(data)
    [block] = blocks.get([0])
    assert block.columns["text"].to_pylist() == ["fox", "dog"]
    assert sum(rows.sum() for rows in blocks.rows_of_shards()) == 2


@pytest.mark.parametrize("storage", [pa.string(), pa.large_string(), pa.string_view()])
@pytest.mark.parametrize("text", ["text", "{text}"])
def test_json_of_arrows_own_type_is_text(data: Path, storage: pa.DataType, text: str) -> None:
    texts = pa.array(["fox", "the", None, "dog"], storage)
    keys = f"text = '{text}'\nfilter = \"text <> 'the'\"\ncolumns = ['text']\nsplit_by = 'text'\nvalidation = 0.5"
    found = []
    for stored in (texts, pa.ExtensionArray.from_storage(pa.json_(storage), texts)):
        write(data, keys, {"text": stored})
        blocks = open_blocks(data)
        [block] = blocks.get([0])
        assert block.columns["text"].to_pylist() == ["fox", "dog"]
        assert sum(rows.sum() for rows in blocks.rows_of_shards()) == 2
        snapshot = open_snapshot(data, data / "../tokenizer.json")
        assert [tensor.dtype for tensor in tensors_of([snapshot], Spec()) if tensor.name == "text"] == ["utf8"]
        found.append((rows_of(block), block.splits.tolist()))
    assert found[0] == found[1]


def test_a_column_called_text_of_arrows_json_needs_no_recipe(data: Path) -> None:
    write(data, "", {"text": pa.ExtensionArray.from_storage(pa.json_(), pa.array(["fox", ""]))})
    [block] = open_blocks(data).get([0])
    assert block.bad == {1: "text is empty"}


def test_a_chat_and_its_tools_may_be_arrows_json(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": TOOLED}))
    texts = {"messages": json.dumps(ASKED), "tools": json.dumps([FIND])}
    found = []
    for stored in (pa.string(), pa.json_()):
        write(data, "", {name: pa.array([text], pa.string()).cast(stored) for name, text in texts.items()})
        [block] = open_blocks(data).get([0])
        found.append(rows_of(block))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "type_",
    [pa.timestamp("ns"), pa.timestamp("ns", "UTC"), pa.timestamp("us"), pa.duration("ns"), pa.time64("ns"), pa.date32()],
)
def test_rows_are_split_by_times_of_every_type(data: Path, type_: pa.DataType) -> None:
    last = 5_000_000 if pa.types.is_date(type_) else 86_399_999_999_999  # of the year 15,659; not of whole microseconds
    times = pa.array([1, 1, last, last], pa.int32() if pa.types.is_date(type_) else pa.int64())
    shards = [{"tokens": pa.array([[1]] * len(own), IDS), "at": own.cast(type_)} for own in (times, times[:1])]
    write(data, "split_by = 'at'\nvalidation = 0.5", *shards)
    [block, alone] = open_blocks(data).get([0, 1])
    assert alone.splits[0] == block.splits[0]  # whatever times are beside it
    assert block.splits[0] == block.splits[1] != block.splits[2] == block.splits[3]
    assert not block.bad


def test_rows_are_split_by_what_holds_a_date_that_python_has_not(data: Path) -> None:
    dates = pa.array([1, 1, 5_000_000, 5_000_000], pa.int32()).cast(pa.date32())
    write(data, "split_by = 'at'\nvalidation = 0.5", {"tokens": [[1]] * 4, "at": pa.StructArray.from_arrays([dates], ["day"])})
    [block] = open_blocks(data).get([0])
    assert block.splits[0] == block.splits[1] != block.splits[2] == block.splits[3]
    assert not block.bad


def test_a_message_may_hold_a_time_of_nanoseconds(data: Path) -> None:
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
def test_times_are_cut_to_the_microsecond_wherever_they_stand(type_: pa.DataType, value: object) -> None:
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


def test_rows_that_come_in_two_parts_are_joined() -> None:
    kinds = {"text": pa.string(), "raw": pa.binary(), "list": pa.list_(pa.string())}
    parts = [pa.record_batch({name: pa.nulls(rows, kind) for name, kind in kinds.items()}) for rows in (3, 1, 2)]
    more = iter(parts[1:])
    joined = completed(parts[0], more, 4)
    assert joined.num_rows == 4
    assert joined.schema.types == [pa.large_string(), pa.large_binary(), pa.list_(pa.string())]
    assert completed(joined, more, 8).num_rows == 6  # there are no more


def test_blocks_that_are_read_in_two_parts_are_whole(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(data, "columns = ['n']", {"tokens": pa.array([[n] for n in range(9)], IDS), "n": list(range(9))})
    iter_batches = pq.ParquetFile.iter_batches

    def in_parts(file: pq.ParquetFile, *given: Any, **more: Any) -> Iterator[pa.RecordBatch]:
        for rows in iter_batches(file, *given, **more):
            yield rows.slice(0, 4)
            yield rows.slice(4)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", in_parts)
    [block] = open_blocks(data).get([0])
    assert rows_of(block) == [[n] for n in range(9)]


def test_lists_that_reach_two_gibibytes_are_told() -> None:
    ends = [pa.py_buffer(np.array(at, np.int32)) for at in ([0, 1 << 30], [0, 1])]
    text = pa.Array.from_buffers(pa.string(), 1, [None, ends[0], pa.py_buffer(np.zeros(1 << 30, np.uint8))])
    lists = pa.Array.from_buffers(pa.list_(pa.string()), 1, [None, ends[1]], children=[text])
    part = pa.record_batch({"list": lists})
    with pytest.raises(ValueError, match="2 of its rows hold more than 2 GiB; write row groups of fewer rows"):
        completed(part, iter([part]), 2)


def test_of_a_time_zone_that_is_not_known_it_is_told() -> None:
    with pytest.raises(
        ValueError, match=r"^of timestamp\[us, tz=Mars/Base\] the time zone is not known here; install tzdata, or"
    ):
        python_values(pa.array([7], pa.timestamp("us", "Mars/Base")))


@pytest.mark.parametrize("type_", [pa.binary(), pa.large_binary(), pa.binary_view()])
def test_bytes_of_every_type_travel(data: Path, type_: pa.DataType) -> None:
    write(data, 'columns = ["raw"]', {"tokens": pa.array([[1], [2]], IDS), "raw": pa.array([b"\xff", None], type_)})
    snapshot = open_snapshot(data)
    assert [tensor.dtype for tensor in tensors_of([snapshot], Spec()) if tensor.name == "raw"] == ["binary"]
    [block] = open_blocks(data).get([0])
    assert block.columns["raw"].to_pylist() == [b"\xff", b""]


def test_a_column_may_be_of_another_arrow_type_in_every_shard_if_it_is_sent_as_the_same(data: Path) -> None:
    kinds = [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string()), pa.string_view()]
    shards = [
        {"tokens": pa.array([[1]], IDS), "lang": pa.array(["en"], kind), "x": pa.array([0.5], number)}
        for kind, number in zip(kinds, [pa.float32(), pa.float16()] * 2, strict=True)
    ]
    write(data, 'columns = ["lang", "x"]', *shards)
    for block in open_blocks(data).get([0, 1, 2, 3]):
        assert {name: (str(column.type), *column.to_pylist()) for name, column in block.columns.items()} == {
            "lang": ("large_string", "en"),
            "x": ("float", 0.5),
        }
    write(data, 'columns = ["x"]', shards[0], shards[1] | {"x": pa.array([0.5], pa.float64())})
    with pytest.raises(DatasetRefused, match="column 'x' is double, but float in the first shard"):
        open_snapshot(data)


def test_bytes_in_a_template_that_are_no_utf8_make_a_bad_row(data: Path) -> None:
    write(data, 'text = "{raw}!"', {"raw": pa.array([b"fox", b"\xff"], pa.binary())})
    [block] = open_blocks(data).get([0])
    assert block.bad == {1: "{raw}! is not valid UTF-8 at byte 0"}
    assert rows_of(block)[0] == [*load_tokenizer(data / "../tokenizer.json").encode(["fox!"], "raw", Reasons())[0], 0]


def test_a_template_of_which_a_part_is_null_says_which(data: Path) -> None:
    meta = pa.array([{"b": "x"}, {"b": None}, None, {"b": "x"}])
    keys = 'text = "{a} {meta.b} {a}"\non_bad_row = "substitute"\nmax_bad_share = 0.9'
    write(data, keys, {"a": ["fox", "fox", None, None], "meta": meta})
    [block] = open_blocks(data).get([0])
    null = "{a} {meta.b} {a} is null, as "
    of_row = {1: f"{null}meta.b is in this row", 2: f"{null}a and meta.b are in this row", 3: f"{null}a is in this row"}
    assert block.bad == of_row


@pytest.mark.parametrize("declared", ["n", "{n}"])
def test_a_number_as_text_is_refused_with_the_template_that_prints_it(data: Path, declared: str) -> None:
    write(data, f'text = "{declared}"', {"n": [7]})
    with pytest.raises(DatasetRefused, match="is int64, but text must be text") as refusal:
        open_blocks(data)
    write(data, str(refusal.value).split("prints it: ")[1].split(". Mend")[0], {"n": [7]})
    [block] = open_blocks(data).get([0])
    assert rows_of(block) == [[*load_tokenizer(data / "../tokenizer.json").encode([" 7"], "n", Reasons())[0], 0]]


def test_a_template_without_a_column_is_refused(data: Path) -> None:
    write(data, 'text = "{{fox}}"', {"text": ["the dog"]})
    with pytest.raises(DatasetRefused, match="reads no column"):
        open_blocks(data)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("pa.record_batch({'other': rows['body']})", "there is no column 'body'; there are: other"),
        ("pa.record_batch({'body': pa.array(range(rows.num_rows))})", "column 'body' is int64, but text must be text"),
        ("pa.record_batch({'body': rows['body'], 'n': rows['body']})", "column 'n' is string, but int64 in the first shard"),
    ],
)
def test_a_transform_that_changes_its_mind_is_named(data: Path, returned: str, message: str) -> None:
    write(data, 'text = "body"\ntransform = "odd:odd"\ncolumns = ["n"]', {"body": ["fox"], "n": [1]})
    source = f"import pyarrow as pa\n\ndef odd(rows):\n    return {returned} if rows.num_rows else rows\n"
    (data / "odd.py").write_text(source)
    with pytest.raises(ShardUnreadable, match=message):
        open_blocks(data).get([0])


def test_a_repeated_number_is_a_list_of_tokens_as_protobuf_writes_it(data: Path) -> None:
    shard = zlib.decompress(base64.b64decode(REPEATED))
    (data / "part-0.parquet").write_bytes(shard)
    assert "repeated int32" in str(pq.ParquetFile(data / "part-0.parquet").schema)
    blocks = open_blocks(data)
    [block] = blocks.get([0])
    assert (rows_of(block), block.bad) == ([[1, 2], [], [3]], {1: "is empty"})
    assert open_snapshot(data).vocab_size == 4


def test_a_shard_without_row_groups_is_counted_as_nothing(data: Path) -> None:
    write(data, "filter = \"kind = 'a'\"", {"tokens": pa.array([[1, 2], [3]], IDS), "kind": ["a", "b"]})
    schema = pq.read_schema(data / "part-0.parquet")
    pq.ParquetWriter(data / "part-1.parquet", schema).close()
    assert pq.ParquetFile(data / "part-1.parquet").num_row_groups == 0
    index = index_of(open_blocks(data), data)
    assert index.rows_per_block("all").tolist() == [1]


def test_a_chat_that_is_no_utf8_or_has_no_prompt_is_a_bad_row(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": EOS}))
    roles = pa.array(["assistant"] * 3)
    contents = broken_text(b"fox", b"\xff", b"dog")
    turns = pa.StructArray.from_arrays([roles, contents], ["role", "content"])
    answers = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), turns)
    asked = [[{"role": "user", "content": "who"}], [{"role": "user", "content": "who"}], None]
    write(data, "", {"prompt": asked, "chosen": answers, "rejected": answers})
    [block] = open_blocks(data).get([0])
    assert block.bad == {1: "chosen is not valid UTF-8", 2: "prompt is null"}


TOOLED = "{% if tools %}{{ tools | tojson }}{{ tools | length }}{% endif %}" + CHATML
FIND = {"type": "function", "function": {"name": "find", "parameters": {"what": "fox"}}}
CALL = {"type": "function", "function": {"name": "call", "parameters": {"times": 2}}}
ASKED = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}]


def as_text(tools: Any) -> Any:
    return None if tools is None else json.dumps(tools)


def as_texts(tools: Any) -> Any:
    return None if tools is None else [json.dumps(tool) for tool in tools]


@pytest.mark.parametrize("written", [as_text, as_texts, lambda tools: tools])
@pytest.mark.parametrize("column", ["tools", "functions"])
def test_tools_are_given_to_the_template_however_they_are_stored(
    data: Path, written: Callable[[Any], Any], column: str
) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": TOOLED}))
    stored = [[FIND, CALL], [CALL], [], None]
    recipe = "" if column == "tools" else f'tools = "{column}"'
    write(data, recipe, {"messages": [ASKED] * 4, column: [written(tools) for tools in stored]})
    tokenizer = load_tokenizer(data / "../tokenizer.json")

    [block] = open_blocks(data).get([0])

    bare = f"<|user|>fox{EOS}<|assistant|>dog{EOS}"
    texts = [f"{json.dumps(tools)}{len(tools)}{bare}" if tools else bare for tools in stored]
    assert [tokenizer.decode(row) for row in rows_of(block)] == texts
    snapshot = open_snapshot(data, data / "../tokenizer.json")
    assert f" with {column}" in snapshot.recipe.describe()
    assert snapshot.recipe.identity["tools"] == column


def test_chats_of_from_and_value_are_refused_with_the_way_out(data: Path) -> None:
    write(data, "", {"conversations": [[{"from": "human", "value": "fox"}]]})
    with pytest.raises(DatasetRefused, match=r"conversations has from and value: a transform makes messages of it"):
        open_snapshot(data, data / "../tokenizer.json")


def test_a_transform_that_cannot_bear_no_rows_is_told_of_them(data: Path) -> None:
    (data / "clean.py").write_text("def first(rows):\n    return rows if rows['tokens'][0] else rows\n")
    write(data, "transform = 'clean:first'", {"tokens": pa.array([[1]], IDS)})
    with pytest.raises(DatasetRefused, match=r"raises IndexError in line 2 of clean\.py: .* It was called with no rows"):
        open_snapshot(data)


def test_tools_that_are_no_json_are_a_bad_row(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": TOOLED}))
    write(data, "", {"messages": [ASKED] * 4, "tools": ["[", '{"a": 1}', "null", ""]})
    [block] = open_blocks(data).get([0])
    assert sorted(block.bad) == [0, 1]
    assert all(reason.startswith("tools is no list of tools as JSON: ") for reason in block.bad.values())


@pytest.mark.parametrize(
    ("template", "recipe", "reason"),
    [
        (CHATML, 'tools = "functions"', "the chat template does not look at any"),
        (TOOLED, 'tools = "number"', "column 'number' is int64, but tools must be lists of definitions"),
        (TOOLED, 'tools = "absent"', "there is no column 'absent'"),
        (TOOLED, 'tools = "functions"\ntext = "functions"', "tools are for a chat template, but rows are no chats"),
    ],
)
def test_tools_that_would_be_left_out_are_refused(data: Path, template: str, recipe: str, reason: str) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    write(data, recipe, {"messages": [ASKED], "functions": ["[]"], "number": [1]})
    with pytest.raises(DatasetRefused, match=reason):
        open_snapshot(data, data / "../tokenizer.json")


@pytest.mark.parametrize(("template", "recipe"), [(CHATML, ""), (TOOLED, "tools = false")])
def test_a_column_of_tools_that_is_not_to_be_looked_at_changes_no_snapshot(data: Path, template: str, recipe: str) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    write(data, recipe, {"messages": [ASKED], "tools": ["[]"]})
    assert "tools" not in open_snapshot(data, data / "../tokenizer.json").recipe.identity


def test_a_chat_with_a_message_that_is_null_is_bad(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    asked, said = {"role": "user", "content": "fox", "name": "Al"}, {"role": "assistant", "content": "dog"}
    write(data, "", {"messages": [[asked, said], [asked, None, said]]})
    [block] = open_blocks(data).get([0])
    assert block.bad == {1: "messages has a message that is null"}


def test_a_chat_in_which_nothing_is_learned_is_bad(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    said = [
        [("user", "fox"), ("assistant", "dog")],
        [("user", "fox"), ("model", "dog")],
        [("user", "fox")],
        [("user", "fox"), ("assistant", " \n")],  # of which the template still closes the turn
        [("user", "fox"), ("assistant", ""), ("user", "fox"), ("assistant", "dog")],
    ]
    write(data, "", {"messages": [[{"role": role, "content": text} for role, text in chat] for chat in said]})
    [block] = open_blocks(data).get([0])
    silent = "messages has a chat in which the assistant says nothing, so nothing is learned; its roles: "
    assert block.bad == {1: f"{silent}user, model", 2: f"{silent}user", 3: f"{silent}user, assistant"}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"content": "a"}, True),
        ({"content": " \n"}, False),
        ({"content": None}, False),
        ({"content": "", "tool_calls": [{"name": "f"}]}, True),
        ({"content": "", "function_call": {"name": "f"}}, True),
        ({"content": "", "reasoning_content": "hm"}, True),
        ({"content": [{"type": "text", "text": None}, {"type": "text", "text": " "}]}, False),
        ({"content": [{"type": "tool_use", "text": None, "name": "f"}]}, True),
        ({"content": [{"text": "a"}]}, True),
    ],
)
def test_what_an_assistant_says_may_be_a_call_or_a_thought(message: dict[str, Any], says: bool) -> None:
    assert says_something(message) == says


def test_a_tokenizer_that_has_no_token_for_a_letter_opens_nothing(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"G": 0, "T": 1})).save(str(tmp_path / "dna.json"))
    assert load_tokenizer(tmp_path / "dna.json").opening is None


def test_an_answer_is_learned_behind_a_prompt_in_which_the_assistant_says_nothing(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}"
                    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"})
    )  # fmt: skip
    asked = [{"role": "user", "content": "who"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "well"}]
    answers = {side: [[{"role": "assistant", "content": side}]] for side in ("chosen", "rejected")}
    write(data, "eos = false", {"prompt": [asked], **answers})
    blocks = open_blocks(data)
    [block] = blocks.get([0])
    tokenizer = open_snapshot(data, data / "../tokenizer.json").recipe.tokenizer
    assert tokenizer
    for side in ("chosen", "rejected"):
        learned = [token for turn, is_learned in block.features[side].row(0) if is_learned for token in turn]
        assert tokenizer.decode(learned) == side


def test_what_opens_and_closes_a_chat_moves_no_border_of_its_loss(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    chat = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}]
    write(data, "bos = 1\neos = 2", {"messages": [chat]})
    blocks = open_blocks(data)
    [block] = blocks.get([0])
    [(asked, is_learned), (said, _)] = block.features["tokens"].row(0)
    tokenizer = open_snapshot(data, data / "../tokenizer.json").recipe.tokenizer
    assert tokenizer
    assert (asked[0], said[-1], is_learned) == (1, 2, False)
    assert tokenizer.decode(asked[1:]) == f"<|user|>fox{EOS}<|assistant|>"
    assert tokenizer.decode(said[:-1]) == f"dog{EOS}"


def test_an_eos_behind_the_users_words_is_not_learned(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    asked, said = {"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}
    write(data, "eos = 2", {"messages": [[asked, said], [asked, said, asked]]})
    [block] = open_blocks(data).get([0])
    whole, ends_open = (list(block.features["tokens"].row(row)) for row in (0, 1))
    assert [(turn[-1], is_learned) for turn, is_learned in whole][-1] == (2, True)
    assert [(turn[-1], is_learned) for turn, is_learned in ends_open if len(turn)][-1] == (2, False)


def test_an_eos_behind_an_answer_is_learned_whatever_the_template_puts_in_between(data: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content }}{% endgeneration %} fox{% endif %}{% endfor %}"
    )
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    asked, said, of_a_model = ({"role": role, "content": "dog"} for role in ("user", "assistant", "model"))
    write(data, "eos = 2", {"messages": [[asked, said], [of_a_model]]})
    [block] = open_blocks(data).get([0])
    assert block.bad == {}
    assert [(turn, is_learned) for turn, is_learned in block.features["tokens"].row(0)][-1] == ([2], True)


@pytest.mark.parametrize(
    ("columns", "ends"),
    [
        (["prompt", "response"], [(True, False), (False, True)]),
        (["prompt", "chosen", "rejected"], [(True, False), (False, True)]),
        (["chosen", "rejected"], [(True, True)]),
    ],
)
def test_texts_are_opened_before_the_prompt_where_there_is_one_and_closed_behind_the_answer(
    data: Path, columns: list[str], ends: list[tuple[bool, bool]]
) -> None:
    write(data, "bos = 1\neos = 2", {name: ["fox"] for name in columns})
    [block] = open_blocks(data).get([0])
    for feature in block.features.values():
        turns = [turn for turn, _ in feature.row(0) if turn]
        assert [(turn[0] == 1, turn[-1] == 2) for turn in turns] == ends


def test_of_a_pair_one_side_of_which_is_null_that_is_told(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    chat = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}]
    write(data, "", {"chosen": [chat, None, chat], "rejected": [chat, chat, None]})
    [block] = open_blocks(data).get([0])
    assert block.bad == {1: "chosen is null", 2: "rejected is null"}


def test_a_chat_with_a_date_that_python_has_not_is_bad(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    type_ = pa.list_(pa.struct({"role": pa.string(), "content": pa.string(), "at": pa.timestamp("s")}))
    chats = [[{"role": "assistant", "content": "dog", "at": at}] for at in (0, 10**12)]
    write(data, "", {"messages": pa.array(chats, type_)})
    [block] = open_blocks(data).get([0])
    assert block.bad == {1: "messages has a date outside the years 1 to 9999"}


def test_of_a_pair_that_is_alike_the_last_message_is_the_answer(data: Path) -> None:
    (data / "../tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    asked, said = {"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}
    write(data, "", {"chosen": [[asked, said]], "rejected": [[asked, said]]})
    [block] = open_blocks(data).get([0])
    assert block.bad == {}
    assert [is_learned for _, is_learned in block.features["chosen"].row(0)] == [False, True]


def test_as_many_bad_rows_as_max_bad_share_says_are_substituted_and_not_one_more(data: Path) -> None:
    for num_bad in (2, 3):
        rows = pa.array([[]] * num_bad + [[1]] * (100 - num_bad), IDS)
        write(data, 'on_bad_row = "substitute"\nmax_bad_share = 0.02', {"tokens": rows})
        blocks = open_blocks(data)
        blocks.get([0])
        assert (blocks.quarantine.num_bad_rows, blocks.quarantine.refusal is None) == (num_bad, num_bad == 2)


@pytest.mark.parametrize("counted", ["rows", "lengths"])
def test_bad_rows_are_a_share_of_the_rows_that_the_filter_keeps(data: Path, counted: str) -> None:
    rows = {"tokens": pa.array([[]] * 2 + [[1]] * 998, IDS), "n": range(1000)}
    write(data, 'on_bad_row = "substitute"\nfilter = "n < 100"', rows)
    blocks = open_blocks(data)
    blocks.get([0])
    assert blocks.quarantine.refusal is None
    getattr(index_of(blocks, data), counted).make(lambda _: None)
    assert "2 of 100 rows (2.00%) are known to be bad" in str(blocks.quarantine.refusal)


def test_a_bad_row_is_listed_by_its_place_in_the_shard_whatever_a_filter_leaves_out_before_it(data: Path) -> None:
    rows = {"tokens": pa.array([[1], [2], [3], [], [4]], IDS), "n": range(5)}
    write(data, 'on_bad_row = "substitute"\nfilter = "n > 1"', rows)
    blocks = open_blocks(data)
    blocks.get([0])
    assert [(row.row, row.row_in_group) for row in blocks.quarantine.rows()] == [(3, 3)]


def test_a_row_group_that_cannot_be_read_is_listed_with_what_was_met_not_with_what_its_footer_tells(data: Path) -> None:
    write(data, 'on_bad_row = "substitute"', {"text": ["fox", None]})
    path = data / "part-0.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 30 + whole[34:])
    blocks = open_blocks(data)
    [loaded] = blocks.request([0])
    assert isinstance(loaded, Future)
    assert isinstance(loaded.exception(), ShardUnreadable)
    blocks.quarantine.look_at(0, loaded)  # whoever waits may wake before it is noted
    assert [group.reason for group in blocks.quarantine.groups()] == [str(loaded.exception())]


def test_a_text_that_the_tokenizer_fails_on_is_substituted_and_counted(data: Path) -> None:
    unigram = Tokenizer(models.Unigram([("a", -1.0), (" ", -1.0), ("b", -1.0)]))
    unigram.save(str(data / "../tokenizer.json"))
    keys = 'eos = false\non_bad_row = "substitute"\nmax_bad_share = 0.1'
    write(data, keys, {"text": ["a b"] * 9 + ["emoji \N{GRINNING FACE}"]})
    blocks = open_blocks(data)
    [block] = blocks.get([0])
    assert list(block.bad) == [9]
    assert rows_of(block)[:9] == [[0, 1, 2]] * 9
    assert (blocks.quarantine.num_bad_rows, blocks.quarantine.refusal) == (1, None)
    assert [(row.row, row.reason) for row in blocks.quarantine.rows()] == [(9, block.bad[9])]


def test_bad_rows_are_listed_in_their_order_up_to_a_limit_and_counted_beyond_it(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "_BLOCK_ROWS", 2)
    monkeypatch.setattr(quarantine_module, "_LISTED_ROWS", 3)
    shards = [["fox", None, "", "", "dog", None], ["fox", None]]
    write(data, 'on_bad_row = "substitute"', *({"text": texts} for texts in shards))
    blocks = open_blocks(data)
    for index in (2, 1, 0):
        blocks.get([index])
    assert [(row.row, row.row_in_group) for row in blocks.quarantine.rows()] == [(2, 2), (3, 3), (5, 5)]
    assert [group.shard for group in blocks.quarantine.groups()] == ["part-1.parquet"]  # of the other more are listed
    assert blocks.quarantine.num_bad_rows == 4
    for _ in range(2):  # the second time the counts are there, and no block need be looked at
        blocks = open_blocks(data)
        index_of(blocks, data).lengths.make(lambda _: None)
        assert blocks.quarantine.num_bad_rows == 5


def test_a_row_that_is_longer_than_lengths_can_tell_is_bad(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_module, "LONGEST_ROW", 3)
    write(data, "", {"tokens": pa.array([[1, 2, 3], [1, 2, 3, 4]], IDS)})
    [block] = open_blocks(data).get([0])
    assert block.bad == {1: "has 4 tokens, more than 3"}
    assert np.array_equal(block.row_lengths, [3, 0])
