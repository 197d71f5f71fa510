"""Stdout of commands."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_non_blocking_pipe_that_is_full_for_a_moment_loses_no_line(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    code = """
from penstock.cli.output import prepare_streams, report
prepare_streams()
for n in range(2000): report(f"{n} " + "x" * 100)
"""
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with (
        subprocess.Popen([sys.executable, "-c", code], stdout=writer, env=environment) as process,
        os.fdopen(reader) as lines,
    ):
        os.close(writer)
        time.sleep(0.5)  # the pipe holds 64 KiB, of some 200 in all
        assert [line.split()[0] for line in lines] == [*map(str, range(2000))]
    assert process.returncode == 0
