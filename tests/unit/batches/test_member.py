"""Planned epochs: each is planned once, and what is remembered of them stays within its budget."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from penstock_server.batches import member as planned
from penstock_server.batches.member import PlannedEpoch, PlannedEpochs
from penstock_server.order.arrays import IntArray
from penstock_server.order.length_buckets import LengthOrder
from penstock_server.order.packing import Rows
from penstock_server.order.shuffle import EpochOrder

POOLS = 1000


def epoch(number: int) -> PlannedEpoch:
    rows = np.full(POOLS, 10)
    return Rows(rows, 8), EpochOrder(rows, np.ones(POOLS, np.int64), shuffle="window", window=500, seed=0, epoch=number)


def test_planned_epochs_plan_once_for_many_threads() -> None:
    made, epochs = Counter[int](), PlannedEpochs()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def plan(number: int) -> PlannedEpoch:
        made[number] += 1
        return epoch(number)

    try:
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda number: epochs.get(number, lambda: plan(number)), [*range(30)] * 20))
    finally:
        sys.setswitchinterval(before)
    assert set(made.values()) == {1}
    assert all(one is found[number % 30] for number, one in enumerate(found))


def test_planned_epochs_evict_the_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    def get(number: int) -> PlannedEpoch:
        def plan() -> PlannedEpoch:
            made.append(number)
            return epoch(number)

        return epochs.get(number, plan)

    packing, order = epoch(0)
    each = packing.samples_per_pool.nbytes + order.nbytes
    assert each >= 3 * 8 * POOLS
    monkeypatch.setattr(planned, "_BUDGET_BYTES", 5 * (each + planned._MIN_BYTES))
    epochs = PlannedEpochs()
    for number in (0, 1, 2, 3, 4, 0, 5, 0, 2, 5, 1):
        get(number)
    assert made == [0, 1, 2, 3, 4, 5, 1]
    monkeypatch.setattr(planned, "_BUDGET_BYTES", 0)
    epochs = PlannedEpochs()
    for number in (6, 7, 8, 9, 6, 7, 8, 9, 10, 6):
        get(number)
    assert made[7:] == [6, 7, 8, 9, 10, 6]  # four stay in any case


def test_planned_epochs_of_snapshots_do_not_wait_for_each_other() -> None:
    may_end = threading.Event()

    def slow() -> PlannedEpoch:
        assert may_end.wait(30)
        return epoch(0)

    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(PlannedEpochs().get, 0, slow)
        PlannedEpochs().get(0, lambda: epoch(0))
        assert not waiting.done()
        may_end.set()
        waiting.result(30)


def test_length_order_sorts_a_window_once_for_many_threads() -> None:
    rows, asked = np.full(POOLS, 10), list[int]()

    def lengths(pools: IntArray, indices: IntArray) -> IntArray:
        asked.append(order.window(int(order.positions(pools[:1], indices[:1])[0])))
        time.sleep(0.005)
        return pools

    order = EpochOrder(rows, np.ones(POOLS, np.int64), shuffle="window", window=500, seed=0, epoch=0)
    sorted_ = LengthOrder(order, lengths, 8, 1)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: sorted_.samples(np.array([500 * (number % 4)])), range(16)))
    assert sorted(asked) == [0, 1, 2, 3]
    for window in (0, 1, 2, 3, 0, 4, 0, 2, 3, 1):
        sorted_.samples(np.array([500 * window]))
    assert asked[4:] == [4, 1]
    assert sorted_.window(500) == 1
    assert np.array_equal(sorted_.pools_of_window(1), order.pools_of_window(1))
    assert np.array_equal(sorted_.ahead(500, 20), order.ahead(500, 20))


def test_length_order_leaves_nothing_for_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "_BUDGET_BYTES", 0)
    rows, epochs, orders = np.full(POOLS, 10), PlannedEpochs(), list[weakref.ref[LengthOrder]]()

    def plan() -> PlannedEpoch:
        order = EpochOrder(rows, np.ones(POOLS, np.int64), shuffle="window", window=500, seed=0, epoch=0)
        sorted_ = LengthOrder(order, lambda pools, _: pools, 8, 1)
        sorted_.samples(np.arange(10 * POOLS))
        orders.append(weakref.ref(sorted_))
        return Rows(rows, 8), sorted_

    gc.disable()
    try:
        for number in range(6):
            epochs.get(number, plan)
        assert [order() is None for order in orders] == [True, True, False, False, False, False]
    finally:
        gc.enable()
