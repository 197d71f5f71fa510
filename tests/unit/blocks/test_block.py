"""Lists are looked up in several blocks at once as they are in each by itself."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.blocks.block import ListColumn, ListColumns

Lists = list[list[int]]

lists = st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=5)


def column_of(content: Lists) -> ListColumn:
    return ListColumn.of(pa.array(content, pa.large_list(pa.int32())))


@given(st.lists(st.tuples(lists, st.booleans()), min_size=1, max_size=4), st.data())
def test_list_columns_find_the_lists_of_each_block(of_blocks: list[tuple[Lists, bool]], data: st.DataObject) -> None:
    columns, contents = [], []
    for content, is_taken in of_blocks:
        column = column_of(content)
        if is_taken:
            taken = data.draw(st.lists(st.integers(0, len(content) - 1), max_size=6)) if content else []
            column, content = column.take(np.array(taken, np.int64)), [content[row] for row in taken]
        assert len(column.lengths) == len(content)
        assert column.is_whole != is_taken
        assert column.lengths.tolist() == list(map(len, content))
        columns.append(column)
        contents.append(content)
    places = [(number, row) for number, content in enumerate(contents) for row in range(len(content))]
    asked = data.draw(st.lists(st.sampled_from(places), max_size=9)) if places else []
    numbers, rows = np.array(asked, np.int64).reshape(-1, 2).T
    together = ListColumns(columns)

    starts, stops = together.bounds(numbers, rows)
    values = together.values(numbers, starts, stops - starts)

    assert values.tolist() == [value for number, row in asked for value in contents[number][row]]
    assert together.lengths(numbers, rows).tolist() == [len(contents[number][row]) for number, row in asked]
    assert together.are_whole == (not any(is_taken for _, is_taken in of_blocks))


@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("row", [-1, 2, 1 << 40])
@pytest.mark.parametrize("many", [1, 500])
def test_list_columns_refuse_a_row_that_does_not_exist(row: int, is_taken: bool, many: int) -> None:
    column = column_of([[1], [2, 3]])
    columns = ListColumns([column.take(np.arange(2)) if is_taken else column])

    with pytest.raises(IndexError):
        columns.bounds(np.zeros(many, np.int64), np.full(many, row))
