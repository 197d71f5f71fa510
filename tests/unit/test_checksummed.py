from __future__ import annotations

import os
import time
from collections.abc import Iterator
from errno import EIO
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from damage import damaged
from penstock_server import checksummed as sealed
from penstock_server.checksummed import Damaged, Sound, map_sealed, read_sealed, write_sealed
from penstock_server.logs import Seldom

OTHERWISE = "it is made again after a restart"


@given(st.lists(st.binary(max_size=40), max_size=4), st.data())
def test_what_was_written_is_read_back_and_no_damage_to_it_goes_unnoticed(pieces: list[bytes], data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "some"
        write_sealed(path, iter(pieces), OTHERWISE)
        assert read_sealed(path, bytes) == b"".join(pieces)
        path.write_bytes(data.draw(damaged(path.read_bytes())))
        assert read_sealed(path, bytes) is None
        with pytest.raises(Damaged, match=r"some is damaged and will be made again"):
            map_sealed(path)


def test_damage_is_logged_and_so_is_what_does_not_parse_and_what_is_not_there_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "some"
    assert read_sealed(path, bytes) is None
    assert caplog.text == ""
    write_sealed(path, [b"abc"], OTHERWISE)
    assert read_sealed(path, lambda _: None) is None
    path.write_bytes(b"")
    assert read_sealed(path, bytes) is None
    assert [record.getMessage() for record in caplog.records] == [f"{path} is damaged and will be made again"] * 2


def test_a_file_that_cannot_be_mapped_is_not_called_damaged_and_is_told_of_once_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now = tmp_path / "some", [1000.0]
    path.mkdir()
    monkeypatch.setattr(sealed, "_telling_unread", Seldom())
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for num_told in (1, 2):
        assert [read_sealed(path, bytes) for _ in range(5)] == [None] * 5
        assert caplog.text.count("some cannot be read") == num_told
        now[0] += 60.0


def test_a_map_outlives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "some"
    write_sealed(path, [b"first"], OTHERWISE)
    held = map_sealed(path)
    write_sealed(path, [b"other"], OTHERWISE)
    path.unlink()
    assert bytes(held or b"") == b"first"


def test_what_is_known_to_be_sound_is_not_read_again_and_what_comes_in_its_place_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "some", tmp_path / "other"
    sound, read = Sound(most=2), Mock(side_effect=sealed._is_sealed)
    monkeypatch.setattr(sealed, "_is_sealed", read)
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


def test_a_file_under_the_name_of_another_is_damaged(tmp_path: Path) -> None:
    write_sealed(tmp_path / "some", [b"first"], OTHERWISE)
    (tmp_path / "some").rename(tmp_path / "other")
    assert read_sealed(tmp_path / "other", bytes) is None


def test_what_is_known_is_looked_at_again_once_somebody_says_that_it_changed(tmp_path: Path) -> None:
    path, sound = tmp_path / "some", Sound(most=9)
    write_sealed(path, [b"first"], OTHERWISE)
    map_sealed(path, sound)
    sound.forget(path)
    path.write_bytes(path.read_bytes().replace(b"first", b"third"))  # in place: the inode stays
    with pytest.raises(Damaged):
        map_sealed(path, sound)


def test_a_file_that_is_renamed_or_cut_is_not_the_one_that_was_sound(tmp_path: Path) -> None:
    path, sound = tmp_path / "some", Sound(most=9)
    write_sealed(path, [b"first"], OTHERWISE)
    map_sealed(path, sound)
    other = path.rename(tmp_path / "other")
    with pytest.raises(Damaged):
        map_sealed(other, sound)
    other.rename(path)
    os.truncate(path, 9)
    with pytest.raises(Damaged):
        map_sealed(path, sound)
    path.unlink()
    sound.forget(path)  # what is gone already, too


def test_no_more_files_are_known_than_may_be(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(9)]
    sound = Sound(most=4)
    for path in paths:
        write_sealed(path, [b"content"], OTHERWISE)
        map_sealed(path, sound)
    assert sum(sound.has(path, path.stat()) for path in paths) == 4
    assert sound.has(paths[-1], paths[-1].stat())


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_disk_that_fails_is_told_and_what_is_on_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_sealed(tmp_path / "some", [b"first"], OTHERWISE)
    monkeypatch.setattr(sealed, "_telling_unread", Seldom())
    monkeypatch.setattr(sealed, "_is_sealed", Mock(side_effect=OSError(EIO, "Input/output error")))
    assert map_sealed(tmp_path / "some") is None
    assert "some cannot be read: [Errno 5] Input/output error" in caplog.text


def test_a_file_that_is_replaced_while_it_is_mapped_is_not_taken_for_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other, real = tmp_path / "some", tmp_path / "sub" / "some", pa.memory_map
    other.parent.mkdir()
    write_sealed(path, [b"first"], OTHERWISE)
    write_sealed(other, [b"other"], OTHERWISE)

    def map_late(name: bytes) -> pa.MemoryMappedFile:
        if other.exists():
            other.replace(path)
        return real(name)

    monkeypatch.setattr(pa, "memory_map", map_late)
    assert map_sealed(path) is None
    assert bytes(map_sealed(path) or b"") == b"other"
