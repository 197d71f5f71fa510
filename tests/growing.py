"""Folders that grow, and what is known of them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def write_shard(folder: Path, number: int, variant: int) -> None:
    """Equal arguments write equal files."""
    temporary = folder / ".part"
    ids = pa.array([[number, variant]] * 3, pa.list_(pa.int32()))
    pq.write_table(pa.table({"input_ids": ids}), temporary)
    temporary.rename(folder / f"part-{number}.parquet")
