import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.packing import Concat, Piece, Rows, fill, fill_mask, truncate


def pieces(*lists: list[int]) -> list[Piece]:
    source = np.array([token for tokens in lists for token in tokens], np.uint16)
    starts = np.cumsum([0, *map(len, lists)]).tolist()
    return [Piece("tokens", source, start, len(tokens)) for start, tokens in zip(starts, lists, strict=False)]


block_tokens = st.lists(st.integers(0, 30), min_size=1, max_size=12).map(np.array)


def ring_positions(packing: Concat, tokens_per_block: npt.NDArray[np.int64]) -> list[list[int]]:
    """The tokens of every sequence by their place on the ring, in the order of blocks."""
    blocks = np.repeat(np.arange(len(tokens_per_block)), packing.sequences_per_block)
    indices = np.concatenate([np.arange(n) for n in packing.sequences_per_block.tolist()])
    block_starts = np.cumsum(tokens_per_block) - tokens_per_block
    made: list[list[int]] = [[] for _ in blocks]
    for number, block, start, stop in zip(*(part.tolist() for part in packing.spans(blocks, indices)), strict=True):
        assert 0 <= start < stop <= tokens_per_block[block]
        made[number].extend(range(int(block_starts[block]) + start, int(block_starts[block]) + stop))
    return made


@given(block_tokens, st.integers(1, 40), st.data())
def test_concat_cuts_the_ring_token_for_token(tokens: npt.NDArray[np.int64], seq_len: int, data: st.DataObject) -> None:
    shift = data.draw(st.integers(0, seq_len - 1))
    packing, total = Concat(tokens, seq_len, shift), int(tokens.sum())
    assert packing.sequences_per_block.sum() == packing.num_sequences == total // seq_len
    sequences = ring_positions(packing, tokens) if packing.num_sequences else []
    assert all(len(sequence) == seq_len for sequence in sequences)
    flat = [position for sequence in sequences for position in sequence]
    assert flat == [(shift + n) % total for n in range(len(flat))]
    assert len(set(flat)) == len(flat) > total - seq_len


@given(block_tokens.filter(any), st.integers(1, 9), st.data())
def test_any_choice_of_sequences_gives_what_all_give(tokens: npt.NDArray[np.int64], seq_len: int, data: st.DataObject) -> None:
    packing = Concat(tokens, seq_len, seq_len // 2)
    blocks = np.repeat(np.arange(len(tokens)), packing.sequences_per_block)
    indices = np.concatenate([np.arange(n) for n in packing.sequences_per_block.tolist()])
    chosen = np.array(data.draw(st.lists(st.integers(0, max(len(blocks) - 1, 0)), max_size=5)), np.int64)
    chosen = chosen if len(blocks) else chosen[:0]
    alone = packing.spans(blocks[chosen], indices[chosen])
    together = packing.spans(blocks, indices)
    expected = [
        (turn, *part)
        for turn, number in enumerate(chosen.tolist())
        for owner, *part in zip(*(values.tolist() for values in together), strict=True)
        if owner == number
    ]
    assert list(zip(*(values.tolist() for values in alone), strict=True)) == expected


@given(block_tokens.filter(any), st.integers(1, 9), st.data())
def test_holding_is_the_inverse_of_spans(tokens: npt.NDArray[np.int64], seq_len: int, data: st.DataObject) -> None:
    packing = Concat(tokens, seq_len, data.draw(st.integers(0, seq_len - 1)))
    blocks = np.repeat(np.arange(len(tokens)), packing.sequences_per_block)
    indices = np.concatenate([np.arange(n) for n in packing.sequences_per_block.tolist()])
    block = data.draw(st.sampled_from(np.flatnonzero(tokens).tolist()))
    start = data.draw(st.integers(0, int(tokens[block]) - 1))
    stop = data.draw(st.integers(start + 1, int(tokens[block])))
    expected = {
        (int(blocks[owner]), int(indices[owner]))
        for owner, where, first, last in zip(*(values.tolist() for values in packing.spans(blocks, indices)), strict=True)
        if where == block and first < stop and last > start
    }
    held = packing.holding(block, start, stop)
    assert set(zip(*(values.tolist() for values in held), strict=True)) == expected


def test_a_row_is_a_sequence() -> None:
    packing = Rows(np.array([2, 0, 3]))
    assert packing.sequences_per_block.tolist() == [2, 0, 3]
    spans = packing.spans(np.array([2, 0]), np.array([1, 0]))
    assert [values.tolist() for values in spans] == [[0, 1], [2, 0], [1, 0], [2, 1]]
    assert [values.tolist() for values in packing.holding(2, 1, 3)] == [[2, 2], [1, 2]]


def test_a_mask_marks_the_tokens_of_its_features() -> None:
    source = np.arange(9, dtype=np.uint16)
    line = [Piece("prompt", source, 0, 2), Piece("response", source, 2, 3), Piece("prompt", source, 5, 1)]
    out = np.full((1, 6), 7, np.uint8)
    fill_mask(out, [line], ("response",))
    assert out.tolist() == [[0, 0, 1, 1, 1, 0]]


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
