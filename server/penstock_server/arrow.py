"""Steps with Arrow's arrays that pyarrow does not take by itself, or not for every type."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock_server.geometry.arrays import IntArray


def take_rows(rows: pa.RecordBatch, numbers: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """The rows of these numbers, which ascend."""
    try:
        return rows.take(pa.array(numbers))
    except pa.ArrowNotImplementedError:  # of views, which pyarrow only slices and joins; Polars writes all text as views
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
        return pa.concat_batches([rows.slice(int(run[0]), len(run)) for run in runs if len(run)] or [rows.slice(0, 0)])


def list_lengths(array: pa.Array) -> IntArray:
    """The length of each list, 0 for null."""
    lengths: IntArray = pc.fill_null(pc.cast(pc.list_value_length(array), pa.int64()), 0).to_numpy(zero_copy_only=False)
    return lengths


def raw_texts(array: pa.Array) -> pa.Array:
    """A column of text or bytes as large_binary: not every text is UTF-8."""
    return pc.cast(array, pa.large_binary())
