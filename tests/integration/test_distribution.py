"""The wheel and the sdist: each installs into a clean environment, and every command starts there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from support.servers import ROOT

pytest.importorskip("hatchling", reason="hatchling, which builds the distributions, is not installed")


def run(*command: str | Path) -> str:
    """The output of a command that does not see the sources through the environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "--directory", folder)
    return folder


@pytest.mark.parametrize("pattern", ["*.whl", "*.tar.gz"])
def test_distribution_installs_and_every_command_starts(distributions: Path, tmp_path: Path, pattern: str) -> None:
    [distribution] = distributions.glob(pattern)
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # What the package depends on, without the package itself: an editable install is a .pth file, which is not followed here.
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("-packages")))
    offline = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *offline, distribution)
    for package in ("penstock", "penstock_server"):
        assert Path(run(python, "-c", f"import {package}; print({package}.__file__)").strip()).is_relative_to(packages)

    penstock = tmp_path / "venv" / "bin" / "penstock"
    commands = re.findall(r"^    (\w+) ", run(penstock, "--help"), re.MULTILINE)
    assert {"serve", "import", "peek", "audit"} <= {*commands}
    for command in commands:
        assert f"usage: penstock {command} " in run(penstock, command, "--help")
    files = _files(packages / "penstock_server/page/files")
    assert files == _files(ROOT / "server/penstock_server/page/files")
    assert {"index.html", "vendor/preact.LICENSE.txt", "vendor/htm.LICENSE.txt", "vendor/uPlot.LICENSE.txt"} <= files
    [installed] = packages.glob("penstock-*.dist-info")
    assert "License-Expression: Apache-2.0" in (installed / "METADATA").read_text()
    assert (installed / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
