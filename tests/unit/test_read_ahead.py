import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from starlette.testclient import TestClient

import penstock_server.storage.read_ahead
from corpora import write_numbered, write_shards
from penstock_server.app import create_app
from penstock_server.batches.plan import Plan
from penstock_server.datasets.catalog import open_catalog
from penstock_server.inflight import InFlight
from penstock_server.problems import BadRow
from penstock_server.storage.cache import CacheFolder
from penstock_server.storage.read_ahead import ReadAhead
from penstock_server.storage.store import BlockStore
from planned import open_snapshot


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_job_gets_its_blocks_once_and_a_fault_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    loaded: list[int] = []

    def load(block: int) -> None:
        loaded.append(block)
        if block == 2:
            raise BadRow("no")
        if block == 4:
            raise MemoryError

    ahead = ReadAhead()
    for _ in range(3):
        ahead.want("job", 0, lambda: [1, 2, 3], load)
    until(lambda: len(loaded) == 3)
    ahead.want("job", 1, lambda: [4, 5], load)
    until(lambda: loaded == [1, 2, 3, 4, 5])
    assert [record.getMessage() for record in caplog.records] == [
        "block 4 could not be loaded ahead; it is loaded when it is needed"
    ]


def test_a_job_is_read_ahead_for_again_after_no_thread_could_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ahead, loaded = ReadAhead(), list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        ahead.want("job", 0, lambda: [1], loaded.append)
    assert "nothing is loaded ahead of its time: can't start new thread" in caplog.text
    ahead.want("job", 1, lambda: [2], loaded.append)
    until(lambda: loaded == [2])


def test_jobs_take_turns_and_a_new_window_drops_the_old() -> None:
    gate, loaded = threading.Semaphore(0), list[str]()

    def loader(name: str) -> Callable[[int], None]:
        def load(block: int) -> None:
            assert gate.acquire(timeout=20)
            loaded.append(f"{name}{block}")

        return load

    ahead = ReadAhead()
    ahead.want("a", 0, lambda: [0, 1, 2, 3], loader("a"))
    ahead.want("b", 0, lambda: [0, 1], loader("b"))
    for _ in range(3):
        gate.release()
    until(lambda: len(loaded) == 3)
    assert sorted(loaded) in (["a0", "a1", "b0"], ["a0", "b0", "b1"])
    ahead.want("a", 1, lambda: [9], loader("a"))
    for _ in range(10):
        gate.release()
    until(lambda: "a9" in loaded and "b1" in loaded)
    assert "a3" not in loaded


def test_several_are_loaded_at_a_time_and_none_again_that_was_begun() -> None:
    gate, begun, loaded = threading.Event(), list[int](), list[int]()

    def load(block: int) -> None:
        begun.append(block)
        assert gate.wait(20)
        loaded.append(block)

    ahead = ReadAhead(3)
    ahead.want("job", 0, lambda: [1, 2, 3, 4], load)
    until(lambda: len(begun) == 3)
    ahead.want("job", 1, lambda: [2, 3, 4, 5], load)
    gate.set()
    until(lambda: len(loaded) == 5)
    assert sorted(begun) == [1, 2, 3, 4, 5]


def test_ranks_a_little_behind_the_others_want_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, loaded = Mock(), list[int]()
    clock.monotonic.return_value = 0.0
    monkeypatch.setattr(penstock_server.storage.read_ahead, "time", clock)
    ahead = ReadAhead(2)
    for place in (7, 6, 7, 4):
        ahead.want("job", place, lambda: [place], loaded.append)  # noqa: B023
    ahead.want("other", 5, lambda: [50], loaded.append)
    until(lambda: sorted(loaded) == [7, 50])
    ahead.want("job", 3, lambda: [3], loaded.append)  # a pass of its own
    until(lambda: sorted(loaded) == [3, 7, 50])
    clock.monotonic.return_value = 30.0
    ahead.want("job", 2, lambda: [2], loaded.append)  # and another, long after that
    until(lambda: sorted(loaded) == [2, 3, 7, 50])


def test_what_nobody_asks_for_any_more_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock_server.storage.read_ahead, "_FORGET_SECONDS", 0.05)
    loaded: list[int] = []

    def load(block: int) -> None:
        loaded.append(block)
        time.sleep(0.03)

    ahead = ReadAhead()
    ahead.want("gone", 0, lambda: list(range(100)), load)
    until(lambda: len(loaded) >= 1)
    time.sleep(0.5)
    assert len(loaded) < 10


def test_a_job_that_goes_on_asking_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, gate, loaded = Mock(), threading.Semaphore(0), list[int]()
    clock.monotonic.return_value = 0.0
    monkeypatch.setattr(penstock_server.storage.read_ahead, "time", clock)

    def load(block: int) -> None:
        assert gate.acquire(timeout=20)
        loaded.append(block)

    ahead = ReadAhead()
    for seconds in (0.0, 20.0, 40.0):
        clock.monotonic.return_value = seconds
        ahead.want("job", 0, lambda: [1, 2], load)
        clock.monotonic.return_value += 20.0
    gate.release(2)
    until(lambda: loaded == [1, 2])


def test_a_run_has_its_next_window_loaded_and_a_look_at_where_a_batch_is_from_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_numbered(tmp_path / "data" / "numbers", 40)
    asked: list[int] = []
    monkeypatch.setattr(Plan, "read_ahead", lambda _plan, _epoch, step: asked.append(step))
    catalog = open_catalog(tmp_path / "data", None, BlockStore(CacheFolder(tmp_path / "cache")))
    client = TestClient(create_app(catalog, InFlight(1 << 30)))
    batches = "/v1/datasets/numbers/epochs/0/ranks/0/batches"
    assert client.get(f"{batches}?start=1&stop=3&batch_size=2&seq_len=4").status_code == 200
    assert asked == [2]
    for _ in range(2):
        assert client.get(f"{batches}/4/provenance?batch_size=2&seq_len=4").status_code == 200
    assert asked == [2]
    assert client.get(f"{batches}/5?batch_size=2&seq_len=4").status_code == 200
    assert asked == [2, 5]


@pytest.mark.parametrize(
    ("spec", "room", "num_loaded"),
    [
        ("shuffle=none", 100, 6),  # three of the step of all ranks, and three that come next
        ("shuffle=none", 5, 5),  # two have room in half of that
        ("shuffle=window&window=10", 100, 6),
        ("shuffle=window&window=40", 100, 8),  # a window of four, and all of the next
        ("shuffle=window&window=40", 7, 4),  # which would evict the one that is needed
    ],
)
def test_the_blocks_that_come_next_are_loaded_as_far_as_there_is_room(
    tmp_path: Path, spec: str, room: int, num_loaded: int
) -> None:
    ids = np.random.default_rng(0).integers(0, 1 << 16, (120, 500)).tolist()
    folder = write_shards(tmp_path / "data" / "numbers", "input_ids", [ids], type_=pa.list_(pa.int32()), row_group_size=10)
    block_bytes = int(open_snapshot(folder).bytes_per_block.max())
    cache = CacheFolder(tmp_path / "cache", room * block_bytes)
    catalog = open_catalog(tmp_path / "data", None, BlockStore(cache, 6))
    client = TestClient(create_app(catalog, InFlight(1 << 30)))
    for rank in range(3):
        batch = f"/v1/datasets/numbers/epochs/0/ranks/{rank}/batches/0?world_size=3&batch_size=10&seq_len=4&{spec}"
        assert client.get(batch).status_code == 200
    until(lambda: len(list(cache.folder.glob("*.block"))) == num_loaded)
    time.sleep(0.1)
    assert len(list(cache.folder.glob("*.block"))) == num_loaded
