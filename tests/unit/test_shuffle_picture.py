"""The picture of a shuffle report: drawn for every grade and every name, by any number of threads."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

from penstock_server.shuffle_report.picture import DOTS_PER_INCH, INCHES, draw_png
from penstock_server.shuffle_report.report import report
from synthetic import Geometry, synthetic_plan

SIZE = tuple(round(inches * DOTS_PER_INCH) for inches in INCHES)
ROWS: Geometry = [[100] * 5] * 12


def size_of(png: bytes) -> tuple[int, ...]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def colours_of(png: bytes) -> int:
    """How many different bytes the picture's pixels are made of."""
    pixels, at = b"", 8
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        pixels += png[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += length + 12
    return len(np.unique(np.frombuffer(zlib.decompress(pixels), np.uint8)))


@pytest.mark.parametrize(
    ("datasets", "spec"),
    [
        ({"a": ROWS}, {"shuffle": "none"}),
        ({"a": ROWS}, {"window": 500, "world_size": 3}),
        ({"a": ROWS}, {"shuffle": "global"}),
        ({"a": [[3]]}, {"batch_size": 1}),
        ({"a": [[1]]}, {"batch_size": 1}),
        ({"$x_{1}^$": ROWS, "b": [[10]] * 3, "q" * 200: [[20, 20]]}, {"mix": f"$x_{{1}}^$:90,b:9,{'q' * 200}:1"}),
    ],
)
def test_every_report_has_a_picture(tmp_path: Path, datasets: dict[str, Geometry], spec: dict[str, Any]) -> None:
    png = draw_png(report(synthetic_plan(tmp_path, datasets, **spec), 0))
    assert size_of(png) == SIZE
    assert colours_of(png) > 50


def test_threads_draw_the_same_picture_as_one_alone(tmp_path: Path) -> None:
    reports = [report(synthetic_plan(tmp_path, {"a": ROWS}, shuffle=shuffle), 0) for shuffle in ("none", "global")] * 2
    alone = [draw_png(found) for found in reports[:2]] * 2
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(draw_png, reports)) == alone


def test_the_picture_is_the_same_whatever_the_user_has_set(tmp_path: Path) -> None:
    found = report(synthetic_plan(tmp_path, {"\U0001f600": ROWS}), 0)
    with warnings.catch_warnings(action="error"):
        expected = draw_png(found)
        with matplotlib.rc_context({"text.usetex": True, "font.size": 30}):
            assert draw_png(found) == expected


def test_a_server_that_a_notebook_started_draws_without_its_backend(tmp_path: Path) -> None:
    program = "from penstock_server.shuffle_report.picture import draw_png; draw_png(None)"
    environment = os.environ | {"MPLBACKEND": "module://there_is_none"}
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, env=environment)
    assert "there_is_none" not in done.stderr
    assert "'NoneType' object has no attribute" in done.stderr  # as far as the report


def test_a_server_that_draws_nothing_loads_no_library_for_it() -> None:
    program = "import sys, penstock_server.app; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
