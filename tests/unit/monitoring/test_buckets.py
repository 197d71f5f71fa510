"""The last hour in buckets, and sums that fade."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.monitoring.buckets import NUM_BUCKETS, Buckets, Fading, summed

AMOUNTS = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 100)), max_size=30)


def held(amounts: list[tuple[int, int]]) -> Buckets:
    buckets = Buckets()
    for bucket, amount in amounts:
        buckets.add(bucket, amount)
    return buckets


@given(AMOUNTS.map(sorted), st.integers(0, 300))
def test_buckets_hold_the_last_hour(amounts: list[tuple[int, int]], later: int) -> None:
    until = max((bucket for bucket, _ in amounts), default=0) + later
    wanted = [float(sum(a for b, a in amounts if b == bucket)) for bucket in range(until - NUM_BUCKETS + 1, until + 1)]
    assert held(amounts).until(until) == wanted


@given(AMOUNTS)
def test_packed_buckets_are_the_same(amounts: list[tuple[int, int]]) -> None:
    buckets = held(amounts)
    assert Buckets(*buckets.pack()).until(buckets.newest) == buckets.until(buckets.newest)


@given(AMOUNTS, AMOUNTS, st.integers(0, 200))
def test_sum_has_the_amounts_of_both(some: list[tuple[int, int]], others: list[tuple[int, int]], later: int) -> None:
    one, other = held(some), held(others)
    both, newest = one + other, max(one.newest, other.newest)
    assert both.newest == newest
    assert both.until(newest + later) == summed([one, other], newest + later)


def test_buckets_of_several_processes_are_summed() -> None:
    assert summed([held([(5, 1), (7, 2)]), held([(7, 3)])], 8)[-4:] == [1.0, 0.0, 5.0, 0.0]
    assert summed([], 8) == [0.0] * NUM_BUCKETS


def test_bucket_is_set_to_its_last_amount() -> None:
    buckets = Buckets()
    for amount in (5.0, 3.0):
        buckets.set(9, amount)
    assert buckets.until(9)[-1] == 3.0


def test_amount_counts_half_after_ten_seconds() -> None:
    fading = Fading()
    fading.add(100.0, {"a": 8.0})
    fading.add(110.0, {"a": 1.0, "b": 2.0})
    assert (fading["a"], fading["b"], fading["c"]) == (5.0, 2.0, 0.0)
    assert fading.values(120.0) == pytest.approx({"a": 2.5, "b": 1.0})
    assert Fading(*fading.pack()).values(120.0) == fading.values(120.0)
