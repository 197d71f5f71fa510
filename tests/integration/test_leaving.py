"""Clients that leave while the server works for them: the work is given up, and nobody else notices."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pyarrow as pa
import pytest

from corpora import write_shards, write_tokenizer
from serving import Server


@pytest.mark.parametrize("path", ["batches/0", "batches"])
def test_blocks_of_a_client_that_left_are_not_made(serve: Callable[..., Server], tmp_path: Path, path: str) -> None:
    texts = [[f"{n} " + "the quick brown fox jumps " * 60 for n in range(100)] for _ in range(400)]
    write_shards(tmp_path / "data" / "long", "text", texts, type_=pa.string(), row_group_size=100)
    write_tokenizer(tmp_path / "tokenizer.json")
    cache = tmp_path / "cache"
    server = serve(tmp_path / "data", "--tokenizer", str(tmp_path / "tokenizer.json"), cache_dir=cache)
    url = f"{server.url}/v1/datasets/long/epochs/0/ranks/0/{path}"
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(url, params={"batch_size": 512, "seq_len": 8, "shuffle": "global"}, timeout=0.3)
    stored, settled = -1, time.monotonic() + 120
    while stored != (stored := len(list(cache.glob("*.block")))):
        assert time.monotonic() < settled
        time.sleep(3)
    assert stored < 250  # of some 275 that the first batch needs
    assert len(server.frames("/v1/datasets/long/epochs/0/ranks/0/batches/0", batch_size=2, seq_len=8, shuffle="global")) == 1
    assert "Traceback" not in server.stop()
