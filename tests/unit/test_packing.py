import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.packing import Piece, fill, truncate


def pieces(*lists: list[int]) -> list[Piece]:
    source = np.array([token for tokens in lists for token in tokens], np.uint16)
    starts = np.cumsum([0, *map(len, lists)]).tolist()
    return [Piece(source, start, len(tokens)) for start, tokens in zip(starts, lists, strict=False)]


token_lists = st.lists(st.lists(st.integers(0, 99), max_size=9), min_size=1, max_size=3)


@given(token_lists, st.integers(1, 12))
def test_truncating_keeps_the_first_tokens_of_the_pieces_in_turn(lists: list[list[int]], seq_len: int) -> None:
    kept = truncate(pieces(*lists), seq_len)
    tokens = [t for p in kept for t in p.source[p.start : p.start + p.length].tolist()]
    assert tokens == [token for tokens in lists for token in tokens][:seq_len]
    assert len(kept) == len(lists)


@given(st.lists(token_lists, min_size=1, max_size=4))
def test_lines_are_filled_from_the_left_and_padded(batch: list[list[list[int]]]) -> None:
    width = max(sum(map(len, lists)) for lists in batch) + 1
    out = np.zeros((len(batch), width), np.uint16)
    fill(out, [pieces(*lists) for lists in batch], pad_id=77)
    for line, lists in zip(out.tolist(), batch, strict=True):
        tokens = [token for tokens in lists for token in tokens]
        assert line == tokens + [77] * (width - len(tokens))
