from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from penstock.spec import Spec, Split
from penstock_server.batches import assemble as stand_ins
from penstock_server.batches.assemble import rows_replaced_by, usable_rows
from penstock_server.batches.member import Member
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import open_catalog
from penstock_server.problems import BadParameter, BadRow
from support.corpora import write_shards

Opener = Callable[..., Member]
REPLACE = 'on_bad_row = "replace"\nmax_bad_share = 0.99\n'


@pytest.fixture
def open_holes(tmp_path: Path) -> Opener:
    """Opens shards of three row groups of three rows, of token lists."""

    def opened(rows: list[list[int]], toml: str = REPLACE, split: Split = "all") -> Member:
        folder = tmp_path / "data" / "holes"
        shards = [rows[start : start + 9] for start in range(0, len(rows), 9)]
        write_shards(folder, "tokens", shards, type_=pa.list_(pa.int32()), row_group_size=3)
        (folder / "penstock.toml").write_text(toml)
        catalog = open_catalog(folder.parent, None, BlockStore(tmp_path / "cache"))
        [member] = catalog.plan("holes", Spec(batch_size=1, split=split)).members
        return member

    return opened


def served(member: Member, index: int) -> tuple[int, list[int]]:
    """Where all rows of a block are served from."""
    [block] = member.blocks.get([index])
    other, found, rows = usable_rows(member, index, block, np.arange(block.num_rows))
    assert not set(rows.tolist()) & set(found.bad)
    return other, rows.tolist()


def inverse(member: Member, index: int, row: int) -> dict[int, list[int]]:
    [block] = member.blocks.get([index])
    return {other: rows.tolist() for other, rows in rows_replaced_by(member, index, block, row)}


def test_bad_row_is_replaced_by_the_next_good_row(open_holes: Opener) -> None:
    member = open_holes([[1], [], [3], [4], [5], []])
    assert [served(member, 0), served(member, 1)] == [(0, [0, 2, 2]), (1, [0, 1, 0])]
    assert inverse(member, 0, 2) == {0: [1, 2]}
    assert inverse(member, 1, 0) == {1: [0, 2]}
    assert inverse(member, 1, 2) == {}


def test_block_without_good_rows_is_replaced_by_the_next_block(open_holes: Opener) -> None:
    member = open_holes([[], [], [], [4], [], [6], [], [], [], [], [], []])
    assert [served(member, index) for index in range(4)] == [(1, [0, 2, 2]), (1, [0, 2, 2]), (1, [0, 2, 2]), (1, [0, 2, 2])]
    assert inverse(member, 1, 2) == {1: [1, 2], 0: [1, 2], 3: [1, 2], 2: [1, 2]}
    assert inverse(member, 1, 0) == {1: [0], 0: [0], 3: [0], 2: [0]}
    assert inverse(member, 0, 0) == {}


def test_shorter_block_repeats_when_it_replaces_a_longer_one(open_holes: Opener) -> None:
    member = open_holes([[], [], [], [4], [5]])
    assert served(member, 0) == (1, [0, 1, 0])
    assert [inverse(member, 1, row) for row in (0, 1)] == [{1: [0], 0: [0, 2]}, {1: [1], 0: [1]}]


def test_replacement_uses_the_nearest_good_block(open_holes: Opener) -> None:
    member = open_holes([[], [], [], [4], [5], [6], [7], [8], [9]])
    assert [served(member, index)[0] for index in range(3)] == [1, 1, 2]
    assert [inverse(member, index, 0) for index in (1, 2)] == [{1: [0], 0: [0]}, {2: [0]}]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_replacement_stays_within_a_split_and_has_an_inverse(open_holes: Opener, split: str) -> None:
    member = open_holes([[n] if n % 9 > 4 else [] for n in range(90)], REPLACE + "validation = 0.4", split)
    blocks = member.blocks.get(range(30), split)
    expected: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index, block in enumerate(blocks):
        other, found, rows = usable_rows(member, index, block, np.arange(block.num_rows))
        assert found.stored_rows.tolist() == blocks[other].stored_rows.tolist()
        for row, good in enumerate(rows.tolist()):
            expected.setdefault((other, good), []).append((index, row))
    for index, block in enumerate(blocks):
        for row in range(block.num_rows):
            told = [(other, number) for other, rows in rows_replaced_by(member, index, block, row) for number in rows.tolist()]
            assert sorted(told) == expected.get((index, row), [])


def test_bad_row_is_an_error_with_its_place_when_policy_is_fail(open_holes: Opener) -> None:
    member = open_holes([[1], [], [3], [], [], []], 'on_bad_row = "fail"')
    [block] = member.blocks.get([0])
    assert usable_rows(member, 0, block, np.array([0, 2]))[2].tolist() == [0, 2]
    with pytest.raises(BadRow, match=r"row 1 of row group 0 in part-000.parquet: is empty; 1 of the 3 rows there cannot"):
        usable_rows(member, 0, block, np.array([0, 1]))
    with pytest.raises(BadRow, match=r"row 0 of row group 1 .* 3 of the 3 rows"):
        served(member, 1)
    assert inverse(member, 0, 0) == {0: [0]}


def test_empty_split_error_names_its_share_and_filter(open_holes: Opener) -> None:
    with pytest.raises(BadParameter, match=r"in split=validation that can be used\. Raise .* now 0\.01\), .* the data\."):
        open_holes([[1]], "validation = 0.01", "validation")
    with pytest.raises(BadParameter, match=r"that is kept by its filter and can be used\. Mend the filter or the data\."):
        open_holes([[1]], 'filter = "tokens is null"')


def test_replacement_search_is_bounded(open_holes: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins, "_MAX_BLOCKS", 2)
    member = open_holes([[]] * 18 + [[1]] * 3)
    with pytest.raises(BadRow, match=r"no row of row group 0 in part-001.parquet can be used, nor .*quarantine"):
        served(member, 3)
    assert served(member, 4) == (6, [0, 1, 2])
    assert inverse(member, 6, 0) == {6: [0], 5: [0], 4: [0]}
