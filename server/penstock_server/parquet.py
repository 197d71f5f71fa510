"""Opens Parquet files with the same options everywhere, so that a column always has the same type."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet as pq

_INT96_UNIT = "us"  # for Spark's INT96 times; pyarrow's default, ns, overflows in 2262 and wraps to 1677


def open_parquet(source: Any, **options: Any) -> pq.ParquetFile:
    """Opens a Parquet file with these options of pyarrow."""
    return pq.ParquetFile(source, coerce_int96_timestamp_unit=_INT96_UNIT, **options)
