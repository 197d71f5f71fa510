"""`penstock import` reads the folders that LitData writes, row for row as its StreamingDataset does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import RemoteDataset
from penstock_server.importing.run import Import
from support.corpora import imported
from support.servers import Serve

LIBRARY = "litdata"
pytestmark = pytest.mark.filterwarnings("ignore")  # it warns of chunks that are larger than stated


def write(folder: Path, item_of: Callable[[int], Any], **options: Any) -> None:
    """Write a hundred items, as `optimize` does in each of its workers."""
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), **{"chunk_bytes": 20_000} | options)
    for number in range(100):
        writer[number] = item_of(number)
    writer.done()
    writer.merge()


def tensors_of(number: int) -> dict[str, Any]:
    random = np.random.default_rng(number)
    return {
        "text": "é" * number,
        "n": -number,
        "share": random.random(),
        "ok": number % 3 == 0,
        "raw": random.bytes(number),
        "ids": torch.from_numpy(random.integers(0, 1 << 40, number)),
        "types": random.integers(0, 1 << 16, number).astype("uint16"),
        "pair": {"grid": torch.from_numpy(random.random((2, number))), "table": random.random((number, 3))},
    }


def documents_of(number: int) -> dict[str, Any]:
    """Without tensors: LitData stores such items as Arrow tables."""
    ids = np.random.default_rng(number).integers(0, 1 << 20, number).tolist()
    messages = [{"role": "user", "content": "é" * turn} for turn in range(number % 4)]
    return {"text": "é" * number, "ids": ids, "messages": messages, "note": None if number < 50 else "late", "n": number}


def plain(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The names and values of a row that an item becomes."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from plain(child, f"{name}.{key}" if name else key)
    else:
        yield name, bytes(value) if isinstance(value, memoryview) else value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize(
    "options", [{}, *({"compression": "zstd", "compression_level": level} for level in ("chunk", "batch", "sample"))]
)
def test_items_are_those_of_the_library(tmp_path: Path, options: dict[str, Any]) -> None:
    from litdata import StreamingDataset

    write(tmp_path / "chunks", tensors_of, **options)
    rows = imported(tmp_path / "out", tmp_path / "chunks").to_pylist()
    data = StreamingDataset(str(tmp_path / "chunks"))
    assert rows == [dict(plain(data[number])) for number in range(len(data))]
    assert len(rows) == 100


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_items_without_tensors_are_those_of_the_library(tmp_path: Path, compression: str | None) -> None:
    from litdata import StreamingDataset

    write(tmp_path / "chunks", documents_of, compression=compression)
    data = StreamingDataset(str(tmp_path / "chunks"))
    assert imported(tmp_path / "out", tmp_path / "chunks").to_pylist() == [data[number] for number in range(len(data))]
    assert len(data) == 100


@pytest.mark.parametrize("options", [{}, {"compression": "zstd:1", "compression_level": "chunk"}])
@pytest.mark.parametrize("type_", ["torch", "numpy"])
def test_tokens_are_those_of_the_library(tmp_path: Path, options: dict[str, Any], type_: str) -> None:
    """Its blocks leave out the tokens after the last full block of a chunk."""
    from litdata import StreamingDataset, TokensLoader

    def document_of(number: int) -> Any:
        ids = np.random.default_rng(number).integers(0, 1 << 15, number + 1).astype("int32")
        return torch.from_numpy(ids) if type_ == "torch" else ids

    options = {"chunk_bytes": None, "chunk_size": 500, "item_loader": TokensLoader()} | options
    write(tmp_path / "chunks", document_of, **options)
    rows = imported(tmp_path / "out", tmp_path / "chunks")["tokens"].to_pylist()
    assert rows == [document_of(number).tolist() for number in range(100)]
    data = StreamingDataset(str(tmp_path / "chunks"), item_loader=TokensLoader(block_size=1))
    assert [int(data[number][0]) for number in range(len(data))] == [token for row in rows for token in row]


def test_blocks_are_samples_of_the_stream(serve: Serve, tmp_path: Path) -> None:
    from litdata import StreamingDataset, TokensLoader

    write(tmp_path / "chunks", lambda number: torch.arange(number + 1), chunk_bytes=1 << 30, item_loader=TokensLoader())
    Import(files=[tmp_path / "chunks"], out_dir=tmp_path / "data" / "tokens").run()
    stream: dict[str, Any] = {"packing": "concat", "seq_len": 16, "labels": "shifted", "shuffle": "none", "batch_size": 1}
    batches = list(RemoteDataset(serve(tmp_path / "data").url, "tokens", **stream))
    blocks = StreamingDataset(str(tmp_path / "chunks"), item_loader=TokensLoader(block_size=17))
    assert [batch["input_ids"][0].tolist() for batch in batches] == [block[:-1].tolist() for block in blocks]
    assert [batch["labels"][0].tolist() for batch in batches] == [block[1:].tolist() for block in blocks]
    assert len(batches) == 100 * 101 // 2 // 17
