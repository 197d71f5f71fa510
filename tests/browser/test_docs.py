"""The documentation page in a real browser: FastAPI and the bundled Swagger UI must agree on what they speak."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.corpora import write_numbered
from support.servers import Serve

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ["--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")
def test_docs_page_lists_every_url_with_its_parameters(serve: Serve, tmp_path: Path) -> None:
    write_numbered(tmp_path / "data" / "numbers", 9)
    server = serve(tmp_path / "data")
    flags = [*QUIET, "--no-sandbox"] if os.geteuid() == 0 else QUIET
    page = subprocess.run(
        [str(CHROMIUM), "--headless", *flags, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000",
         "--dump-dom", f"{server.url}/docs"],
        capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip
    assert "Unable to render" not in page
    for path in server.json("/openapi.json")["paths"]:
        assert f'data-path="{path}"' in page
