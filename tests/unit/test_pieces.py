import numpy as np
import pytest

from penstock_server.batches.pieces import Pieces

UINT16, UINT32 = np.dtype(np.uint16), np.dtype(np.uint32)


def columns(*rows: tuple[int, ...]) -> list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    return list(np.array(rows, np.int64).T)


def test_what_no_piece_covers_is_zero_however_long_it_is() -> None:
    pieces, numbers = Pieces(), np.arange(1000, dtype=np.uint16)
    pieces.copy([numbers[500:], numbers], UINT16, *columns((64, 0, 5, 3), (300_000, 1, 10, 4)))
    pieces.copy([numbers], UINT32, *columns((1_000_000, 0, 998, 2)))
    pieces.fill(7, UINT16, *columns((70, 2)))
    body = np.frombuffer(pieces.join(1_500_000), np.uint16)
    expected = np.zeros(750_000, np.uint16)
    expected[32:37] = [505, 506, 507, 7, 7]
    expected[150_000:150_004] = [10, 11, 12, 13]
    expected[500_000:500_004] = [998, 0, 999, 0]
    assert np.array_equal(body, expected)


def test_many_pieces_stand_one_behind_the_other() -> None:
    pieces, numbers = Pieces(), np.arange(5000, dtype=np.uint16)
    pieces.copy([numbers], UINT16, *columns(*((2 * n, 0, n, 1) for n in range(5000))))
    assert np.array_equal(np.frombuffer(pieces.join(10_000), np.uint16), numbers)


def test_what_will_be_copied_is_told_beforehand_and_what_is_filled_in_is_not() -> None:
    pieces, numbers = Pieces(), np.arange(10, dtype=np.uint16)
    pieces.fill(7, UINT32, *columns((0, 2)))
    pieces.copy([numbers], UINT32, *columns((8, 0, 3, 2)))
    assert list(pieces.spans()) == [(numbers.ctypes.data + 6, 4)]


def test_pieces_that_overlap_are_no_body() -> None:
    pieces = Pieces()
    pieces.copy([np.arange(9, dtype=np.uint16)], UINT16, *columns((0, 0, 0, 5), (8, 0, 0, 3)))
    with pytest.raises(AssertionError):
        pieces.join(14)
