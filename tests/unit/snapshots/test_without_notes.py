"""Older snapshots of which nothing is noted."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from growing import write_shard
from penstock.spec import Spec
from penstock_server.catalog import history as history_module
from penstock_server.catalog.catalog import Catalog
from penstock_server.catalog.history import History, Record
from penstock_server.problems import DatasetInvalid, SnapshotGone
from penstock_server.snapshots.folders import Survey, survey
from planned import open_snapshot


def listed(catalog: Catalog) -> list[str]:
    return [record.fingerprint for record in catalog["d"].held.snapshots]


def test_a_cache_folder_that_lost_its_notes_costs_only_what_a_restart_would_need(
    folder: Path, open_all: Callable[[], Catalog], tmp_path: Path
) -> None:
    catalog = open_all()
    first = catalog["d"].latest.snapshot.fingerprint
    for path in (tmp_path / "cache" / "notes").glob("*/*"):
        path.unlink()
    write_shard(folder, 1, 0)
    catalog.refresh("d")
    assert [record.fingerprint for record in catalog["d"].held.snapshots][1:] == [first]


@pytest.mark.parametrize("brings_its_date", [False, True])
def test_without_notes_an_older_snapshot_is_what_was_there_before_the_newest_shards(
    folder: Path, open_all: Callable[[], Catalog], tmp_path: Path, brings_its_date: bool
) -> None:
    snapshots = [open_all()["d"].latest.snapshot.fingerprint]
    for number in (5, 1, 7):  # wherever they stand among the others
        write_shard(folder, number, 1)
        if brings_its_date:  # as from an archive that is older than all
            os.utime(folder / f"part-{number}.parquet", (1_000_000 - number, 1_000_000 - number))
        snapshots.append(open_all()["d"].latest.snapshot.fingerprint)
    shutil.rmtree(tmp_path / "cache")
    catalog = open_all()
    for number, fingerprint in enumerate(snapshots, start=1):
        assert catalog["d"].served(fingerprint).snapshot.fingerprint == fingerprint
        assert catalog.plan("d", Spec(batch_size=3, snapshot=fingerprint)).schedule.num_steps == number
    with pytest.raises(SnapshotGone, match="is not on this server"):
        catalog["d"].served("0123456789abcdef")


def test_what_is_found_without_a_note_is_known_from_then_on(
    grown: Spec, open_all: Callable[[], Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = open_all()
    latest = catalog["d"].latest.snapshot.fingerprint
    assert catalog.may_block("d", grown)
    planned = catalog.plan("d", grown).members[0].planned
    looks, records = [], History.records

    def look(history: History) -> list[Record]:
        looks.append(history)
        return records(history)

    with monkeypatch.context() as patch:
        patch.setattr(History, "records", look)
        assert catalog.plan("d", grown).members[0].planned is planned
    assert not looks
    assert not catalog.may_block("d", grown)
    for server in (catalog, open_all()):  # the other one reads the notes
        assert listed(server) == [latest, grown.snapshot]
        assert not server.may_block("d", grown)
        assert server.plan("d", Spec(batch_size=1)).snapshot == latest


def test_what_was_found_without_a_note_does_not_wait_for_a_look_at_new_data(
    grown: Spec, open_all: Callable[[], Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, planned = open_all(), []
    catalog.plan("d", grown)

    def look(data_dir: Path) -> Survey:
        planned.append(catalog.plan("d", grown).snapshot)
        return survey(data_dir)

    monkeypatch.setattr("penstock_server.catalog.catalog.survey", look)
    monkeypatch.setattr("penstock_server.catalog.catalog._CATCH_UP_SECONDS", 0)
    catalog.refresh("d")
    assert planned == [grown.snapshot]


def test_what_was_found_without_a_note_is_not_made_anew_when_a_shard_comes(
    grown: Spec, folder: Path, open_all: Callable[[], Catalog]
) -> None:
    catalog = open_all()
    planned = catalog.plan("d", grown).members[0].planned
    write_shard(folder, 2, 0)
    catalog.refresh("d")
    assert catalog.plan("d", grown).members[0].planned is planned


def test_what_was_found_without_a_note_keeps_its_recipe(grown: Spec, folder: Path, open_all: Callable[[], Catalog]) -> None:
    catalog = open_all()
    catalog.plan("d", grown)
    (folder / "penstock.toml").write_text("eos = 77")
    catalog.refresh("d")
    assert catalog.plan("d", grown).members[0].snapshot.recipe.eos_id is None
    with pytest.raises(
        SnapshotGone, match="the recipe, or the server's version, was changed"
    ):  # a server that never knew that recipe
        open_all().plan("d", grown)


def test_a_snapshot_is_found_without_a_note_also_while_the_folder_cannot_be_opened(
    grown: Spec, folder: Path, open_all: Callable[[], Catalog]
) -> None:
    (folder / "part-3.parquet").write_bytes(b"half of a")
    write_shard(folder.parent, 0, 0)  # something has to be served
    catalog = open_all()
    planned = catalog.plan("d", grown).members[0].planned
    with pytest.raises(DatasetInvalid):
        catalog.refresh("d")
    assert catalog.plan("d", grown).members[0].planned is planned
    other = open_all()
    assert listed(other) == [grown.snapshot]
    with pytest.raises(DatasetInvalid):  # what was found is not the latest, even where nothing else is noted
        other.plan("d", Spec(batch_size=1))
    (folder / "part-3.parquet").unlink()
    latest = catalog.refresh("d").snapshot
    assert other.refresh("d").snapshot == latest
    assert listed(catalog) == listed(other) == [latest, grown.snapshot]


def test_what_was_found_without_a_note_is_kept_like_what_was_asked_for_last(
    grown: Spec, folder: Path, open_all: Callable[[], Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "_KEPT", 2)
    catalog = open_all()
    for number in (2, 3):
        catalog.plan("d", Spec(batch_size=1, snapshot=catalog["d"].latest.snapshot.fingerprint))
        time.sleep(0.01)  # dates of files are of some milliseconds
        write_shard(folder, number, 0)
        catalog.refresh("d")
    [latest, second, _] = listed(catalog)
    catalog.plan("d", grown)
    assert listed(open_all()) == [latest, second, grown.snapshot]
    for number in (4, 5):  # nobody asks for these
        write_shard(folder, number, 0)
        catalog.refresh("d")
    assert listed(open_all()) == [catalog["d"].latest.snapshot.fingerprint, second, grown.snapshot]


def test_a_snapshot_of_which_only_its_shards_are_known_becomes_the_latest_only_where_it_is(
    folder: Path, tmp_path: Path
) -> None:
    history, snapshot = History(tmp_path / "notes"), open_snapshot(folder)
    history.recall(snapshot)
    assert history.latest() is None
    assert History(tmp_path / "notes").latest() is None
    history.add(snapshot)
    made = history.latest()
    assert made is not None
    assert history.recall(snapshot) == made == History(tmp_path / "notes").latest()
