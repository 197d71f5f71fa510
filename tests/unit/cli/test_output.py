"""Stdout of commands."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import NoReturn

import pytest

from penstock_server import cli
from penstock_server.importing.run import Import
from penstock_server.settings import Settings


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


def _break_pipe(*_: object) -> NoReturn:
    raise BrokenPipeError


@pytest.mark.parametrize("arguments", [["serve", "data"], ["prepare", "data"], ["import", "a.csv", "data"]])
def test_command_fails_when_a_pipe_other_than_stdout_breaks(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(Settings, "read", _break_pipe)
    monkeypatch.setattr(Import, "run", _break_pipe)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(os, "environ", {**os.environ})  # commands of the server change it
    parser = argparse.ArgumentParser(prog="penstock")
    cli.add_commands(parser.add_subparsers())
    chosen = parser.parse_args(arguments)
    with pytest.raises(BrokenPipeError):
        chosen.run(chosen)
