"""Read-ahead makes each block once, the soonest needed first, as far as the cache has room."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from starlette.testclient import TestClient

import penstock_server.blocks.cache
import penstock_server.blocks.read_ahead
from penstock_server.api.admission import InFlight
from penstock_server.app import create_app
from penstock_server.batches.plan import Plan
from penstock_server.blocks.loader import Blocks
from penstock_server.blocks.read_ahead import ReadAhead
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.problems import BadRow
from support.corpora import write_numbered, write_shards
from support.engine import open_snapshot


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def needed(*blocks: int) -> list[tuple[int, int]]:
    """Blocks that are all needed at once."""
    return [(block, 0) for block in blocks]


class Gated:
    """A loader whose loads wait for the gate; `begun` and `loaded` are the blocks in order."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.begun, self.loaded = list[int](), list[int]()

    def __call__(self, block: int) -> None:
        self.begun.append(block)
        assert self.gate.acquire(timeout=20)
        self.loaded.append(block)


def test_read_ahead_makes_each_block_once_and_continues_after_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    loaded: list[int] = []

    def load(block: int) -> None:
        loaded.append(block)
        if block == 2:
            raise BadRow("no")
        if block == 4:
            raise MemoryError

    ahead = ReadAhead()
    for _ in range(3):
        ahead.want("job", 0, needed(1, 2, 3), load)
    until(lambda: len(loaded) == 3)
    ahead.want("job", 1, needed(4, 5), load)
    until(lambda: loaded == [1, 2, 3, 4, 5])
    assert [record.getMessage().partition(" could")[0] for record in caplog.records] == ["block 4"]


def test_read_ahead_makes_the_block_first_that_is_needed_soonest_at_the_pace_of_its_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, load = Mock(), Gated()
    clock.monotonic.return_value = 0.0
    monkeypatch.setattr(penstock_server.blocks.read_ahead, "time", clock)
    ahead = ReadAhead()
    ahead.want("busy", 0, needed(0), load)  # keeps the only thread
    ahead.want("quick", 0, [(10, 900)], load)
    ahead.want("slow", 0, [(20, 50)], load)
    clock.monotonic.return_value = 10.0
    ahead.want("quick", 1000, [(11, 1100), (12, 1700)], load)  # 100 positions a second: in 1 s, and in 7 s
    ahead.want("slow", 10, [(21, 13)], load)  # 1 a second: in 3 s
    load.gate.release(4)
    until(lambda: load.loaded == [0, 11, 21, 12])


def test_read_ahead_drops_blocks_of_an_earlier_position() -> None:
    load, ahead = Gated(), ReadAhead()
    ahead.want("job", 0, needed(0, 1, 2, 3), load)
    load.gate.release()
    until(lambda: len(load.loaded) == 1)
    ahead.want("job", 1, needed(9), load)
    load.gate.release(5)
    until(lambda: 9 in load.loaded)
    assert 3 not in load.loaded


def test_read_ahead_makes_several_blocks_in_parallel_and_begins_none_twice() -> None:
    load, ahead = Gated(), ReadAhead(3)
    ahead.want("job", 0, needed(1, 2, 3, 4), load)
    until(lambda: len(load.begun) == 3)
    ahead.want("job", 1, needed(2, 3, 4, 5), load)
    load.gate.release(5)
    until(lambda: len(load.loaded) == 5)
    assert sorted(load.begun) == [1, 2, 3, 4, 5]


def test_read_ahead_is_due_when_a_job_is_far_ahead_or_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ahead, due = Mock(), ReadAhead(), list[int]()
    clock.monotonic.return_value = 0.0
    monkeypatch.setattr(penstock_server.blocks.read_ahead, "time", clock)

    def pass_by(*positions: int) -> None:
        for position in positions:
            if ahead.is_due("job", position, 100):
                due.append(position)
                ahead.want("job", position, [], Mock())

    pass_by(500, 524, 410, 500)
    assert due == [500]
    pass_by(525, 424)
    assert due == [500, 525, 424]
    clock.monotonic.return_value = 30.0
    pass_by(425)  # long after the last request
    assert due == [500, 525, 424, 425]


def test_read_ahead_keeps_a_job_while_requests_come_and_drops_it_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, load = Mock(), Gated()
    clock.monotonic.return_value = 0.0
    monkeypatch.setattr(penstock_server.blocks.read_ahead, "time", clock)
    ahead = ReadAhead()
    ahead.want("job", 0, needed(1, 2, 3, 4), load)
    for seconds in (20.0, 40.0):
        clock.monotonic.return_value = seconds
        assert not ahead.is_due("job", 0, 4)
    load.gate.release(2)
    until(lambda: load.loaded == [1, 2] and len(load.begun) == 3)
    clock.monotonic.return_value = 80.0
    load.gate.release(2)
    until(lambda: load.loaded == [1, 2, 3])
    time.sleep(0.05)
    assert load.begun == [1, 2, 3]


def test_read_ahead_is_for_requests_of_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_numbered(tmp_path / "data" / "numbers", 40)
    steps: list[int] = []
    monkeypatch.setattr(Plan, "read_ahead", lambda _plan, _epoch, step: steps.append(step))
    catalog = open_catalog(tmp_path / "data", None, BlockStore(tmp_path / "cache"))
    client = TestClient(create_app(catalog, InFlight(1 << 30)))
    batches = "/v1/datasets/numbers/epochs/0/ranks/0/batches"
    assert client.get(f"{batches}?start=1&stop=3&batch_size=2&seq_len=4").status_code == 200
    assert steps == [2]
    assert client.get(f"{batches}/4/provenance?batch_size=2&seq_len=4").status_code == 200
    assert steps == [2]
    assert client.get(f"{batches}/5?batch_size=2&seq_len=4").status_code == 200
    assert steps == [2, 5]


@pytest.mark.parametrize(
    ("spec", "room", "num_loaded"),
    [
        ("shuffle=none", 100, 12),
        ("shuffle=none", 5, 4),  # beside the blocks of the step, those that the budget has room for
        ("shuffle=window&window=10", 100, 12),
        ("shuffle=window&window=40", 7, 4),
    ],
)
def test_read_ahead_loads_the_next_blocks_within_its_budget(tmp_path: Path, spec: str, room: int, num_loaded: int) -> None:
    ids = np.random.default_rng(0).integers(0, 1 << 16, (120, 500)).tolist()
    folder = write_shards(tmp_path / "data" / "numbers", "input_ids", [ids], type_=pa.list_(pa.int32()), row_group_size=10)
    block_bytes = int(open_snapshot(folder).bytes_per_block.max())
    cache = tmp_path / "cache"
    catalog = open_catalog(tmp_path / "data", None, BlockStore(cache, room * block_bytes, 6))
    client = TestClient(create_app(catalog, InFlight(1 << 30)))
    for rank in range(3):
        batch = f"/v1/datasets/numbers/epochs/0/ranks/{rank}/batches/0?world_size=3&batch_size=10&seq_len=4&{spec}"
        assert client.get(batch).status_code == 200
    until(lambda: len(list(cache.glob("*.block"))) >= num_loaded)
    time.sleep(0.1)
    assert num_loaded <= len(list(cache.glob("*.block"))) <= room + 3


def test_blocks_that_wait_are_used_and_leave_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock_server.blocks.cache, "_TOUCH_SECONDS", 0.0)
    snapshot = open_snapshot(write_numbered(tmp_path / "numbers", 640))
    budget = 10 * int(Blocks(snapshot, BlockStore(tmp_path / "other")).expected_bytes.max())
    blocks = Blocks(snapshot, BlockStore(tmp_path / "cache", budget))
    blocks.get([3])
    [waiting] = (tmp_path / "cache").glob("*.block")
    os.utime(waiting, (1, 1))
    wanted: list[tuple[int, int]] = []
    monkeypatch.setattr(blocks.ahead, "want", lambda _job, _position, needed, _load: wanted.extend(needed))
    blocks.read_ahead("job", 0, [(block, 32 * block) for block in range(20)], by_rows=False)
    assert waiting.stat().st_mtime > 1
    expected = blocks.expected_bytes
    assert 7 < len(wanted) < 10
    assert expected[: len(wanted)].sum() + expected.max() + budget // 32 <= budget
