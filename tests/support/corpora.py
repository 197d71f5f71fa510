"""Small datasets for tests: text, pairs, odd rows, damaged and growing folders, imports; and where the real ones are."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.store import BlockStore
from penstock_server.importing.run import Import
from penstock_server.index.index import Index
from support.engine import open_snapshot

REAL_DATA = Path(os.environ.get("PENSTOCK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_real_data = pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f"no real datasets at {REAL_DATA} (PENSTOCK_TEST_DATA)")

EOS = "<|endoftext|>"
IDS = pa.list_(pa.int32())
CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ID_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}  # of types, in an index
Rows = list[dict[str, Any]]

FILTER_SCHEMA = pa.schema(
    {
        "n": pa.int32(),
        "big": pa.int64(),
        "hash": pa.uint64(),
        "score": pa.float32(),
        "text": pa.string(),
        "a b": pa.large_string(),
        "ok": pa.bool_(),
        "meta": pa.struct({"lang": pa.string(), "source": pa.struct({"rank": pa.int8()})}),
        "ids": pa.list_(pa.int64()),
    }
)


def write_shards(
    folder: Path, column: str, shards: Sequence[Sequence[Any]], *, type_: pa.DataType, row_group_size: int
) -> Path:
    """A dataset of one column: one Parquet file a shard."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(shards):
        table = pa.table({column: pa.array(rows, type_)})
        pq.write_table(table, folder / f"part-{number:03}.parquet", row_group_size=row_group_size)
    return folder


def write_numbered(folder: Path, num_rows: int, *, num_shards: int = 3, row_group_size: int = 32) -> Path:
    """Pre-tokenized rows of 1 to 7 tokens, each row's first token its number: a batch shows which rows it holds."""
    rows = [[number] + [1] * (number % 7) for number in range(num_rows)]
    size = -(-num_rows // num_shards)
    shards = [rows[start : start + size] for start in range(0, num_rows, size)]
    return write_shards(folder, "input_ids", shards, type_=pa.list_(pa.int32()), row_group_size=row_group_size)


def write_text(folder: Path, texts: Sequence[str | None], *, row_group_size: int = 100) -> Path:
    """One shard of text."""
    return write_shards(folder, "text", [texts], type_=pa.string(), row_group_size=row_group_size)


def write_pairs(folder: Path, pairs: Sequence[tuple[str | None, str | None]]) -> Path:
    """One shard of prompts and responses."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts, responses = zip(*pairs, strict=True)
    pq.write_table(pa.table({"prompt": prompts, "response": responses}), folder / "part-000.parquet", row_group_size=100)
    return folder


def write_tokenizer(path: Path, texts: Sequence[str] = ("the quick brown fox jumps over the lazy dog",)) -> Path:
    """A byte-level BPE tokenizer with an EOS; every text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return path


def write(folder: Path, toml: str, *shards: dict[str, Any], row_group_size: int | None = None) -> Path:
    """A dataset with a recipe: one Parquet file for each table of columns."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, columns in enumerate(shards):
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet", row_group_size=row_group_size)
    (folder / "penstock.toml").write_text(toml)
    return folder


def open_blocks(folder: Path) -> Blocks:
    return Blocks(open_snapshot(folder, folder / "../tokenizer.json"), BlockStore(folder / "../cache"))


def index_of(blocks: Blocks, folder: Path) -> Index:
    return Index("data", open_snapshot(folder, folder / "../tokenizer.json"), blocks)


def none_is_bad(row: int, reason: str) -> None:
    """A `Note` for texts that must all be tokenized."""
    raise AssertionError(f"row {row} {reason}")


def as_json(*values: Any) -> pa.Array:
    """A column of Parquet's JSON type; None is no value at all."""
    texts = [None if value is None else json.dumps(value) for value in values]
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Other bytes than these: cut, grown, with one bit flipped, or with two ranges swapped."""
    how = draw(st.sampled_from(["cut", "grow", "flip", "swap"] if whole else ["grow"]))
    at = draw(st.integers(0, max(len(whole) - 1, 0)))
    if how == "cut":
        return whole[:at]
    if how == "grow":
        return whole + draw(st.binary(min_size=1, max_size=9))
    if how == "flip":
        return whole[:at] + bytes([whole[at] ^ 1 << draw(st.integers(0, 7))]) + whole[at + 1 :]
    other = draw(st.integers(0, len(whole)))
    first, second = min(at, other), max(at, other)
    size = min(draw(st.sampled_from([1, 4, 8, 64])), second - first, len(whole) - second)
    swapped = bytearray(whole)
    swapped[first : first + size], swapped[second : second + size] = whole[second:][:size], whole[first:][:size]
    assume(swapped != whole)
    return bytes(swapped)


def write_shard(folder: Path, number: int, variant: int) -> None:
    """Equal arguments write equal files."""
    temporary = folder / ".part"
    ids = pa.array([[number, variant]] * 3, pa.list_(pa.int32()))
    pq.write_table(pa.table({"input_ids": ids}), temporary)
    temporary.rename(folder / f"part-{number}.parquet")


def shards_in(folder: Path) -> list[Path]:
    """The shards in the order in which the server reads them."""
    return sorted(folder.glob("*.parquet"))


def read_back(folder: Path) -> pa.Table:
    """The rows of all shards, which have one schema."""
    tables = [pq.read_table(path) for path in shards_in(folder)]
    assert all(table.schema == tables[0].schema for table in tables)
    return pa.concat_tables(tables)


def imported(out_dir: Path, *files: Path | str, **options: Any) -> pa.Table:
    """What an import of the files wrote."""
    Import(files=files, out_dir=out_dir, **options).run()
    return read_back(out_dir)


def write_indexed(
    path: Path, documents: Sequence[Sequence[Sequence[int]]], type_: str = "uint16", *, modes: bool = False
) -> Path:
    """As Megatron-LM writes documents of samples: ids end to end, and the index."""
    samples = [sample for document in documents for sample in document]
    ids = np.array([token for sample in samples for token in sample], type_)
    path.write_bytes(ids.astype(ids.dtype.newbyteorder("<")).tobytes())
    lengths = np.array([len(sample) for sample in samples], "<i4")
    begins = (np.cumsum(lengths, dtype="<i8") - lengths) * ids.itemsize
    borders = np.cumsum([0, *(len(document) for document in documents)], dtype="<i8")
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, ID_CODES[type_], len(lengths), len(borders))
    parts = [lengths, begins.astype("<i8"), borders, *([np.zeros(len(lengths), "i1")] if modes else [])]
    path.with_suffix(".idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    return path


def write_datatrove(path: Path, documents: Sequence[Sequence[int]], type_: str = "uint16", loss: Sequence[int] = ()) -> Path:
    """As datatrove's DocumentTokenizer writes documents: ids end to end, where each document ends, and the mask of a loss."""
    np.array([token for document in documents for token in document], f"<{np.dtype(type_).str[1:]}").tofile(path)
    np.cumsum([len(document) for document in documents], dtype="<u8").tofile(f"{path}.index")
    if loss:
        np.array(loss, np.bool_).tofile(f"{path}.loss")
    return path


def types_of(table: pa.Table) -> dict[str, str]:
    """The columns' types as pyarrow prints them, without the names that Parquet gives to items."""
    return {field.name: re.sub(r" \('.*?'\)", "", str(field.type)).replace("element: ", "item: ") for field in table.schema}
