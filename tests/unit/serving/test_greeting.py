"""Greeting of a server: the addresses and datasets that it prints at start."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.serving.server import greeting
from penstock_server.settings import Settings
from support.corpora import write_numbered
from support.engine import Opener


@pytest.fixture
def open_all(tmp_path: Path, data: Path) -> Opener:
    return lambda: open_catalog(data, None, BlockStore(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("host", "told"),
    [("0.0.0.0", "localhost"), ("127.0.0.1", "localhost"), ("::", "[::1]"), ("::1", "[::1]"), ("fd00::7", "[fd00::7]")],
)
def test_greeting_names_an_address_that_leads_to_the_server(data: Path, open_all: Opener, host: str, told: str) -> None:
    write_numbered(data / "numbers", 3)
    settings = Settings.read({"data_dir": str(data)}, {})
    text = greeting(open_all(), settings, Mock(**{"getsockname.return_value": (host, 8000)}))
    assert set(re.findall(r"http://[^/\s]+", text)) == {f"http://{told}:8000"}


@pytest.mark.parametrize(
    ("published", "told"),
    [("127.0.0.1:9000", "localhost:9000"), ("192.0.2.7:8000", "192.0.2.7:8000"), ("[fd00::7]:80", "[fd00::7]:80")],
)
def test_greeting_names_the_published_address(data: Path, open_all: Opener, published: str, told: str) -> None:
    write_numbered(data / "numbers", 3)
    settings = Settings.read({"data_dir": str(data)}, {"PENSTOCK_PUBLISHED": published})
    text = greeting(open_all(), settings, Mock(**{"getsockname.return_value": ("0.0.0.0", 8000)}))
    assert set(re.findall(r"http://[^/\s]+", text)) == {f"http://{told}"}
