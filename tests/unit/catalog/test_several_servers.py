"""What servers on one cache folder know of what the others took in."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from growing import write_shard
from penstock.spec import Spec
from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog import dataset as dataset_module
from penstock_server.catalog import history as history_module
from penstock_server.catalog.catalog import Catalog, open_catalog
from penstock_server.catalog.history import History
from penstock_server.catalog.scan import Survey, survey
from penstock_server.problems import DatasetInvalid, SnapshotGone
from planned import open_snapshot


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

    monkeypatch.setattr("penstock_server.catalog.catalog.survey", look)
    monkeypatch.setattr("penstock_server.catalog.catalog._CATCH_UP_SECONDS", 30)
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

    monkeypatch.setattr("penstock_server.catalog.catalog.survey", look)

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


@pytest.mark.parametrize("lost", ["the folder", "the latest one's note"])
def test_notes_that_are_lost_while_a_job_is_on_an_older_snapshot_change_nothing(
    folder: Path, open_all: Callable[[], Catalog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setattr(history_module, "_TOUCH_SECONDS", 0.0)
    catalog = open_all()
    older = catalog.plan("d", Spec(batch_size=1)).snapshot
    write_shard(folder, 10, 0)
    latest = catalog.refresh("d").snapshot
    if lost == "the folder":
        shutil.rmtree(tmp_path / "cache")
    else:
        [note] = (tmp_path / "cache").rglob(f"{latest}.snapshot")
        note.unlink()
    for _ in range(2):
        assert catalog.plan("d", Spec(batch_size=1, snapshot=older)).snapshot == older
        assert catalog.plan("d", Spec(batch_size=1)).snapshot == latest
        assert [record.fingerprint for record in catalog["d"].held.snapshots] == [latest, older]


def test_a_folder_that_comes_back_to_what_was_read_before_another_server_took_more_in_is_looked_at(
    folder: Path, open_all: Callable[[], Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "QUIET_SECONDS", 0.0)
    os.utime(folder / "part-9.parquet", (1e9, 1e9))  # what was read of it is to be relied on
    one, other = open_all(), open_all()
    before = one.plan("d", Spec(batch_size=1)).snapshot
    one.poll()
    write_shard(folder, 10, 0)
    after = other.refresh("d").snapshot
    assert one.plan("d", Spec(batch_size=1)).snapshot == after
    (folder / "part-10.parquet").unlink()
    while not one.poll():
        pass
    assert one.plan("d", Spec(batch_size=1)).snapshot == before


def test_who_joins_others_serves_what_they_do_and_leaves_what_is_being_copied_to_a_look(
    folder: Path, tmp_path: Path, open_all: Callable[[], Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "QUIET_SECONDS", 0.0)

    def join() -> Catalog:
        return open_catalog(folder.parent, None, BlockStore(CacheFolder(tmp_path / "cache")), joins=True)

    first = open_all()
    before = first.plan("d", Spec(batch_size=1)).snapshot
    write_shard(folder, 10, 0)  # of two that are copied
    joined = join()
    for catalog in (joined, first):
        assert catalog.plan("d", Spec(batch_size=1)).snapshot == before
    write_shard(folder, 11, 0)
    while not joined.poll():
        pass
    after = joined.plan("d", Spec(batch_size=1))
    assert after.schedule.num_steps == 9
    assert first.plan("d", Spec(batch_size=1)).snapshot == after.snapshot
    (folder / "part-11.parquet").unlink()  # what the others serve is not there any more
    assert join().plan("d", Spec(batch_size=1)).schedule.num_steps == 6
    (folder / "part-12.parquet").write_bytes(b"half of a")  # nobody knows whether others serve on or began in this state
    with pytest.raises(DatasetInvalid, match="part-12"):
        join().plan("d", Spec(batch_size=1))
