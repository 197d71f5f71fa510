"""Records of snapshots: which are kept, and what several servers know of them."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from penstock.spec import Spec
from penstock_server import files as sealed
from penstock_server.catalog.history import History, drop_old_notes, write_note
from support.corpora import write_numbered, write_shard
from support.engine import Opener, open_snapshot


def test_records_are_dropped_by_last_request(folder: Path, tmp_path: Path) -> None:
    history, made = History(tmp_path / "notes"), []
    for number in range(20):
        write_shard(folder, 9, number)
        made.append(open_snapshot(folder))
        history.add(made[-1])
        if number < 3:
            time.sleep(0.01)  # dates of files are of some milliseconds
            history.touch(made[-1].fingerprint)
    names = [snapshot.fingerprint for snapshot in made]
    assert [record.fingerprint for record in history.records()] == [*names[:5:-1], *names[2::-1]]
    assert [record.fingerprint for record in History(tmp_path / "notes").records()] == [*names[:5:-1], *names[2::-1]]


def test_last_record_is_the_latest_when_the_clock_was_set_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, now = [], time.time_ns()
    for number, hours in enumerate((0, -1, -2)):
        monkeypatch.setattr(time, "time_ns", lambda hours=hours: now + hours * 3_600_000_000_000)
        write_shard(folder, 9, number)
        made.append(open_snapshot(folder).fingerprint)
        History(tmp_path / "notes").add(open_snapshot(folder))
    assert [record.fingerprint for record in History(tmp_path / "notes").records()] == made[::-1]


@pytest.mark.parametrize("content", [{"some": "map"}, (), 7, None])
def test_note_of_another_kind_is_ignored(folder: Path, tmp_path: Path, content: object) -> None:
    """As where a backup was put back under other names."""
    history = History(tmp_path / "notes")
    history.add(open_snapshot(folder))
    [known] = history.records()
    [path] = (tmp_path / "notes").iterdir()
    write_note(path.with_name(f"other{path.suffix}"), content)
    assert History(tmp_path / "notes").records() == [known]


def test_notes_of_a_server_in_use_are_not_dropped(folder: Path, open_all: Opener, tmp_path: Path) -> None:
    catalog = open_all()
    [notes] = (tmp_path / "cache" / "notes").iterdir()
    os.utime(notes, (1, 1))
    catalog.plan("d", Spec(batch_size=1))
    drop_old_notes(tmp_path / "cache", time.time())
    assert notes.exists()


def test_damaged_record_is_ignored(folder: Path, open_all: Opener, tmp_path: Path) -> None:
    open_all()
    write_shard(folder, 1, 0)
    latest = open_all()["d"].latest.snapshot.fingerprint
    [older] = [p for p in (tmp_path / "cache" / "notes").glob("*/*.snapshot") if p.stem != latest]
    older.write_bytes(older.read_bytes()[:-1])
    assert [record.fingerprint for record in open_all()["d"].snapshots] == [latest]


def test_records_of_another_server_are_seen(folder: Path, tmp_path: Path) -> None:
    mine, others = History(tmp_path / "notes"), History(tmp_path / "notes")
    made = [open_snapshot(folder)]
    for number in range(19):
        write_shard(folder, 9, number)
        made.append(open_snapshot(folder))
        mine.add(made[-1])
        assert others.records() == mine.records()
    assert len(others.records()) == 17
    mine.add(made[-2])
    assert others.records() == mine.records()
    assert others.records()[0].fingerprint == made[-2].fingerprint


def test_older_snapshot_is_known_after_months(data: Path, tmp_path: Path, open_all: Opener) -> None:
    folder = write_numbered(data / "ids", 30)
    older = open_all()["ids"].latest.snapshot.fingerprint
    (write_numbered(tmp_path / "more", 3, num_shards=1) / "part-000.parquet").rename(folder / "part-900.parquet")
    assert open_all()["ids"].latest.snapshot.fingerprint != older
    for notes in (tmp_path / "cache" / "notes").iterdir():
        os.utime(notes, (1, 1))
    assert open_all()["ids"].find(older).snapshot.num_rows == 30


def test_latest_record_is_first_when_its_old_note_cannot_be_rewritten(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, others, made = History(tmp_path / "notes"), History(tmp_path / "notes"), []
    for number in range(3):
        write_shard(folder, 9, number)
        made.append(open_snapshot(folder))
    first, second, third = (snapshot.fingerprint for snapshot in made)
    mine.add(made[0])
    mine.add(made[1])
    with monkeypatch.context() as patch:
        patch.setattr(sealed, "write_with_seal", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        mine.add(made[0])
        assert [record.fingerprint for record in mine.records()] == [first, second]
    others.add(made[2])
    assert [record.fingerprint for record in mine.records()] == [third, first, second]
    others.add(made[0])  # the note on disk is now the newer record
    assert [record.fingerprint for record in mine.records()] == [first, third, second]


def test_running_job_keeps_its_snapshot_when_another_job_requests_each_new_one(
    folder: Path, open_all: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, now = open_all(), time.monotonic()
    snapshot = catalog.plan("d", Spec(batch_size=1)).snapshot
    for minutes in range(20):
        monkeypatch.setattr(time, "monotonic", lambda minutes=minutes: now + minutes * 60.0)
        write_shard(folder, 100 + minutes, 0)
        catalog.refresh("d")
        catalog.plan("d", Spec(batch_size=1))
        assert catalog.plan("d", Spec(batch_size=1, snapshot=snapshot)).snapshot == snapshot


def test_record_is_read_again_when_its_file_could_not_be_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    History(tmp_path / "notes").add(open_snapshot(folder))
    history = History(tmp_path / "notes")
    with monkeypatch.context() as patch:
        patch.setattr(sealed, "_is_sealed", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        assert history.records() == []
    assert [record.fingerprint for record in history.records()] == [open_snapshot(folder).fingerprint]
