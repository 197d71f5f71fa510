"""A folder for data."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.corpora import write_tokenizer


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "data").mkdir()
    return tmp_path / "data"
