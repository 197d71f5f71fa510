import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from starlette.testclient import TestClient

import penstock_server.blocks.prefetch
from corpora import write_numbered, write_shards
from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.batches.plan import Plan
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.prefetch import ReadAhead
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.problems import BadRow
from planned import open_snapshot


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def needed(*blocks: int) -> Callable[[], list[tuple[int, int]]]:
    """Blocks that are all needed at once."""
    return lambda: [(block, 0) for block in blocks]


def test_read_ahead_makes_each_block_once_and_goes_on_after_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    loaded: list[int] = []

    def load(block: int) -> None:
        loaded.append(block)
        if block == 2:
            raise BadRow("no")
        if block == 4:
            raise MemoryError

    ahead = ReadAhead()
    for _ in range(3):
        ahead.want("job", 0, 4, needed(1, 2, 3), load)
    until(lambda: len(loaded) == 3)
    ahead.want("job", 1, 4, needed(4, 5), load)
    until(lambda: loaded == [1, 2, 3, 4, 5])
    assert [record.getMessage() for record in caplog.records] == [
        "block 4 could not be loaded ahead; it is loaded when it is needed"
    ]


def test_read_ahead_starts_its_threads_later_when_none_could_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ahead, loaded = ReadAhead(), list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        ahead.want("job", 0, 4, needed(1), loaded.append)
    assert "nothing is loaded ahead of its time: can't start new thread" in caplog.text
    ahead.want("job", 1, 4, needed(2), loaded.append)
    until(lambda: loaded == [2])


def test_read_ahead_makes_the_block_first_that_is_needed_soonest_at_the_pace_of_its_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, gate, loaded = Mock(), threading.Semaphore(0), list[int]()
    clock.monotonic.return_value = 0.0
    monkeypatch.setattr(penstock_server.blocks.prefetch, "time", clock)

    def load(block: int) -> None:
        assert gate.acquire(timeout=20)
        loaded.append(block)

    ahead = ReadAhead()
    ahead.want("busy", 0, 4, needed(0), load)  # keeps the only thread
    ahead.want("quick", 0, 4, lambda: [(10, 900)], load)
    ahead.want("slow", 0, 4, lambda: [(20, 50)], load)
    clock.monotonic.return_value = 10.0
    ahead.want("quick", 1000, 4, lambda: [(11, 1100), (12, 1700)], load)  # 100 positions a second: in 1 s, and in 7 s
    ahead.want("slow", 10, 4, lambda: [(21, 13)], load)  # 1 a second: in 3 s
    gate.release(4)
    until(lambda: loaded == [0, 11, 21, 12])


def test_read_ahead_drops_what_was_wanted_at_an_earlier_position() -> None:
    gate, loaded = threading.Semaphore(0), list[int]()

    def load(block: int) -> None:
        assert gate.acquire(timeout=20)
        loaded.append(block)

    ahead = ReadAhead()
    ahead.want("job", 0, 4, needed(0, 1, 2, 3), load)
    gate.release()
    until(lambda: len(loaded) == 1)
    ahead.want("job", 1, 4, needed(9), load)
    gate.release(5)
    until(lambda: 9 in loaded)
    assert 3 not in loaded


def test_read_ahead_makes_several_blocks_at_a_time_and_none_again_that_was_begun() -> None:
    gate, begun, loaded = threading.Event(), list[int](), list[int]()

    def load(block: int) -> None:
        begun.append(block)
        assert gate.wait(20)
        loaded.append(block)

    ahead = ReadAhead(3)
    ahead.want("job", 0, 4, needed(1, 2, 3, 4), load)
    until(lambda: len(begun) == 3)
    ahead.want("job", 1, 4, needed(2, 3, 4, 5), load)
    gate.set()
    until(lambda: len(loaded) == 5)
    assert sorted(begun) == [1, 2, 3, 4, 5]


def test_read_ahead_looks_anew_only_where_a_job_is_much_further_or_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looked = Mock(), list[int]()
    clock.monotonic.return_value = 0.0
    monkeypatch.setattr(penstock_server.blocks.prefetch, "time", clock)
    ahead = ReadAhead()

    def want(position: int) -> None:
        def blocks() -> list[tuple[int, int]]:
            looked.append(position)
            return []

        ahead.want("job", position, 100, blocks, looked.append)

    for position in (500, 524, 410, 500):
        want(position)
    assert looked == [500]
    want(525)
    want(424)  # a pass of its own
    assert looked == [500, 525, 424]
    clock.monotonic.return_value = 30.0
    want(425)  # and another, long after that
    assert looked == [500, 525, 424, 425]


def test_read_ahead_drops_a_job_that_no_longer_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock_server.blocks.prefetch, "_FORGET_SECONDS", 0.05)
    loaded: list[int] = []

    def load(block: int) -> None:
        loaded.append(block)
        time.sleep(0.03)

    ahead = ReadAhead()
    ahead.want("gone", 0, 4, needed(*range(100)), load)
    until(lambda: len(loaded) >= 1)
    time.sleep(0.5)
    assert len(loaded) < 10


def test_read_ahead_keeps_a_job_that_goes_on_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, gate, loaded = Mock(), threading.Semaphore(0), list[int]()
    clock.monotonic.return_value = 0.0
    monkeypatch.setattr(penstock_server.blocks.prefetch, "time", clock)

    def load(block: int) -> None:
        assert gate.acquire(timeout=20)
        loaded.append(block)

    ahead = ReadAhead()
    for seconds in (0.0, 20.0, 40.0):
        clock.monotonic.return_value = seconds
        ahead.want("job", 0, 4, needed(1, 2), load)
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
        ("shuffle=none", 100, 12),
        ("shuffle=none", 5, 4),  # beside the blocks of the step, those that the budget has room for
        ("shuffle=window&window=10", 100, 12),
        ("shuffle=window&window=40", 7, 4),
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
    until(lambda: len(list(cache.folder.glob("*.block"))) >= num_loaded)
    time.sleep(0.1)
    assert num_loaded <= len(list(cache.folder.glob("*.block"))) <= room + 3
