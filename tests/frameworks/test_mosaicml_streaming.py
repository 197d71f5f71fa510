"""`penstock import` reads the folders that MosaicML Streaming writes, row for row as its StreamingDataset does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.corpora import imported

LIBRARY = "streaming"
pytestmark = pytest.mark.filterwarnings("ignore")  # it warns of settings that do not matter for one process

NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
COLUMNS = {
    "text": "str",
    "n": "int",
    "raw": "bytes",
    "meta": "json",
    "many": "str_int",
    "share": "str_float",
    "price": "str_decimal",
    "tokens": "ndarray:uint16",
    "any": "ndarray",
    "grid": "ndarray:float32:2,3",
    **dict(zip(NUMBERS, NUMBERS, strict=True)),
}


def row_of(number: int) -> dict[str, Any]:
    random = np.random.default_rng(number)
    return {
        "text": "é" * number,
        "n": -number,
        "raw": random.bytes(number),
        "meta": {"k": [number, None, {"x": 0.5}]},
        "many": 1 << number % 60,
        "share": random.random(),
        "price": Decimal(number) / 7,
        "tokens": random.integers(0, 1 << 16, random.integers(1, 2_000)).astype("uint16"),
        "any": random.integers(0, 9, (random.integers(1, 300), 2)).astype("int32"),
        "grid": random.random((2, 3)).astype("float32"),
        **{name: np.dtype(name).type(number) for name in NUMBERS},
    }


def write(folder: Path, compression: str | None = None) -> None:
    from streaming import MDSWriter

    hashes = ["blake2b", "sha1", "xxh64"]
    with MDSWriter(out=str(folder), columns=COLUMNS, compression=compression, hashes=hashes, size_limit=40_000) as writer:
        for number in range(100):
            writer.write(row_of(number))


def read_by_library(folder: Path) -> Iterator[dict[str, Any]]:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    data = StreamingDataset(local=str(folder), shuffle=False, batch_size=1)
    for number in range(len(data)):
        row = data[number]
        values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}
        yield values | {"price": str(row["price"])}


def check_equal(out_dir: Path, folder: Path) -> None:
    rows = imported(out_dir, folder).to_pylist()
    assert [row | {"meta": json.loads(row["meta"])} for row in rows] == [*read_by_library(folder)]


@pytest.mark.parametrize("compression", [None, "br:1", "bz2", "gz", "snappy", "zstd"])
def test_rows_are_those_of_the_library(tmp_path: Path, compression: str | None) -> None:
    write(tmp_path / "mds", compression)
    assert len([*(tmp_path / "mds").iterdir()]) > 5
    check_equal(tmp_path / "out", tmp_path / "mds")
    check_equal(tmp_path / "again", tmp_path / "mds")  # it left the decompressed shards there


def test_merged_folders_are_read_as_by_the_library(tmp_path: Path) -> None:
    from streaming.base.util import merge_index

    for name in ("a", "b"):
        write(tmp_path / "mds" / name)
    merge_index(str(tmp_path / "mds"), keep_local=True)
    check_equal(tmp_path / "out", tmp_path / "mds")
