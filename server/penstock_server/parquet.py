"""How Parquet files are opened, everywhere alike: a column must be of one type wherever it is looked at."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

_INT96_UNIT = "us"  # of times as Spark writes them; pyarrow's own choice is ns, which end in 2262 and begin anew in 1677


def open_parquet(source: Any, **options: Any) -> pq.ParquetFile:
    """A Parquet file, to be read with these options of pyarrow's."""
    return pq.ParquetFile(source, coerce_int96_timestamp_unit=_INT96_UNIT, **options)


def parquet_fragment(file: pa.NativeFile) -> ds.ParquetFileFragment:
    """An open Parquet file, of which row groups can be chosen by their statistics."""
    return ds.ParquetFileFormat(coerce_int96_timestamp_unit=_INT96_UNIT).make_fragment(file)
