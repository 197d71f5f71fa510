"""Several servers on one cache folder: each follows the changes that another has loaded."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from starlette.testclient import TestClient

from penstock.spec import Spec
from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.catalog import dataset as dataset_module
from penstock_server.catalog.catalog import Catalog
from penstock_server.catalog.footers import FolderReader
from penstock_server.catalog.scan import Scan, scan_all
from penstock_server.catalog.view import LoadingLock
from penstock_server.problems import DatasetInvalid, DatasetUnavailable, SnapshotGone, UnknownDataset
from support.corpora import write_numbered, write_shard
from support.engine import Opener


def test_change_by_another_server_is_logged(folder: Path, open_all: Opener, caplog: pytest.LogCaptureFixture) -> None:
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
    told = [record.getMessage().partition("; ")[0].removeprefix("d: ") for record in caplog.records]
    assert told == [follows[0], follows[0], follows[1]]


def test_servers_agree_on_the_latest_snapshot_before_their_polls(open_all: Opener, folder: Path) -> None:
    first, second, third = open_all(), open_all(), open_all()
    before = first.plan("d", Spec(batch_size=1)).snapshot
    write_shard(folder, 10, 0)
    after = first.refresh("d").snapshot
    assert second.plan("d", Spec(batch_size=1)).snapshot == after
    assert third.plan("d", Spec(batch_size=1, snapshot=after)).snapshot == after
    assert {catalog.plan("d", Spec(batch_size=1, snapshot=before)).snapshot for catalog in (first, second, third)} == {before}
    assert first.poll() == second.poll()
    assert second.plan("d", Spec(batch_size=1)).snapshot == after


def test_catch_up_leaves_unrecorded_files_alone(open_all: Opener, folder: Path) -> None:
    first, second = open_all(), open_all()
    write_shard(folder, 10, 0)
    after = first.refresh("d").snapshot
    (folder / "part-11.parquet").write_bytes(b"half of a")
    write_shard(folder, 12, 0)
    assert second.plan("d", Spec(batch_size=1)).snapshot == after


def test_server_serves_on_when_catch_up_fails(open_all: Opener, folder: Path) -> None:
    first, second = open_all(), open_all()
    before = second.plan("d", Spec(batch_size=1)).snapshot
    write_shard(folder, 10, 0)
    after = first.refresh("d").snapshot
    (folder / "part-10.parquet").unlink()
    assert second.plan("d", Spec(batch_size=1)).snapshot == before
    with pytest.raises(SnapshotGone, match="is not on this server|is gone"):
        second.plan("d", Spec(batch_size=1, snapshot=after))


def test_requests_for_a_known_snapshot_do_not_wait_for_a_poll(
    folder: Path, open_all: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = open_all()
    known = catalog.plan("d", Spec(batch_size=1)).snapshot
    looks, may_end = threading.Event(), threading.Event()

    def look(*places: Any) -> Scan:
        looks.set()
        may_end.wait(60)
        return scan_all(*places)

    monkeypatch.setattr("penstock_server.catalog.catalog.scan_all", look)
    monkeypatch.setattr("penstock_server.catalog.view._CATCH_UP_SECONDS", 30)
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


def test_requests_that_wait_for_one_poll_share_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_server.catalog.view._CATCH_UP_SECONDS", 0.5)
    monkeypatch.setattr("penstock_server.catalog.view._MIN_WAIT_SECONDS", 0.0)
    loading = LoadingLock()
    with loading:
        assert not loading.acquire_in_time()  # which waits
        monkeypatch.setattr(loading, "_lock", Mock(acquire=Mock(return_value=False)))
        assert not loading.acquire_in_time()
        assert loading._lock.acquire.call_args.kwargs == {"timeout": 0.0}  # type: ignore[attr-defined]
    monkeypatch.undo()


def test_concurrent_refreshes_take_one_thread(folder: Path, open_all: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog, looks, may_end = open_all(), threading.Event(), threading.Event()

    def look(*places: Any) -> Scan:
        looks.set()
        may_end.wait(60)
        return scan_all(*places)

    monkeypatch.setattr("penstock_server.catalog.catalog.scan_all", look)

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


def test_reverted_folder_is_loaded_after_catch_up(folder: Path, open_all: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "SETTLED_SECONDS", 0.0)
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


def test_polling_continues_after_a_failed_poll(caplog: pytest.LogCaptureFixture) -> None:
    polls = threading.Semaphore(0)

    class Failing(Catalog):
        def __init__(self) -> None:
            pass

        def poll(self) -> bool:
            polls.release()
            raise RuntimeError("a fault of ours")

    with Failing().polling(0.01):
        for _ in range(3):
            assert polls.acquire(timeout=20)
    assert "a poll of the data folder failed" in caplog.text


@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("away", ["team", "team/own", "team/own/part-001.parquet", "team/own/penstock.toml"])
def test_runs_wait_when_a_restarted_server_cannot_open_the_folder(
    data: Path, open_all: Opener, monkeypatch: pytest.MonkeyPatch, away: str, has_cache: bool
) -> None:
    write_numbered(data / "other", 3)
    (write_numbered(data / "team" / "own", 9, num_shards=3) / "penstock.toml").write_text("")
    spec = Spec(batch_size=1, snapshot=open_all()["team.own"].latest.snapshot.fingerprint)
    if not has_cache:
        shutil.rmtree(data.parent / "cache")
    for shard in (data / "team" / "own").glob("*.parquet"):  # or it would be remembered what is in it
        shard.touch()

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: str | Path, *args: Any, **options: Any) -> Any:
            if Path(path) == data / away:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return call(path, *args, **options)

        return called

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", failing(os.scandir))
        patch.setattr(Path, "open", failing(Path.open))
        patch.setattr("builtins.open", failing(open))
        catalog = open_all()
        with pytest.raises(DatasetUnavailable, match=rf"snapshot {spec.snapshot} cannot be served now.*Input/output error"):
            catalog.plan("team.own", spec)
        with pytest.raises(DatasetInvalid, match="Input/output error"):
            catalog.plan("team.own", replace(spec, snapshot=None))
    with suppress(DatasetInvalid):
        catalog.refresh("team.own")
    assert catalog.plan("team.own", spec).schedule.num_steps == 9


def test_unknown_dataset_is_an_error_with_a_hint(data: Path, open_all: Opener) -> None:
    write_numbered(data / "good", 3)
    write_numbered(data / "bad", 3)
    (data / "bad" / "penstock.toml").write_text('tokens = "none"')
    (data / "raw" / "mail").mkdir(parents=True)
    (data / "raw" / "mail" / "a.csv").write_text("text\nx\n")
    catalog = open_all()
    with pytest.raises(UnknownDataset, match=r"Served: good\. Not served, .*: bad\.$"):
        catalog["god"]
    with pytest.raises(UnknownDataset, match="mail holds no .parquet file"):
        catalog["raw.mail"]


def test_bug_in_one_dataset_does_not_affect_others(data: Path, open_all: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    write_numbered(data / "good", 3)
    write_numbered(data / "odd", 3)

    read = FolderReader.read

    def failing(reader: FolderReader, *args: Any, **options: Any) -> Any:
        if reader.name == "odd":
            raise ValueError("\udce9 is no text")
        return read(reader, *args, **options)

    monkeypatch.setattr(FolderReader, "read", failing)
    monkeypatch.setattr(dataset_module, "log", Mock())  # it is Python's own traceback
    catalog = open_all()
    assert list(catalog.datasets) == ["good"]
    assert "ValueError: \\udce9 is no text" in catalog.refused["odd"]
    answer = TestClient(create_app(catalog, InFlight(1 << 30))).get("/v1/datasets")
    assert (answer.status_code, "\\\\udce9 is no text" in answer.text) == (200, True)


def test_runs_of_a_mixture_wait_when_its_recipe_is_invalid(data: Path, open_all: Opener) -> None:
    for name in ("a", "b"):
        write_numbered(data / name, 3)
    (data / "m").mkdir()
    toml = data / "m" / "penstock.toml"
    toml.write_text('mix = "a:1,b:1"')
    spec = open_all().plan("m", Spec(batch_size=1)).spec
    toml.write_text("mix = ")
    catalog = open_all()
    for asked in (spec, Spec(batch_size=1, snapshot=spec.snapshot)):
        with pytest.raises(DatasetUnavailable, match="cannot be served now: .*penstock.toml"):
            catalog.plan("m", asked)
    with pytest.raises(DatasetInvalid, match="penstock.toml"):
        catalog.plan("m", Spec(batch_size=1))
    with pytest.raises(UnknownDataset):
        catalog.plan("m.other", Spec(batch_size=1))
