import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.batches import writer as pieces_module
from penstock_server.batches.writer import Pieces
from penstock_server.blocks import block as joined_module
from penstock_server.blocks.block import ListColumn, ListColumns

UINT8, UINT16, UINT32 = (np.dtype(name) for name in ("uint8", "uint16", "uint32"))


def lists(*values: npt.NDArray[np.integer]) -> ListColumns:
    return ListColumns(
        [ListColumn.of(pa.LargeListArray.from_arrays(pa.array([0, len(own)], pa.int64()), pa.array(own))) for own in values]
    )


def columns(*rows: tuple[int, ...], width: int = 4) -> list[npt.NDArray[np.int64]]:
    return list(np.array(rows, np.int64).reshape(-1, width).T)


def test_pieces_fill_gaps_with_zeros() -> None:
    pieces, numbers = Pieces(), np.arange(1000, dtype=np.uint16)
    pieces.copy(lists(numbers[500:], numbers), UINT16, *columns((64, 0, 5, 3), (300_000, 1, 10, 4)))
    pieces.copy(lists(numbers), UINT32, *columns((1_000_000, 0, 998, 2)))
    pieces.fill(7, UINT16, *columns((70, 2), width=2))
    body = np.frombuffer(pieces.join(1_500_000), np.uint16)
    expected = np.zeros(750_000, np.uint16)
    expected[32:37] = [505, 506, 507, 7, 7]
    expected[150_000:150_004] = [10, 11, 12, 13]
    expected[500_000:500_004] = [998, 0, 999, 0]
    assert np.array_equal(body, expected)


@st.composite
def some_pieces(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Gap before it, elements, number of the list or -1 for a filler, and where it begins there, of each."""
    some = st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(-1, 2), st.integers(0, 60))
    return draw(st.lists(some, max_size=30))


@given(some_pieces(), st.sampled_from([UINT8, UINT16, UINT32]), st.integers(0, 80), st.booleans(), st.booleans(), st.booleans())
def test_pieces_are_joined_at_their_offsets(
    some: list[tuple[int, int, int, int]],
    dtype: np.dtype[np.integer],
    rest: int,
    by_arrow: bool,
    is_far: bool,
    has_few_zeros: bool,
) -> None:
    random = np.random.default_rng(len(some))
    sources = [random.integers(0, 250, 100).astype(own) for own in (UINT8, UINT16, UINT32)]
    copies, fills, expected = [], [], []
    at = 0
    for gap, length, number, start in some:
        expected += [np.zeros(gap, np.uint8)]
        at += gap
        if number < 0:
            fills.append((at, length))
            expected.append(np.full(length, 7, dtype).view(np.uint8))
        else:
            copies.append((at, number, start, length))
            expected.append(sources[number][start : start + length].astype(dtype).view(np.uint8))
        at += length * dtype.itemsize
    expected.append(np.zeros(rest + 1, np.uint8))
    pieces = Pieces()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joined_module, "_FEW_PIECES", 0 if by_arrow else 1000)
        if has_few_zeros:
            patch.setattr(pieces_module, "_ZEROS", pa.py_buffer(bytes(7)))
        if is_far:
            patch.setattr(joined_module, "_REACH", max(50, at + rest + 1))
        pieces.copy(lists(*sources), dtype, *columns(*copies))
        pieces.fill(7, dtype, *columns(*fills, width=2))
        body = pieces.join(at + rest + 1)
    assert bytes(body) == b"".join(map(bytes, expected))
    assert not body.readonly


def test_pieces_are_cast_when_their_sources_are_longer_than_a_body_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_module, "_REACH", 100)
    pieces, numbers = Pieces(), np.arange(100, dtype=np.uint32)
    pieces.copy(lists(numbers), UINT8, *columns((0, 0, 0, 60), (60, 0, 60, 40)))
    assert bytes(pieces.join(100)) == numbers.astype(np.uint8).tobytes()


def test_pieces_list_their_copied_spans() -> None:
    pieces, numbers = Pieces(), lists(np.arange(10, dtype=np.uint16))
    pieces.fill(7, UINT32, *columns((0, 2), width=2))
    pieces.copy(numbers, UINT32, *columns((8, 0, 3, 2)))
    assert list(pieces.spans()) == [(numbers[0].values.ctypes.data + 6, 4)]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([(0, 0, 0, 5), (8, 0, 0, 3)], id="overlap"),
        pytest.param([(0, 0, 30, 3)], id="behind the end"),
        pytest.param([(0, 0, -1, 3)], id="before the start"),
        pytest.param([(0, 1, -9, 3)], id="before the start, cast"),
        pytest.param([(0, 1, 5, 4)], id="behind the end, cast"),
        pytest.param([(0, 0, 0, 8)], id="longer than the body"),
    ],
)
@pytest.mark.parametrize("few", [0, 1000])
def test_pieces_that_overlap_are_refused(rows: list[tuple[int, ...]], few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_module, "_FEW_PIECES", few)
    pieces = Pieces()
    pieces.copy(lists(np.arange(32, dtype=np.uint16), np.arange(8, dtype=np.uint8)), UINT16, *columns(*rows))
    with pytest.raises(IndexError):
        pieces.join(14)


def test_pieces_refuse_a_body_above_31_bits() -> None:
    pieces = Pieces()
    pieces.copy(lists(np.arange(32, dtype=np.uint16)), UINT16, *columns((0, 0, 0, 3)))
    with pytest.raises(IndexError):
        pieces.join(1 << 31)
