"""The folder that the processes of one server share."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from penstock_server.monitoring.place import shared_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


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
