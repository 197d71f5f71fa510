"""Snapshots that are served while their shards are there, and only then."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from growing import write_shard
from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog import dataset as dataset_module
from penstock_server.catalog import history as history_module
from penstock_server.catalog.catalog import Catalog, open_catalog
from penstock_server.catalog.describe import describe_dataset
from penstock_server.catalog.history import History
from penstock_server.catalog.notes import drop_old_notes, write_note
from penstock_server.catalog.reading import Reading, read_folder
from penstock_server.catalog.scan import look
from penstock_server.problems import DatasetInvalid, SnapshotGone
from planned import open_snapshot

ACTIONS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 2), st.integers(0, 1)),
    st.tuples(st.just("remove"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("restart"), st.just(0), st.just(0)),
)


@settings(max_examples=25)
@given(st.lists(ACTIONS, min_size=1, max_size=9))
def test_a_snapshot_is_served_byte_for_byte_while_its_shards_are_there_and_only_then(
    actions: list[tuple[str, int, int]],
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder, cache = Path(temporary) / "data" / "d", Path(temporary) / "cache"
        folder.mkdir(parents=True)
        there = {9: 0}
        write_shard(folder, 9, 0)
        client = TestClient(create_app(open_catalog(folder.parent, None, BlockStore(CacheFolder(cache))), InFlight(1 << 30)))
        known: dict[str, tuple[dict[int, int], bytes]] = {}
        for what, number, variant in [("write", 9, 0), *actions]:
            if what == "write":
                write_shard(folder, number, variant)
                there[number] = variant
            elif what == "remove":
                (folder / f"part-{number}.parquet").unlink(missing_ok=True)
                there.pop(number, None)
            else:
                client = TestClient(
                    create_app(open_catalog(folder.parent, None, BlockStore(CacheFolder(cache))), InFlight(1 << 30))
                )
            latest = client.post("/v1/datasets/d/refresh").json()["snapshot"]
            epoch = "/v1/datasets/d/epochs/0/ranks/0/batches?batch_size=1&seq_len=4&shuffle=none&snapshot="
            answer = client.get(epoch + latest)
            assert answer.status_code == 200
            known.setdefault(latest, (dict(there), answer.content))
            for snapshot, (shards, content) in known.items():
                answer = client.get(epoch + snapshot)
                if shards.items() <= there.items():
                    assert (answer.status_code, answer.content) == (200, content)
                else:
                    changed = min(n for n, variant in shards.items() if there.get(n) != variant)
                    assert answer.status_code == 409
                    assert f"part-{changed}.parquet was" in answer.json()["detail"]
            held = [entry["snapshot"] for entry in client.get("/v1/datasets/d").json()["snapshots"]]
            assert held[0] == latest
            assert sorted(held) == sorted(s for s, (shards, _) in known.items() if shards.items() <= there.items())


def test_a_plan_keeps_what_it_began_with(folder: Path, open_all: Callable[[], Catalog]) -> None:
    catalog = open_all()
    before = catalog["d"].latest
    write_shard(folder, 1, 0)
    catalog.refresh("d")
    assert before.snapshot.num_rows == 3
    assert catalog["d"].latest.snapshot.num_rows == 6
    assert catalog["d"].held.snapshots[1].fingerprint == before.snapshot.fingerprint


def test_what_is_unchanged_is_not_made_anew(folder: Path, open_all: Callable[[], Catalog]) -> None:
    catalog = open_all()
    before = catalog["d"].latest
    catalog.refresh("d")
    assert catalog["d"].latest is before
    write_shard(folder, 1, 0)
    catalog.refresh("d")
    assert catalog["d"].served(before.snapshot.fingerprint).index is before.index
    write_shard(folder, 9, 0)  # the same content, but blocks of it are named by its date, too
    catalog.refresh("d")
    again = catalog["d"].served(before.snapshot.fingerprint)
    assert again.index is not before.index
    assert catalog["d"].served(before.snapshot.fingerprint) is again


@pytest.mark.parametrize("recipes", [("", ""), ("vocab_size = 10", "vocab_size = 11")])
def test_what_changes_after_a_look_is_left_to_the_next_one(
    folder: Path, open_all: Callable[[], Catalog], monkeypatch: pytest.MonkeyPatch, recipes: tuple[str, str]
) -> None:
    versions = [folder.parent.parent / "old", folder.parent.parent / "new"]
    for version, recipe in zip(versions, recipes, strict=True):
        version.mkdir()
        if recipe:  # the shards are the same files
            (version / "part-9.parquet").hardlink_to(folder / "part-9.parquet")
            (version / "penstock.toml").write_text(recipe)
        else:
            write_shard(version, 9, versions.index(version))
    link = folder.parent / "link"

    def lead_to(version: Path) -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(version)

    def late(*args: Any, **options: Any) -> Reading:
        lead_to(versions[0])
        return read_folder(*args, **options)

    lead_to(versions[0])
    catalog = open_all()
    lead_to(versions[1])
    with monkeypatch.context() as patch:
        patch.setattr(dataset_module, "read_folder", late)
        with pytest.raises(DatasetInvalid, match="is being written to: it changed while it was read"):
            catalog.refresh("link")
    lead_to(versions[1])
    assert catalog.refresh("link").changed


def test_a_policy_that_changes_takes_effect_without_another_snapshot(folder: Path, open_all: Callable[[], Catalog]) -> None:
    catalog = open_all()
    before = catalog["d"].latest.snapshot
    (folder / "penstock.toml").write_text('on_bad_row = "replace"')
    assert not catalog.refresh("d").changed
    after = catalog["d"].latest.snapshot
    assert (before.recipe.on_bad_row, after.recipe.on_bad_row) == ("fail", "replace")


def test_an_older_snapshot_follows_a_policy_and_keeps_its_recipe(folder: Path, open_all: Callable[[], Catalog]) -> None:
    catalog = open_all()
    before = catalog["d"].latest.snapshot
    write_shard(folder, 1, 0)
    catalog.refresh("d")
    for toml in ('on_bad_row = "replace"', "eos = 77"):
        assert catalog["d"].served(before.fingerprint).snapshot.fingerprint == before.fingerprint
        (folder / "penstock.toml").write_text(toml)
        catalog.refresh("d")
    older = catalog["d"].served(before.fingerprint).snapshot
    assert (older.fingerprint, older.recipe.eos_id, older.recipe.on_bad_row) == (before.fingerprint, None, "replace")
    held = open_all()["d"].held  # of a server that never knew that recipe
    assert before.fingerprint not in [record.fingerprint for record in held.snapshots]


def test_of_a_folder_that_grows_for_months_no_more_is_held_than_is_remembered(
    folder: Path, open_all: Callable[[], Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "_KEPT", 2)
    catalog = open_all()
    for number in range(5):
        write_shard(folder, number, 0)
        catalog.refresh("d")
    held = catalog["d"].held
    assert len(held.records) == 3
    assert held.former.keys() <= held.records.keys()


def test_a_damaged_record_is_no_record(folder: Path, open_all: Callable[[], Catalog], tmp_path: Path) -> None:
    open_all()
    write_shard(folder, 1, 0)
    latest = open_all()["d"].latest.snapshot.fingerprint
    [older] = [p for p in (tmp_path / "cache" / "notes").glob("*/*.snapshot") if p.stem != latest]
    older.write_bytes(older.read_bytes()[:-1])
    assert [record.fingerprint for record in open_all()["d"].held.snapshots] == [latest]


def test_of_a_folder_that_was_removed_after_a_restart_the_shard_is_named(folder: Path, open_all: Callable[[], Catalog]) -> None:
    catalog = open_all()
    older = catalog["d"].latest.snapshot.fingerprint
    write_shard(folder, 1, 0)
    catalog.refresh("d")
    dataset = open_all()["d"]
    dataset.remove("d was removed")
    with pytest.raises(SnapshotGone, match="part-9.parquet was removed since it was made"):
        dataset.served(older)


def test_what_a_server_runs_on_for_months_is_not_forgotten_when_another_starts(
    open_all: Callable[[], Catalog], tmp_path: Path
) -> None:
    catalog = open_all()
    [notes] = (tmp_path / "cache" / "notes").iterdir()
    os.utime(notes, (1, 1))
    catalog["d"].served(None)
    drop_old_notes(tmp_path / "cache", time.time())
    assert notes.exists()


def test_snapshot_without_a_record_is_gone(folder: Path, open_all: Callable[[], Catalog], tmp_path: Path) -> None:
    first = open_all()["d"].latest.snapshot.fingerprint
    write_shard(folder, 1, 0)
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(SnapshotGone, match=f"{first} of d is not on this server"):
        open_all()["d"].served(first)


def test_a_name_that_is_no_fingerprint_opens_no_file(open_all: Callable[[], Catalog]) -> None:
    client = TestClient(create_app(open_all(), InFlight(1 << 30)))
    for name in ("../footers", "x" * 5000, "\x00", "0123456789abcdef"):
        answer = client.get("/v1/datasets/d/spec", params={"snapshot": name})
        assert answer.json()["type"] == "urn:penstock:problem:snapshot-gone"


def test_what_was_never_asked_for_is_forgotten_first_and_then_what_was_asked_for_longest_ago(
    folder: Path, tmp_path: Path
) -> None:
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


def test_what_is_made_last_is_the_latest_also_after_the_clock_was_set_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, now = [], time.time_ns()
    for number, hours in enumerate((0, -1, -2)):
        monkeypatch.setattr(time, "time_ns", lambda hours=hours: now + hours * 3_600_000_000_000)
        write_shard(folder, 9, number)
        made.append(open_snapshot(folder).fingerprint)
        History(tmp_path / "notes").add(open_snapshot(folder))
    assert [record.fingerprint for record in History(tmp_path / "notes").records()] == made[::-1]


def test_what_was_asked_for_stays_so_though_it_becomes_the_latest_again(folder: Path, tmp_path: Path) -> None:
    history, first = History(tmp_path / "notes"), open_snapshot(folder)
    history.add(first)
    time.sleep(0.01)  # dates of files are of some milliseconds
    history.touch(first.fingerprint)
    for number in range(18):
        if number == 1:
            history.add(first)
        write_shard(folder, 9, number + 1)
        history.add(open_snapshot(folder))
    assert history.records()[-1].fingerprint == first.fingerprint


def test_a_snapshot_that_a_disk_refused_to_note_is_noted_when_a_job_asks_for_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(b"in the way")
    history = History(tmp_path / "notes")
    history.add(open_snapshot(folder))
    [known] = history.records()
    (tmp_path / "notes").unlink()
    history.touch(known.fingerprint)
    assert History(tmp_path / "notes").records() == [known]


def test_a_note_that_is_refused_for_good_does_not_fill_the_log(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "notes").write_bytes(b"in the way")
    history, snapshot, began = History(tmp_path / "notes"), open_snapshot(folder), time.monotonic()
    history.add(snapshot)
    for minute in range(60):
        monkeypatch.setattr(time, "monotonic", lambda minute=minute: began + 61 * minute)
        history.touch(snapshot.fingerprint)
    assert caplog.text.count("cannot be stored") == 2


@pytest.mark.parametrize("content", [{"some": "map"}, (), 7, None])
def test_a_note_of_another_kind_is_none(folder: Path, tmp_path: Path, content: object) -> None:
    """As where a backup was put back under other names."""
    history = History(tmp_path / "notes")
    history.add(open_snapshot(folder))
    [known] = history.records()
    [path] = (tmp_path / "notes").iterdir()
    write_note(path.with_name(f"other{path.suffix}"), content)
    assert History(tmp_path / "notes").records() == [known]


def test_what_was_read_of_shards_while_a_mask_was_not_wanted_does_not_hide_it_once_it_is(
    folder: Path, open_all: Callable[[], Catalog]
) -> None:
    masked = pa.table({"input_ids": [[1, 2, 3]], "labels": [[-100, 2, 3]]})
    pq.write_table(masked, folder / "part-99.parquet")
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))  # old enough for what is read of it to be remembered
    recipe = folder / "penstock.toml"
    recipe.write_text("labels = false")
    assert open_all()["d"].latest.snapshot.num_rows == 4
    recipe.unlink()
    with pytest.raises(DatasetInvalid, match="labels"):
        open_all()


def test_what_is_told_of_a_dataset_follows_its_recipe_though_it_is_of_the_same_snapshot(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "turns"
    folder.mkdir(parents=True)
    columns = {"prompt": [[1, 2]], "completion": [[1, 2, 3]], "completion_mask": [[1, 0, 1]]}
    pq.write_table(pa.table(columns), folder / "part-0.parquet")
    catalog = open_catalog(tmp_path / "data", None, BlockStore(CacheFolder(tmp_path / "cache")))
    before = catalog["turns"].latest
    assert describe_dataset(before)["unused_columns"] == ["completion_mask"]
    (folder / "penstock.toml").write_text("loss_mask = false")
    catalog.refresh("turns")
    after = catalog["turns"].latest
    assert after.snapshot.fingerprint == before.snapshot.fingerprint
    assert after.index is before.index
    assert describe_dataset(after)["unused_columns"] == []


@pytest.mark.parametrize("name", ["tokenizer.json", "gpt2.model"])
def test_a_look_sees_the_tokenizer_that_the_server_was_given_whatever_its_name(folder: Path, tmp_path: Path, name: str) -> None:
    tokenizer = tmp_path / name
    tokenizer.write_text("{}")
    before = look(folder, {}, tokenizer)
    assert look(folder, {}, tokenizer) == before
    tokenizer.write_text('{"version": "1.0"}')
    assert (changed := look(folder, {}, tokenizer)) != before
    (tmp_path / "chat_template.jinja").write_text("")
    assert look(folder, {}, tokenizer) != changed
