"""Imports into folders, read back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock_server.importing.rows import Kind
from penstock_server.importing.run import Import
from penstock_server.importing.shards import Shape
from penstock_server.importing.token_files import Documents


def shards_in(folder: Path) -> list[Path]:
    """The shards in the order in which the server reads them."""
    return sorted(folder.glob("*.parquet"))


def read_back(folder: Path) -> pa.Table:
    """The rows of all shards, which have one schema."""
    tables = [pq.read_table(path) for path in shards_in(folder)]
    assert all(table.schema == tables[0].schema for table in tables)
    return pa.concat_tables(tables)


def imported(
    out_dir: Path,
    *files: Path,
    columns: Sequence[str] | None = None,
    text: Sequence[str] = (),
    delimiter: str | None = None,
    quoting: Kind = "doubled",
    documents: Documents | None = None,
    shape: Shape | None = None,
    overwrite: bool = False,
) -> pa.Table:
    """What an import of the files wrote."""
    shape = shape or Shape()
    Import(
        files=files,
        out_dir=out_dir,
        columns=columns,
        text=text,
        delimiter=delimiter,
        quoting=quoting,
        documents=documents or Documents(),
        shape=shape,
        overwrite=overwrite,
    ).run()
    return read_back(out_dir)


def types_of(table: pa.Table) -> dict[str, str]:
    """The columns' types as pyarrow prints them, without the names that Parquet gives to items."""
    return {field.name: re.sub(r" \('.*?'\)", "", str(field.type)).replace("element: ", "item: ") for field in table.schema}


Rows = list[dict[str, Any]]
