"""Imports into folders, read back."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock_server.importing.run import Import


def shards_in(folder: Path) -> list[Path]:
    """The shards in the order in which the server reads them."""
    return sorted(folder.glob("*.parquet"))


def read_back(folder: Path) -> pa.Table:
    """The rows of all shards, which have one schema."""
    tables = [pq.read_table(path) for path in shards_in(folder)]
    assert all(table.schema == tables[0].schema for table in tables)
    return pa.concat_tables(tables)


def imported(out_dir: Path, *files: Path, **options: Any) -> pa.Table:
    """What an import of the files wrote."""
    Import(files=files, out_dir=out_dir, **options).run()
    return read_back(out_dir)


ID_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}  # of types, in an index


def write_indexed(
    path: Path, documents: Sequence[Sequence[Sequence[int]]], type_: str = "uint16", *, modes: bool = False
) -> Path:
    """As Megatron-LM writes documents of samples: ids end to end, and the index."""
    samples = [sample for document in documents for sample in document]
    ids = np.array([token for sample in samples for token in sample], type_)
    path.write_bytes(ids.astype(ids.dtype.newbyteorder("<")).tobytes())
    lengths = np.array([len(sample) for sample in samples], "<i4")
    begins = (np.cumsum(lengths, dtype="<i8") - lengths) * ids.itemsize
    borders = np.cumsum([0, *(len(document) for document in documents)], dtype="<i8")
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, ID_CODES[type_], len(lengths), len(borders))
    parts = [lengths, begins.astype("<i8"), borders, *([np.zeros(len(lengths), "i1")] if modes else [])]
    path.with_suffix(".idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    return path


def write_datatrove(path: Path, documents: Sequence[Sequence[int]], type_: str = "uint16", loss: Sequence[int] = ()) -> Path:
    """As datatrove's DocumentTokenizer writes documents: ids end to end, where each document ends, and the mask of a loss."""
    np.array([token for document in documents for token in document], f"<{np.dtype(type_).str[1:]}").tofile(path)
    np.cumsum([len(document) for document in documents], dtype="<u8").tofile(f"{path}.index")
    if loss:
        np.array(loss, np.bool_).tofile(f"{path}.loss")
    return path


def types_of(table: pa.Table) -> dict[str, str]:
    """The columns' types as pyarrow prints them, without the names that Parquet gives to items."""
    return {field.name: re.sub(r" \('.*?'\)", "", str(field.type)).replace("element: ", "item: ") for field in table.schema}


Rows = list[dict[str, Any]]
