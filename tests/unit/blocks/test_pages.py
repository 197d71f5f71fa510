"""Headers of pages: sizes are found, and headers of an attacker are refused in little time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock_server.blocks.pages import pages

EMPTY_PAGE = bytes.fromhex("1500 1500 1500 00".replace(" ", ""))  # type, size and stored size are 0


def pages_of(content: bytes, num_values: int = 100) -> Any:
    chunk: Any = SimpleNamespace(
        data_page_offset=0,
        dictionary_page_offset=None,
        total_compressed_size=len(content),
        num_values=num_values,
        path_in_schema="tokens",
    )
    return list(pages(pa.BufferReader(content), chunk))


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_pages_of_a_file_are_found(tmp_path: Path, version: Any) -> None:
    values = pa.array(np.arange(20_000) % 500)
    pq.write_table(pa.table({"n": values}), tmp_path / "a.parquet", data_page_size=2000, data_page_version=version)
    with pa.OSFile(str(tmp_path / "a.parquet")) as file:
        chunk = pq.read_metadata(tmp_path / "a.parquet").row_group(0).column(0)
        dictionary, *others = pages(file, chunk)
    assert dictionary == (True, 4000, dictionary.stored_bytes)
    assert len(others) > 5
    assert not any(page.is_dictionary for page in others)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x15" + b"\xff" * (17 << 20), "an integer of more than 64 bits"),  # took hours, since each byte copied all before it
        (b"\x19" * 5000, "nested too deeply"),  # lists: a RecursionError before
        (b"\x1c" * 5000, "nested too deeply"),  # structs
        (b"\x19\xf1" + b"\xff" * 8 + b"\x7f" + bytes(1 << 20), "longer than 16,777,216 bytes"),
        (EMPTY_PAGE * 1000, "column tokens has more pages than values"),
        (b"\x00", "states no sizes"),
    ],
)
def test_absurd_header_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        pages_of(content)


def test_empty_pages_are_read() -> None:
    assert len(pages_of(EMPTY_PAGE * 100)) == 100
