"""What is quick about arrays of whole numbers is what numpy says in a slower way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.order.arrays import by_value, distinct, in_order, places_in

some = st.lists(st.integers(0, 40), min_size=1, max_size=80)


@given(some, st.sampled_from([0, 3, 1000]), st.sampled_from([1, 1000]))
def test_places_in_finds_close_and_distant_values(numbers: list[int], least: int, stride: int) -> None:
    values = least + stride * np.array(numbers)
    ascending, places = np.unique(values, return_inverse=True)
    assert np.array_equal(distinct(values), ascending)
    assert np.array_equal(places_in(ascending, values), places)
    assert [(value, own.tolist()) for value, own in by_value(values)] == [
        (value, np.flatnonzero(values == value).tolist()) for value in ascending.tolist()
    ]


@pytest.mark.parametrize("far", [0, 1, 10_000])
def test_places_in_uses_a_table_for_close_values(far: int) -> None:
    values = np.array([100 + 7 + far, 100, 100])
    assert places_in(distinct(values), values).tolist() == [1, 0, 0]


@given(some, some)
def test_merge_of_tables_is_stable(one: list[int], other: list[int]) -> None:
    tables = [(np.array(column), np.arange(len(column)) + first) for column, first in ((one, 0), (other, 1000))]
    lines = [line for table in tables for line in zip(*(column.tolist() for column in table), strict=True)]
    first, second = in_order(tables)
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == sorted(lines)
