"""Whether files are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock_server.files import may_be_there

THERE = {
    "file": True,
    "folder": True,
    "link to nothing": True,
    "link to itself/x": True,  # nobody can tell, here and in the next
    "x" * 300: True,
    "none": False,
    "file/x": False,
    "folder/none/x": False,
    "a\0b": False,
}


@pytest.mark.parametrize("name", THERE)
def test_may_be_there_is_false_only_for_missing_paths(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link to nothing").symlink_to("none")
    (tmp_path / "link to itself").symlink_to("link to itself")
    assert may_be_there(tmp_path / name) == THERE[name]
