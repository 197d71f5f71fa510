"""Small datasets for tests, and where the real ones are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

REAL_DATA = Path(os.environ.get("PENSTOCK_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
needs_real_data = pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f"no real datasets at {REAL_DATA} (PENSTOCK_TEST_DATA)")

EOS = "<|endoftext|>"


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
