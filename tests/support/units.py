"""A dataset of a few row groups, and the stores that preparations of it fill."""

from __future__ import annotations

import subprocess
import time
from itertools import cycle, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from support.corpora import write_shards, write_tokenizer
from support.servers import penstock

NUM_SHARDS, NUM_GROUPS = 4, 24
Objects = dict[str, bytes]


def write_texts(folder: Path, group_rows: int) -> Path:
    """A dataset of four shards of six row groups each."""
    words = islice(cycle(["the quick brown fox ", "jumps over "]), NUM_GROUPS * group_rows)
    texts = [f"{row} " + word * (1 + row % 30) for row, word in enumerate(words)]
    size = len(texts) // NUM_SHARDS
    shards = [texts[start : start + size] for start in range(0, len(texts), size)]
    write_shards(folder / "texts", "text", shards, type_=pa.string(), row_group_size=group_rows)
    (folder / "texts" / "penstock.toml").write_text('tokenizer = "../tokenizer.json"')
    write_tokenizer(folder / "tokenizer.json")
    return folder


def arguments(data: Path, tmp_path: Path, store: str, *flags: str | Path) -> list[str | Path]:
    """Those of a worker with a cache of its own."""
    cache = tmp_path / f"cache-{time.monotonic_ns()}"
    return ["prepare", data, "--store", tmp_path / store, "--cache-dir", cache, *flags]


def run(data: Path, tmp_path: Path, store: str, *flags: str | Path) -> subprocess.CompletedProcess[str]:
    return penstock(*arguments(data, tmp_path, store, *flags))


def objects(store: Path) -> Objects:
    """All objects but claims, by name."""
    paths = [path for path in store.rglob("*") if path.is_file() and path.suffix != ".claim"]
    return {str(path.relative_to(store)): path.read_bytes() for path in paths}


def fill(store: Path, content: Objects) -> None:
    for name, body in content.items():
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_bytes(body)


def num_units(store: Path) -> int:
    return len(list((store / "units").glob("*.unit")))


def damage(path: Path, row_group: int) -> None:
    """Damage the first page of a row group, whose footer stays whole."""
    at = pq.read_metadata(path).row_group(row_group).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[at : at + 16] = b"\xff" * 16
    path.write_bytes(content)


def add_transform(data: Path, first: str, statements: str) -> None:
    """Add a transform that runs statements on the row group whose texts begin so."""
    condition = f"''.join(batch['text'].to_pylist()).startswith({first!r})"
    code = f"import os, time\n\n\ndef clean(batch):\n    if {condition}:\n        {statements}\n    return batch\n"
    (data / "texts" / "clean.py").write_text(code)
    with (data / "texts" / "penstock.toml").open("a") as recipe:
        recipe.write('\ntransform = "clean:clean"\n')
