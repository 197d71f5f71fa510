"""Shards: which files are valid, and what footers tell of rows. A damaged one is an error, never a crash."""

import re
import shutil
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.parquet import encryption

from penstock_server.problems import BadRow, DatasetInvalid
from support.corpora import REAL_DATA, needs_real_data, write_numbered, write_shards, write_text
from support.engine import Loader, open_snapshot


def test_shards_of_other_columns_are_refused(data: Path, tokenizer: Path) -> None:
    write_text(data, ["one"])
    pq.write_table(pa.table({"text": [1, 2]}), data / "part-1.parquet")
    pq.write_table(pa.table({"body": ["one"]}), data / "part-2.parquet")
    with pytest.raises(DatasetInvalid) as caught:
        open_snapshot(data, tokenizer)
    assert "part-1.parquet: column 'text' is int64, but text must be text" in str(caught.value)
    assert "part-2.parquet: there is no column 'text'" in str(caught.value)


def test_truncated_and_foreign_files_are_named(data: Path) -> None:
    write_numbered(data, 100)
    whole = (data / "part-000.parquet").read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little")
    for name, content in {
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "foreign": b"id,text\n1,hello\n" * 10,
        "garbled": whole[: -8 - footer] + b"\xff" * footer + whole[-8:],
        "overlong": whole[:-8] + b"\xff\xff\xff\x7f" + b"PAR1",
    }.items():
        (data / f"a-{name}.parquet").write_bytes(content)
    with pytest.raises(DatasetInvalid) as caught:
        open_snapshot(data)
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert all("is truncated, damaged, or not a supported Parquet file: " in line for line in lines)


def with_footer(whole: bytes, edit: Callable[[bytes], bytes]) -> bytes:
    length = int.from_bytes(whole[-8:-4], "little")
    footer = edit(whole[-8 - length : -8])
    return whole[: -8 - length] + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def of_another_type(footer: bytes) -> bytes:
    """That of int32 lists, as Thrift writes it, with int64 for the type of the column's statistics."""
    assert footer.count(b"\x15\x02\x19") == 1
    return footer.replace(b"\x15\x02\x19", b"\x15\x04\x19")


def with_a_short_histogram(footer: bytes) -> bytes:
    """That of lists with three of the four counts of their levels."""
    assert footer.count(b"\x19\x46") == 1
    at = footer.index(b"\x19\x46")
    return footer[:at] + b"\x19\x36" + footer[at + 3 :]


def with_no_text_for_a_name(footer: bytes) -> bytes:
    return footer.replace(b"tokens", b"tok\xffns")


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (of_another_type, "the types of its columns contradict each other"),
        (with_a_short_histogram, "size: 3, expected: 4"),
        (with_no_text_for_a_name, "'utf-8' codec can't decode byte 0xff in position 3: invalid start byte"),
    ],
)
def test_damaged_footer_is_refused(data: Path, edit: Callable[[bytes], bytes], reason: str) -> None:
    write_shards(data, "tokens", [[[1, 2, 3], [4], [5]]], type_=pa.list_(pa.int32()), row_group_size=3)
    path = data / "part-000.parquet"
    path.write_bytes(with_footer(path.read_bytes(), edit))
    with pytest.raises(DatasetInvalid, match=f"part-000.parquet is truncated, damaged, .*{reason}. Write it again"):
        open_snapshot(data)


class Keys(encryption.KmsClient):  # type: ignore[misc]
    def wrap_key(self, key: bytes, _: str) -> bytes:
        return b64encode(key)


def test_encrypted_shard_is_refused(data: Path) -> None:
    table = pa.table({"text": ["a", "b"], "other": [1, 2]})
    config = encryption.EncryptionConfiguration("footer", column_keys={"key": ["other"]}, plaintext_footer=False)
    made = encryption.CryptoFactory(lambda _: Keys()).file_encryption_properties(encryption.KmsConnectionConfig(), config)
    data.mkdir()
    with pq.ParquetWriter(data / "a.parquet", table.schema, encryption_properties=made) as writer:
        writer.write_table(table)
    with pytest.raises(DatasetInvalid, match="a.parquet is .*not a supported Parquet file: .*encrypted"):
        open_snapshot(data)


def test_unsupported_type_is_refused(data: Path) -> None:
    """Numbers of 128 bits, as Polars writes them."""
    data.mkdir()
    path = data / "a.parquet"
    pq.write_table(pa.table({"text": ["a"], "n": [1]}), path)
    told = pq.read_metadata(path).metadata[b"ARROW:schema"]
    other = b64encode(b64decode(told).replace((64).to_bytes(4, "little"), (128).to_bytes(4, "little")))
    path.write_bytes(with_footer(path.read_bytes(), lambda footer: footer.replace(told, other)))
    with pytest.raises(DatasetInvalid, match="a.parquet is .*not a supported Parquet file"):
        open_snapshot(data)


def test_file_cut_at_any_byte_is_refused(data: Path, tmp_path: Path) -> None:
    write_numbered(tmp_path / "whole", 40, num_shards=1)
    whole = (tmp_path / "whole" / "part-000.parquet").read_bytes()
    data.mkdir()
    for length in range(0, len(whole), 7):
        (data / "part.parquet").write_bytes(whole[:length])
        with pytest.raises(DatasetInvalid):
            open_snapshot(data)


def test_duplicate_column_is_refused(data: Path, tokenizer: Path) -> None:
    data.mkdir()
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), data / "a.parquet")
    with pytest.raises(DatasetInvalid, match=r"2 columns are called 'text'"):
        open_snapshot(data, tokenizer)
    pq.write_table(pa.table([["a"], ["b"], ["c"]], names=["text", "k", "k"]), data / "a.parquet")
    assert open_snapshot(data, tokenizer).recipe.token_columns == ("text",)
    pq.write_table(pa.table([[[1]], [[2]]], names=["input_ids", "input_ids"]), data / "a.parquet")
    with pytest.raises(DatasetInvalid, match=r"2 columns are called 'input_ids'. Rename all but one"):
        open_snapshot(data)


def test_dot_in_a_column_name_is_not_a_path(data: Path, tokenizer: Path) -> None:
    data.mkdir()
    tokens = pa.array([[1, 3]], pa.list_(pa.int32()))
    pq.write_table(pa.table({"tokens.n": [-1], "tokens": tokens}), data / "a.parquet")
    assert open_snapshot(data).vocab_size == 4
    both = pa.array([[{"a": 9, "b": [8]}]], pa.list_(pa.struct({"a": pa.int32(), "b": pa.list_(pa.int32())})))
    pq.write_table(pa.table({"tokens.m": both, "m": both, "tokens": tokens, "tokens.o": [[7]]}), data / "a.parquet")
    assert open_snapshot(data).vocab_size == 4
    pq.write_table(pa.table({"text.lang": pa.array([None], pa.string()), "text": ["a"]}), data / "a.parquet")
    assert open_snapshot(data, tokenizer).num_rows == 1


def test_dataset_without_rows_is_refused(data: Path) -> None:
    write_shards(data, "tokens", [[]], type_=pa.list_(pa.int64()), row_group_size=1)
    with pytest.raises(DatasetInvalid, match="without rows"):
        open_snapshot(data)


def test_fingerprint_covers_shards_and_recipe(data: Path, tmp_path: Path) -> None:
    write_numbered(data, 50)
    first = open_snapshot(data).fingerprint
    shutil.copytree(data, tmp_path / "copy")  # elsewhere and with other dates
    assert open_snapshot(tmp_path / "copy").fingerprint == first
    (data / "penstock.toml").write_text('on_bad_row = "replace"')
    assert open_snapshot(data).fingerprint == first
    (data / "penstock.toml").write_text("vocab_size = 60")
    assert open_snapshot(data).fingerprint != first
    (data / "penstock.toml").write_text("validation = 0.1")
    assert open_snapshot(data).fingerprint != first
    (data / "penstock.toml").unlink()
    (data / "part-000.parquet").rename(data / "part-00.parquet")  # of which split a row is, its shard's name decides
    assert open_snapshot(data).fingerprint != first
    (data / "part-00.parquet").rename(data / "part-000.parquet")
    assert open_snapshot(data).fingerprint == first
    write_shards(data, "input_ids", [[], [], [], [[1]]], type_=pa.list_(pa.int32()), row_group_size=1)
    assert open_snapshot(data).fingerprint != first


def test_blocks_are_row_groups_in_order(data: Path) -> None:
    write_numbered(data, 100, num_shards=2, row_group_size=20)
    snapshot = open_snapshot(data)
    assert snapshot.rows_per_block.tolist() == [20, 20, 10, 20, 20, 10]
    found = [snapshot.block(index) for index in range(snapshot.num_blocks)]
    assert [(b.shard.path.name, b.row_group, b.num_rows) for b in found] == [
        (f"part-00{shard}.parquet", group, rows) for shard in (0, 1) for group, rows in enumerate((20, 20, 10))
    ]


@needs_real_data
def test_files_that_crash_parquet_readers_are_refused(data: Path, tokenizer: Path) -> None:
    for path in sorted((REAL_DATA / "bad_parquet").glob("*.parquet")):
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir()
        shutil.copy(path, data)
        with pytest.raises(DatasetInvalid):
            open_snapshot(data, tokenizer)


CHAT = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}]
PAIR = {"chosen": ["dog"], "rejected": ["fox"]}
IDS = [[1, 2, 3]]


@pytest.mark.parametrize(
    ("first", "later", "column"),
    [
        (PAIR | {"prompt": [None]}, {"prompt": ["the"]}, "prompt"),
        ({"prompt": ["the"], "completion": ["fox"]}, {"messages": [CHAT]}, "messages"),
        ({"text": ["fox"]}, {"input_ids": IDS}, "input_ids"),
        ({"input_ids": IDS}, {"completion_mask": [[0, 1, 1]]}, "completion_mask"),
        ({"input_ids": IDS, "loss_mask": [[0, 1, 1]]}, {"labels": [[-100, -100, 3]]}, "labels"),
        ({"input_ids": IDS}, {"position_ids": [[0, 0, 1]]}, "position_ids"),
    ],
)
def test_column_only_in_a_later_shard_is_refused(
    data: Path, tokenizer: Path, first: dict[str, Any], later: dict[str, Any], column: str
) -> None:
    data.mkdir()
    pq.write_table(pa.table(first), data / "part-0.parquet")
    pq.write_table(pa.table(first | later), data / "part-1.parquet")
    with pytest.raises(DatasetInvalid, match=rf"part-1.parquet: column '{column}' is not in the first shard"):
        open_snapshot(data, tokenizer)


def test_later_shard_may_have_more_columns(data: Path, tokenizer: Path) -> None:
    data.mkdir()
    pq.write_table(pa.table({"text": ["fox"]}), data / "part-0.parquet")
    pq.write_table(pa.table({"text": ["fox"], "prompt": ["the"], "label": [True], "labels": [[1]]}), data / "part-1.parquet")
    assert open_snapshot(data, tokenizer).num_rows == 2


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
