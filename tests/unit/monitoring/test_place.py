"""The folder that the processes of one server share."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from penstock_server.monitoring.place import shared_folder
from penstock_server.settings import SettingsError


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_unwritable_temporary_folder_is_named(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
    with pytest.raises(SettingsError, match=r"No such file or directory: .*missing.*Set TMPDIR to a folder"), shared_folder():
        pass


def test_files_of_metrics_have_no_holes(tmp_path: Path) -> None:
    """A full disk under a hole of a mapped file ends the process."""
    code = """
import sys
from pathlib import Path
from penstock_server.monitoring.metrics import Metrics, share_values

share_values(Path(sys.argv[1]), 0)
Metrics().make_seconds.labels("wiki").observe(1.0)
"""
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)  # it changes prometheus_client for a whole process
    files = [*tmp_path.glob("*.db")]
    assert {file.name for file in files} == {"counter_0.db", "histogram_0.db"}
    for file in files:
        assert 512 * file.stat().st_blocks >= file.stat().st_size


def test_folder_of_a_killed_server_is_removed_and_no_other(temporary: Path) -> None:
    killed, users = temporary / "penstock-server-killed", temporary / "penstock-server-data"
    for folder in (killed, users):
        folder.mkdir()
        (folder / "part-000.parquet").touch()
    (killed / "server.lock").touch()

    with shared_folder() as folder:
        assert {*temporary.iterdir()} == {folder, users}
        with shared_folder() as another:
            assert {*temporary.iterdir()} == {folder, another, users}
    assert [*temporary.iterdir()] == [users]
