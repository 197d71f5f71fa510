"""Snapshots of a folder that changes, with restarts: each answers with its own bytes, or is gone."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from penstock.spec import Spec
from penstock_server import app as app_module
from penstock_server.app import create_app
from penstock_server.batches.gather import Chunk
from penstock_server.datasets import dataset as dataset_module
from penstock_server.datasets import history as history_module
from penstock_server.datasets.catalog import Catalog, open_catalog
from penstock_server.datasets.history import History, Record
from penstock_server.datasets.watch import watching
from penstock_server.inflight import InFlight
from penstock_server.logs import Seldom
from penstock_server.problems import DatasetRefused, ShardUnavailable, SnapshotGone
from penstock_server.snapshots.folders import Survey, survey
from penstock_server.snapshots.notes import drop_old_notes, write_note
from penstock_server.snapshots.reading import Reading, read_folder
from penstock_server.storage.block import Block
from penstock_server.storage.cache import CacheFolder
from penstock_server.storage.store import BlockStore
from planned import open_snapshot


def write_shard(folder: Path, number: int, variant: int) -> None:
    """Equal arguments write equal files."""
    temporary = folder / ".part"
    ids = pa.array([[number, variant]] * 3, pa.list_(pa.int32()))
    pq.write_table(pa.table({"input_ids": ids}), temporary)
    temporary.rename(folder / f"part-{number}.parquet")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "d"
    path.mkdir(parents=True)
    write_shard(path, 9, 0)
    return path


@pytest.fixture
def open_all(tmp_path: Path, folder: Path) -> Callable[[], Catalog]:
    return lambda: open_catalog(folder.parent, None, BlockStore(CacheFolder(tmp_path / "cache")))


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


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "there is not the memory for this answer: it ran out. Whoever asks may try again"),
        (RuntimeError("can't start new thread"), "there is not the memory for another thread: can't start new thread. "),
    ],
)
def test_who_meets_a_lack_of_memory_or_of_threads_may_ask_again(
    open_all: Callable[[], Catalog],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    told: str,
) -> None:
    monkeypatch.setattr(app_module, "_telling_of_memory", Seldom())
    monkeypatch.setattr(Chunk, "request", Mock(side_effect=error))
    with TestClient(create_app(open_all(), InFlight(1 << 30))) as client:
        answer = client.get("/v1/datasets/d/epochs/0/ranks/0/batches/0?batch_size=3&seq_len=4&shuffle=none")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert answer.json()["type"] == "urn:penstock:problem:out-of-memory"
    assert answer.json()["detail"].startswith(told)
    assert answer.json()["detail"] in caplog.text


def test_another_fault_is_one_of_the_servers(open_all: Callable[[], Catalog], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chunk, "request", Mock(side_effect=RuntimeError("odd")))
    with TestClient(create_app(open_all(), InFlight(1 << 30)), raise_server_exceptions=False) as client:
        answer = client.get("/v1/datasets/d/epochs/0/ranks/0/batches/0?batch_size=3&seq_len=4&shuffle=none")
    assert (answer.status_code, answer.json()["type"]) == (500, "urn:penstock:problem:internal-error")
    assert answer.json()["detail"].startswith("RuntimeError: odd. This is a fault of the server")


def test_of_several_blocks_that_fail_one_is_told_and_the_others_make_no_noise(
    open_all: Callable[[], Catalog], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    futures = [Future[Block](), Future[Block]()]
    futures[0].set_exception(ShardUnavailable("it cannot be read now"))
    monkeypatch.setattr(Chunk, "request", lambda _: list(futures))
    with TestClient(create_app(open_all(), InFlight(1 << 30))) as client:
        answer = client.get("/v1/datasets/d/epochs/0/ranks/0/batches/0?batch_size=3&seq_len=4&shuffle=none")
        assert answer.json()["detail"] == "it cannot be read now"
        futures.pop().set_exception(ShardUnavailable("nor can this"))
        client.get("/healthz")
        gc.collect()
        client.get("/healthz")
    assert "never retrieved" not in caplog.text


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
        with pytest.raises(DatasetRefused, match="is being written to: it changed while it was read"):
            catalog.refresh("link")
    lead_to(versions[1])
    assert catalog.refresh("link").changed


def test_a_policy_that_changes_takes_effect_without_another_snapshot(folder: Path, open_all: Callable[[], Catalog]) -> None:
    catalog = open_all()
    before = catalog["d"].latest.snapshot
    (folder / "penstock.toml").write_text('on_bad_row = "substitute"')
    assert not catalog.refresh("d").changed
    after = catalog["d"].latest.snapshot
    assert (before.recipe.on_bad_row, after.recipe.on_bad_row) == ("fail", "substitute")


def test_of_two_servers_each_tells_what_the_other_took_in(
    folder: Path, open_all: Callable[[], Catalog], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock.dataset")
    one, other = open_all(), open_all()
    first = other["d"].latest.snapshot.fingerprint
    caplog.clear()
    write_shard(folder, 1, 0)
    second = one.refresh("d").snapshot
    write_shard(folder, 2, 0)
    change = other.refresh("d")
    assert (change.previous, change.added) == (second, 1)
    follows = [f"snapshot {after} follows {before}" for before, after in ((first, second), (second, change.snapshot))]
    told = [record.getMessage().partition("; ")[2] for record in caplog.records]
    assert told == [follows[0], follows[0], follows[1]]


def test_an_older_snapshot_follows_a_policy_and_keeps_its_recipe(folder: Path, open_all: Callable[[], Catalog]) -> None:
    catalog = open_all()
    before = catalog["d"].latest.snapshot
    write_shard(folder, 1, 0)
    catalog.refresh("d")
    for toml in ('on_bad_row = "substitute"', "eos = 77"):
        assert catalog["d"].served(before.fingerprint).snapshot.fingerprint == before.fingerprint
        (folder / "penstock.toml").write_text(toml)
        catalog.refresh("d")
    older = catalog["d"].served(before.fingerprint).snapshot
    assert (older.fingerprint, older.recipe.eos_id, older.recipe.on_bad_row) == (before.fingerprint, None, "substitute")
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


@pytest.fixture
def grown(folder: Path, open_all: Callable[[], Catalog], tmp_path: Path) -> Spec:
    """A job's spec of a snapshot that one more shard has followed and of which nothing is noted."""
    first = open_all()["d"].latest.snapshot.fingerprint
    write_shard(folder, 1, 0)
    shutil.rmtree(tmp_path / "cache")
    return Spec(batch_size=1, snapshot=first)


def listed(catalog: Catalog) -> list[str]:
    return [record.fingerprint for record in catalog["d"].held.snapshots]


def test_what_is_found_without_a_note_is_known_from_then_on(
    grown: Spec, open_all: Callable[[], Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = open_all()
    latest = catalog["d"].latest.snapshot.fingerprint
    assert catalog.may_wait("d", grown)
    planned = catalog.plan("d", grown).members[0].planned
    looks, records = [], History.records

    def look(history: History) -> list[Record]:
        looks.append(history)
        return records(history)

    with monkeypatch.context() as patch:
        patch.setattr(History, "records", look)
        assert catalog.plan("d", grown).members[0].planned is planned
    assert not looks
    assert not catalog.may_wait("d", grown)
    for server in (catalog, open_all()):  # the other one reads the notes
        assert listed(server) == [latest, grown.snapshot]
        assert not server.may_wait("d", grown)
        assert server.plan("d", Spec(batch_size=1)).snapshot == latest


def test_what_was_found_without_a_note_does_not_wait_for_a_look_at_new_data(
    grown: Spec, open_all: Callable[[], Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, planned = open_all(), []
    catalog.plan("d", grown)

    def look(data_dir: Path) -> Survey:
        planned.append(catalog.plan("d", grown).snapshot)
        return survey(data_dir)

    monkeypatch.setattr("penstock_server.datasets.catalog.survey", look)
    monkeypatch.setattr("penstock_server.datasets.catalog._CATCH_UP_SECONDS", 0)
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
    with pytest.raises(DatasetRefused):
        catalog.refresh("d")
    assert catalog.plan("d", grown).members[0].planned is planned
    other = open_all()
    assert listed(other) == [grown.snapshot]
    with pytest.raises(DatasetRefused):  # what was found is not the latest, even where nothing else is noted
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


def test_a_damaged_record_is_no_record(folder: Path, open_all: Callable[[], Catalog], tmp_path: Path) -> None:
    open_all()
    write_shard(folder, 1, 0)
    latest = open_all()["d"].latest.snapshot.fingerprint
    [older] = [p for p in (tmp_path / "cache" / "notes").glob("*/*.snapshot") if p.stem != latest]
    older.write_bytes(older.read_bytes()[:-1])
    assert [record.fingerprint for record in open_all()["d"].held.snapshots] == [latest]


def test_servers_of_one_cache_folder_agree_on_the_latest_snapshot_before_each_has_looked(
    open_all: Callable[[], Catalog], folder: Path
) -> None:
    first, second, third = open_all(), open_all(), open_all()
    before = first.plan("d", Spec(batch_size=1)).snapshot
    write_shard(folder, 10, 0)
    after = first.refresh("d").snapshot
    assert second.plan("d", Spec(batch_size=1)).snapshot == after
    assert third.plan("d", Spec(batch_size=1, snapshot=after)).snapshot == after
    assert {catalog.plan("d", Spec(batch_size=1, snapshot=before)).snapshot for catalog in (first, second, third)} == {before}
    assert first.poll() == second.poll()
    assert second.plan("d", Spec(batch_size=1)).snapshot == after


def test_who_catches_up_takes_in_nothing_that_no_server_has_taken_in(open_all: Callable[[], Catalog], folder: Path) -> None:
    first, second = open_all(), open_all()
    write_shard(folder, 10, 0)
    after = first.refresh("d").snapshot
    (folder / "part-11.parquet").write_bytes(b"half of a")
    write_shard(folder, 12, 0)
    assert second.plan("d", Spec(batch_size=1)).snapshot == after


def test_who_cannot_catch_up_serves_on(open_all: Callable[[], Catalog], folder: Path) -> None:
    first, second = open_all(), open_all()
    before = second.plan("d", Spec(batch_size=1)).snapshot
    write_shard(folder, 10, 0)
    after = first.refresh("d").snapshot
    (folder / "part-10.parquet").unlink()
    assert second.plan("d", Spec(batch_size=1)).snapshot == before
    with pytest.raises(SnapshotGone, match="is not on this server|is gone"):
        second.plan("d", Spec(batch_size=1, snapshot=after))


def test_while_new_data_is_looked_at_only_those_wait_who_may_have_to_see_it(
    open_all: Callable[[], Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = open_all()
    known = catalog.plan("d", Spec(batch_size=1)).snapshot
    looks, may_end = threading.Event(), threading.Event()

    def look(data_dir: Path) -> Survey:
        looks.set()
        may_end.wait(60)
        return survey(data_dir)

    monkeypatch.setattr("penstock_server.datasets.catalog.survey", look)
    monkeypatch.setattr("penstock_server.datasets.catalog._CATCH_UP_SECONDS", 30)
    app = create_app(catalog, InFlight(1 << 30))
    answered: list[str] = []

    def ask(snapshot: str) -> None:
        query = {"batch_size": "1", **({"snapshot": snapshot} if snapshot else {})}
        assert TestClient(app).get("/v1/datasets/d/epochs/0/ranks/0/batches/0", params=query).status_code == 200
        answered.append(snapshot)

    ask("")
    ask(known)  # from here on both are made in two threads, but for what waits
    answered.clear()
    threads = [threading.Thread(target=catalog.poll)]
    threads[0].start()
    try:
        assert looks.wait(60)
        threads += [threading.Thread(target=ask, args=("",)) for _ in range(8)]
        for thread in threads[1:]:
            thread.start()
        time.sleep(0.5)  # they wait by now; otherwise this would prove less
        ask(known)
        assert answered == [known]
    finally:
        may_end.set()
        for thread in threads:
            thread.join()
    assert len(answered) == 9


def test_of_many_who_ask_for_a_look_at_a_slow_folder_only_one_takes_a_thread(
    open_all: Callable[[], Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, looks, may_end = open_all(), threading.Event(), threading.Event()

    def look(data_dir: Path) -> Survey:
        looks.set()
        may_end.wait(60)
        return survey(data_dir)

    monkeypatch.setattr("penstock_server.datasets.catalog.survey", look)

    async def run() -> None:
        transport = httpx.ASGITransport(create_app(catalog, InFlight(1 << 30)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asked = [asyncio.create_task(client.post("/v1/datasets/d/refresh")) for _ in range(50)]
            try:
                assert await asyncio.to_thread(looks.wait, 60)
                for _ in range(3):
                    assert (await asyncio.wait_for(client.get("/v1/datasets"), 30)).status_code == 200
            finally:
                may_end.set()
                answers = await asyncio.gather(*asked)
        assert {answer.status_code for answer in answers} == {200}

    asyncio.run(run())


def test_what_a_server_runs_on_for_months_is_not_forgotten_when_another_starts(
    open_all: Callable[[], Catalog], tmp_path: Path
) -> None:
    catalog = open_all()
    [notes] = (tmp_path / "cache" / "notes").iterdir()
    os.utime(notes, (1, 1))
    catalog["d"].served(None)
    drop_old_notes(tmp_path / "cache")
    assert notes.exists()


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


def test_what_another_server_makes_the_latest_again_or_forgets_is_seen(folder: Path, tmp_path: Path) -> None:
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


def test_a_look_that_fails_is_not_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    looks = threading.Semaphore(0)

    class Failing(Catalog):
        def __init__(self) -> None:
            pass

        def poll(self) -> bool:
            looks.release()
            raise RuntimeError("a fault of ours")

    with watching(Failing(), 0.01):
        for _ in range(3):
            assert looks.acquire(timeout=20)
    assert "could not be looked at; it will be tried again" in caplog.text
