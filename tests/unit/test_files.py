"""Files that users name, and sealed files: whole or absent, damage is noticed, and failed writes leave nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from errno import EIO, ESTALE
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_server import files
from penstock_server.files import Damaged, identity_of, map_sealed, may_exist, read_sealed, write_sealed
from support.corpora import damaged

OTHERWISE = "it is made again after a restart"


@given(st.lists(st.binary(max_size=40), max_size=4), st.data())
def test_written_bytes_are_read_back_and_any_damage_is_noticed(pieces: list[bytes], data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "some"
        write_sealed(path, iter(pieces), OTHERWISE)
        assert read_sealed(path, bytes) == b"".join(pieces)
        path.write_bytes(data.draw(damaged(path.read_bytes())))
        assert read_sealed(path, bytes) is None
        with pytest.raises(Damaged, match="some is damaged"):
            map_sealed(path)


def test_reading_logs_damage_and_unexpected_content_and_not_a_missing_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "some"
    assert read_sealed(path, bytes) is None
    assert caplog.text == ""
    write_sealed(path, [b"abc"], OTHERWISE)
    assert read_sealed(path, lambda _: None) is None
    path.rename(tmp_path / "other")
    assert read_sealed(tmp_path / "other", bytes) is None  # another name
    path.write_bytes(b"")
    assert read_sealed(path, bytes) is None
    names = ("some", "other", "some")
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / name} is damaged and will be made again" for name in names
    ]


def test_failing_disk_is_logged_and_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "some"
    write_sealed(path, [b"first"], OTHERWISE)
    monkeypatch.setattr(files, "_is_sealed", Mock(side_effect=OSError(EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        map_sealed(path)
    assert read_sealed(path, bytes) is None
    assert "some cannot be read: [Errno 5]" in caplog.text


def test_map_outlives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "some"
    write_sealed(path, [b"first"], OTHERWISE)
    content = map_sealed(path)
    write_sealed(path, [b"other"], OTHERWISE)
    path.unlink()
    assert bytes(content or b"") == b"first"


def test_sound_file_is_not_read_again_until_it_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "some", tmp_path / "other"
    sound, read = set[int](), Mock(side_effect=files._is_sealed)
    monkeypatch.setattr(files, "_is_sealed", read)
    write_sealed(path, [b"first"], OTHERWISE)
    write_sealed(other, [b"elsewhere"], OTHERWISE)
    assert [bytes(map_sealed(each, sound) or b"") for each in (path, other, path, other)] == [b"first", b"elsewhere"] * 2
    assert read.call_count == 2
    write_sealed(path, [b"third"], OTHERWISE)
    assert bytes(map_sealed(path, sound) or b"") == b"third"
    other.replace(path)
    with pytest.raises(Damaged):
        map_sealed(path, sound)
    assert read.call_count == 4


@pytest.mark.parametrize("change", ["forgotten", "renamed", "cut"])
def test_sound_file_is_read_again_after_a_change(tmp_path: Path, change: str) -> None:
    path, sound = tmp_path / "some", set[int]()
    write_sealed(path, [b"first"], OTHERWISE)
    map_sealed(path, sound)
    if change == "forgotten":
        sound.discard(identity_of(path))
        path.write_bytes(path.read_bytes().replace(b"first", b"third"))  # in place: the inode stays
    elif change == "renamed":
        path = path.rename(tmp_path / "other")
    else:
        os.truncate(path, 9)
    with pytest.raises(Damaged):
        map_sealed(path, sound)


def test_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def failing(error: Exception) -> Iterator[bytes]:
        yield b"new"
        assert len(list(tmp_path.iterdir())) == 2
        raise error

    path = tmp_path / "some"
    write_sealed(path, [b"old"], OTHERWISE)
    write_sealed(path, failing(OSError("no space left")), OTHERWISE)
    assert f"{path} cannot be stored: no space left; {OTHERWISE}" in caplog.text
    with pytest.raises(ZeroDivisionError):
        write_sealed(path, failing(ZeroDivisionError()), OTHERWISE)
    assert [file.name for file in tmp_path.iterdir()] == ["some"]
    assert read_sealed(path, bytes) == b"old"


def test_mapped_file_is_unchanged_when_it_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other, real = tmp_path / "some", tmp_path / "sub" / "some", pa.memory_map
    other.parent.mkdir()
    write_sealed(path, [b"first"], OTHERWISE)
    write_sealed(other, [b"other"], OTHERWISE)

    def map_late(name: bytes) -> pa.MemoryMappedFile:
        if other.exists():
            other.replace(path)
        return real(name)

    monkeypatch.setattr(pa, "memory_map", map_late)
    with pytest.raises(OSError, match="replaced") as caught:
        map_sealed(path)
    assert caught.value.errno == ESTALE
    assert bytes(map_sealed(path) or b"") == b"other"


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
def test_path_may_exist_is_false_only_for_missing_paths(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link to nothing").symlink_to("none")
    (tmp_path / "link to itself").symlink_to("link to itself")
    assert may_exist(tmp_path / name) == THERE[name]
