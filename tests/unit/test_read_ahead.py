import threading
import time
from collections.abc import Callable

import pytest

import penstock_server.storage.read_ahead
from penstock_server.problems import BadRow
from penstock_server.storage.read_ahead import ReadAhead


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_job_gets_its_blocks_once_and_a_fault_stops_nothing() -> None:
    loaded: list[int] = []

    def load(block: int) -> None:
        loaded.append(block)
        if block == 2:
            raise BadRow("no")

    ahead = ReadAhead()
    for _ in range(3):
        ahead.want("job", 0, lambda: [1, 2, 3], load)
    until(lambda: len(loaded) == 3)
    ahead.want("job", 1, lambda: [4], load)
    until(lambda: loaded == [1, 2, 3, 4])


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
