"""Rows as few have them, and the blocks that they become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.store import BlockStore
from penstock_server.index.index import Index
from planned import open_snapshot

IDS = pa.list_(pa.int32())
CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write(folder: Path, toml: str, *shards: dict[str, Any]) -> None:
    for number, columns in enumerate(shards):
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet")
    (folder / "penstock.toml").write_text(toml)


def open_blocks(folder: Path) -> Blocks:
    return Blocks(open_snapshot(folder, folder / "../tokenizer.json"), BlockStore(CacheFolder(folder / "../cache")))


def index_of(blocks: Blocks, folder: Path) -> Index:
    return Index("data", open_snapshot(folder, folder / "../tokenizer.json"), blocks)


def none_is_bad(row: int, reason: str) -> None:
    """A `Note` for texts that must all be tokenized."""
    raise AssertionError(f"row {row} {reason}")


def as_json(*values: Any) -> pa.Array:
    """A column of Parquet's JSON type; None is no value at all."""
    texts = [None if value is None else json.dumps(value) for value in values]
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))


def broken_text(*texts: bytes) -> pa.Array:
    """A column of text whose bytes nobody has checked."""
    return pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())
