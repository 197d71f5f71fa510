import threading
import time
from collections.abc import Callable

import pytest

from penstock.prefetch import Prefetch

KIB = 1 << 10


def prefetch(fetch: Callable[[range], list[bytes]], steps: range, budget_bytes: int, gate: threading.Event) -> Prefetch[bytes]:
    return Prefetch(fetch, steps, nbytes=len, budget_bytes=budget_bytes, interrupt=gate.set)


def item(step: int) -> bytes:
    return step.to_bytes(4, "big") + bytes(KIB - 4)


def test_items_come_in_order_and_the_first_one_alone() -> None:
    runs: list[range] = []

    def fetch(steps: range) -> list[bytes]:
        runs.append(steps)
        return [item(step) for step in steps]

    steps = range(3, 500, 7)
    assert list(prefetch(fetch, steps, 64 * KIB, threading.Event())) == [item(step) for step in steps]
    assert len(runs[0]) == 1
    assert max(map(len, runs)) == 16  # a quarter of the budget
    assert [step for run in runs for step in run] == list(steps)


def test_it_fetches_ahead_within_the_budget_and_no_further() -> None:
    fetched = 0

    def fetch(steps: range) -> list[bytes]:
        nonlocal fetched
        fetched += len(steps)
        return [item(step) for step in steps]

    ahead = prefetch(fetch, range(10_000), 64 * KIB, threading.Event())
    next(ahead)
    before = -1
    while before != fetched:
        before = fetched
        time.sleep(0.2)
    assert 60 <= fetched <= 64 + 16 + 1
    ahead.close()


def test_a_failure_arrives_after_what_was_fetched_before_it() -> None:
    def fetch(steps: range) -> list[bytes]:
        if 7 in steps:
            raise ValueError("step 7 is cursed")
        return [item(step) for step in steps]

    ahead = prefetch(fetch, range(20), 64 * KIB, threading.Event())
    assert next(ahead) == item(0)
    with pytest.raises(ValueError, match="cursed"):
        list(ahead)
    with pytest.raises(ValueError, match="cursed"):
        next(ahead)


def test_closing_interrupts_a_fetch_and_leaves_no_thread() -> None:
    gate, entered = threading.Event(), threading.Event()

    def fetch(_: range) -> list[bytes]:
        entered.set()
        assert gate.wait(30)
        raise ConnectionError

    before = threading.active_count()
    ahead = prefetch(fetch, range(5), KIB, gate)
    assert entered.wait(30)
    ahead.close()
    ahead.close()
    assert threading.active_count() == before


def test_a_budget_of_nothing_still_has_room_for_one_run() -> None:
    steps = range(20)
    assert list(prefetch(lambda run: [item(step) for step in run], steps, 0, threading.Event())) == [item(s) for s in steps]


def test_a_fetch_may_give_less_than_it_was_asked_for() -> None:
    runs: list[int] = []

    def fetch(steps: range) -> list[bytes]:
        runs.append(len(steps))
        return [item(step) for step in steps[: 1 if len(runs) == 4 else None]]

    assert list(prefetch(fetch, range(40), 64 * KIB, threading.Event())) == [item(step) for step in range(40)]
    assert runs[:6] == [1, 2, 4, 8, 2, 4]  # and it begins small again


def test_what_is_there_is_told_and_its_bytes_until_it_is_closed() -> None:
    gate = threading.Event()

    def fetch(steps: range) -> list[bytes]:
        assert steps[0] == 0 or gate.wait(30)
        return [item(step) for step in steps]

    ahead = prefetch(fetch, range(3), 64 * KIB, gate)
    assert next(ahead) == item(0)
    assert (ahead.has_next, ahead.buffered_bytes) == (False, 0)
    gate.set()
    assert next(ahead) == item(1)
    assert (ahead.has_next, ahead.buffered_bytes) == (True, KIB)
    ahead.close()
    assert (ahead.has_next, ahead.buffered_bytes) == (False, 0)


def test_no_steps_are_no_items() -> None:
    assert list(prefetch(lambda _: [], range(0), KIB, threading.Event())) == []
