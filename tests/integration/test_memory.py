"""The server's anonymous memory, read from the kernel's own accounting, while it decodes what is larger than that."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.processes import MIB, Watch
from support.servers import Serve

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize("cache_bytes", ["1GB", "20MB"])
def test_server_memory_stays_below_a_row_group(serve: Serve, tmp_path: Path, cache_bytes: str) -> None:
    """One row group of 256 MiB, with room for all of its blocks in the cache, and for one or two."""
    num_rows, length = 65_536, 1024
    ids = np.arange(num_rows * length, dtype=np.int32) % 50_000
    offsets = np.arange(0, len(ids) + 1, length, dtype=np.int32)
    table = pa.table({"tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))})
    (tmp_path / "data" / "big").mkdir(parents=True)
    pq.write_table(table, tmp_path / "data" / "big" / "a.parquet", row_group_size=num_rows, compression="none")
    with serve(tmp_path / "data", "--cache-bytes", cache_bytes, cache_dir=tmp_path / "cache") as server:
        assert server.json("/v1/datasets/big")["blocks"] > 10
        with Watch(server.pid) as watch:
            for step in (0, 7):
                [frame] = server.frames(f"/v1/datasets/big/epochs/0/ranks/0/batches/{step}", batch_size=2, shuffle="global")
                assert frame.tensors["input_ids"].shape == (2, length)
        assert watch.peak - watch.first < 160 * MIB
        stored = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.block"))
        assert 0 < stored <= (20e6 if cache_bytes == "20MB" else 1e9)
