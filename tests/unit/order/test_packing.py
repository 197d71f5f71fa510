from collections import Counter
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.index.index import keep_bins
from penstock_server.order.arrays import starts_of
from penstock_server.order.best_fit import POOL_ROWS, BestFit, PackedPools, pack, pools_of
from penstock_server.order.packing import STREAM, Concat, Packing, Rows, SplitRows

block_tokens = st.lists(st.integers(0, 30), min_size=1, max_size=12).map(np.array)


def ring_positions(packing: Concat, tokens_per_block: npt.NDArray[np.int64]) -> list[list[int]]:
    """The tokens of every sample by their place on the ring, in the order of blocks."""
    blocks = np.repeat(np.arange(len(tokens_per_block)), packing.samples_per_pool)
    indices = np.concatenate([np.arange(n) for n in packing.samples_per_pool.tolist()])
    block_starts = np.cumsum(tokens_per_block) - tokens_per_block
    made: list[list[int]] = [[] for _ in blocks]
    for number, block, row, start, stop in zip(*(part.tolist() for part in packing.spans(blocks, indices)), strict=True):
        assert made[number] or block in packing.blocks_of(int(blocks[number]))
        assert row == STREAM
        assert 0 <= start < stop <= tokens_per_block[block]
        made[number].extend(range(int(block_starts[block]) + start, int(block_starts[block]) + stop))
    return made


@given(block_tokens, st.integers(1, 40), st.data())
def test_concat_cuts_the_ring_of_tokens(tokens: npt.NDArray[np.int64], seq_len: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, seq_len - 1))
    stride = seq_len - overlap
    shift = data.draw(st.integers(0, stride - 1))
    packing, total = Concat(tokens, seq_len, shift, overlap), int(tokens.sum())
    assert packing.samples_per_pool.sum() == packing.num_samples == max(0, total - overlap) // stride
    samples = ring_positions(packing, tokens) if packing.num_samples else []
    assert samples == [[(shift + s * stride + n) % total for n in range(seq_len)] for s in range(packing.num_samples)]
    once = [position for sample in samples for position in sample[:stride]]
    assert len(set(once)) == len(once)
    assert len(once) > total - seq_len
    assert shift or all(samples[i] == sorted(samples[i]) for i in range(len(samples)))


@given(block_tokens.filter(any), st.integers(1, 9), st.data())
def test_packing_spans_of_a_subset_equal_those_of_all(tokens: npt.NDArray[np.int64], seq_len: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, seq_len - 1))
    packing = Concat(tokens, seq_len, (seq_len - overlap) // 2, overlap)
    blocks = np.repeat(np.arange(len(tokens)), packing.samples_per_pool)
    indices = np.concatenate([np.arange(n) for n in packing.samples_per_pool.tolist()])
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
def test_packing_holding_is_the_inverse_of_spans(tokens: npt.NDArray[np.int64], seq_len: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, seq_len - 1))
    packing = Concat(tokens, seq_len, data.draw(st.integers(0, seq_len - overlap - 1)), overlap)
    blocks = np.repeat(np.arange(len(tokens)), packing.samples_per_pool)
    indices = np.concatenate([np.arange(n) for n in packing.samples_per_pool.tolist()])
    block = data.draw(st.sampled_from(np.flatnonzero(tokens).tolist()))
    start = data.draw(st.integers(0, int(tokens[block]) - 1))
    stop = data.draw(st.integers(start + 1, int(tokens[block])))
    expected = {
        (int(blocks[owner]), int(indices[owner]))
        for owner, where, _, first, last in zip(*(values.tolist() for values in packing.spans(blocks, indices)), strict=True)
        if where == block and first < stop and last > start
    }
    held = packing.holding(block, 0, start, stop)
    assert set(zip(*(values.tolist() for values in held), strict=True)) == expected


def test_rows_packing_has_one_sample_per_row() -> None:
    packing = Rows(np.array([2, 0, 3]), 9)
    assert packing.samples_per_pool.tolist() == [2, 0, 3]
    spans = packing.spans(np.array([2, 0]), np.array([1, 0]))
    assert [values.tolist() for values in spans] == [[0, 1], [2, 0], [1, 0], [0, 0], [9, 9]]
    assert [values.tolist() for values in packing.holding(2, 1, 30, 40)] == [[2], [1]]
    assert packing.blocks_of(2) == range(2, 3)


# The lengths of the rows of each block; a row of length 0 is a bad one.
blocks_of_lengths = st.lists(st.lists(st.integers(0, 25), max_size=8).map(np.array), min_size=1, max_size=6).map(
    lambda blocks: [block.astype(np.int64) for block in blocks]
)


def all_spans(packing: Packing) -> list[list[tuple[int, int, int, int]]]:
    """What every sample is made of, as (block, row, start, stop)."""
    pools = np.repeat(np.arange(len(packing.samples_per_pool)), packing.samples_per_pool)
    indices = np.concatenate([np.arange(n) for n in packing.samples_per_pool.tolist()])
    made: list[list[tuple[int, int, int, int]]] = [[] for _ in pools]
    if len(pools):
        for sample, *span in zip(*(values.tolist() for values in packing.spans(pools, indices)), strict=True):
            made[sample].append(tuple(span))
    return made


def check_every_token_once(packing: Packing, lengths: list[npt.NDArray[np.int64]], seq_len: int) -> None:
    seen = {
        (block, row): np.zeros(length, int) for block, rows in enumerate(lengths) for row, length in enumerate(rows.tolist())
    }
    samples = all_spans(packing)
    for spans in samples:
        assert 0 < sum(min(stop, len(seen[block, row])) - start for block, row, start, stop in spans) <= seq_len
        for block, row, start, stop in spans:
            seen[block, row][start:stop] += 1
    assert all((count == 1).all() for count in seen.values())
    places = [(pool, i) for pool, n in enumerate(packing.samples_per_pool.tolist()) for i in range(n)]
    for (pool, _), spans in zip(places, samples, strict=True):
        assert {block for block, *_ in spans} <= set(packing.blocks_of(pool))
    assert [block for pool in range(len(packing.samples_per_pool)) for block in packing.blocks_of(pool)] == list(
        range(len(lengths))
    )
    for (block, row), count in seen.items():
        held = packing.holding(block, row, 0, len(count))
        expected = [place for place, spans in zip(places, samples, strict=True) if (block, row) in {span[:2] for span in spans}]
        assert sorted(zip(*(values.tolist() for values in held), strict=True)) == expected


@given(blocks_of_lengths, st.integers(1, 12))
def test_split_rows_give_every_token_once(lengths: list[npt.NDArray[np.int64]], seq_len: int) -> None:
    counts = np.array([SplitRows.count(rows, seq_len).sum() for rows in lengths], np.int64)
    check_every_token_once(SplitRows(counts, lambda block: lengths[block], seq_len), lengths, seq_len)


@given(blocks_of_lengths, st.integers(1, 12), st.data())
def test_best_fit_loses_no_document_and_repeats_none(
    lengths: list[npt.NDArray[np.int64]], seq_len: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths))))) if len(lengths) > 1 else []
    starts = np.array(sorted({0, *cuts, len(lengths)}))
    packed = PackedPools.of(pack(np.concatenate(lengths[a:b]), seq_len) for a, b in pairwise(starts))
    draw_key = data.draw(st.none() | st.integers(0, 2**64 - 1))
    packing = BestFit(starts, packed, np.array([len(rows) for rows in lengths]), seq_len, draw_key)
    check_every_token_once(packing, lengths, seq_len)
    for spans in all_spans(packing):
        # Whole documents, but for those that no bin can hold.
        assert all(start == 0 or lengths[b][row] > seq_len for b, row, start, _ in spans)


def rows_together(lengths: npt.NDArray[np.int64], seq_len: int, draw_key: int | None) -> list[frozenset[int]]:
    """The rows that each sample of one pool holds, where it holds several."""
    packed = PackedPools.of([pack(lengths, seq_len)])
    packing = BestFit(np.array([0, 1]), packed, np.array([len(lengths)]), seq_len, draw_key)
    return [frozenset(row for _, row, *_ in spans) for spans in all_spans(packing) if len(spans) > 1]


def test_best_fit_combines_other_rows_in_each_epoch() -> None:
    lengths = np.random.default_rng(0).lognormal(5.3, 1.0, 20_000).astype(np.int64).clip(1)
    first, second = (rows_together(lengths, 2048, draw_key) for draw_key in (1, 2))
    assert len(first) > 2_000
    assert len(set(first) & set(second)) < 0.1 * len(first)  # those of long rows, whose lengths few others have
    assert rows_together(lengths, 2048, 1) == first


def test_best_fit_keeps_rows_of_unique_lengths_together() -> None:
    lengths = np.array([9, 7, 6, 4])  # 16 tokens: 9 + 7, and 6 + 4
    for draw_key in (None, 1, 2, 3):
        assert rows_together(lengths, 16, draw_key) == [frozenset([0, 1]), frozenset([2, 3])]


def test_best_fit_draws_rows_of_one_length_uniformly() -> None:
    lengths = np.array([9, 9, 9, 5, 5, 5])
    partners = Counter(tuple(sorted(rows)) for key in range(3_000) for rows in rows_together(lengths, 14, key))
    assert len(partners) == 9
    assert all(850 < count < 1150 for count in partners.values())  # 1,000 each, and 5 standard deviations


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60).map(np.array), st.integers(1, 40))
def test_best_fit_uses_the_fullest_bin_with_room(lengths: npt.NDArray[np.int64], seq_len: int) -> None:
    parts = [(min(seq_len, int(n) - first), row, first) for row, n in enumerate(lengths) for first in range(0, n, seq_len)]
    room_of: list[int] = []
    content: list[list[tuple[int, int]]] = []  # of bins: documents, and where in them parts begin
    filled = list[int]()  # bins, in the order in which they were filled last
    for size, row, first in sorted(parts, key=lambda part: -part[0]):  # those of one size as they come
        fits = [room_of[number] for number in filled if room_of[number] >= size]
        if fits:
            chosen = [number for number in filled if room_of[number] == min(fits)][-1]
            filled.remove(chosen)
        else:
            chosen = len(room_of)
            room_of.append(seq_len)
            content.append([])
        room_of[chosen] -= size
        content[chosen].append((row, first))
        filled.append(chosen)
    bins = pack(lengths, seq_len)
    tokens = [int((bins.lasts - bins.firsts)[a:b].sum()) for a, b in pairwise(bins.starts)]
    assert tokens == [seq_len - room for room in room_of]
    documents = list(zip(bins.rows.tolist(), bins.firsts.tolist(), strict=True))
    assert [documents[a:b] for a, b in pairwise(bins.starts)] == content


@given(st.lists(st.integers(1, 16), min_size=1, max_size=60).map(np.array), st.integers(16, 40))
def test_best_fit_opens_a_bin_only_when_none_has_room(lengths: npt.NDArray[np.int64], seq_len: int) -> None:
    bins = pack(lengths, seq_len)
    fill_of = [int((bins.lasts - bins.firsts)[a:b].sum()) for a, b in pairwise(bins.starts)]
    assert all(0 < tokens <= seq_len for tokens in fill_of)
    # Two bins that are both at most half full would have been one.
    assert sum(tokens <= seq_len // 2 for tokens in fill_of) <= 1


@given(st.lists(st.integers(1, 4), min_size=1, max_size=30).map(np.array), st.integers(0, 9))
def test_pools_join_small_row_groups(groups: npt.NDArray[np.int64], seed: int) -> None:
    rows = np.random.default_rng(seed).integers(1, POOL_ROWS // 2, groups.sum())
    starts, per_group = pools_of(rows, groups)
    assert starts[0] == 0
    assert starts[-1] == len(rows)
    assert (np.diff(starts) > 0).all()
    assert per_group.sum() == len(starts) - 1
    first_block = starts_of(groups)
    for pool, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        own = np.unique(np.searchsorted(first_block, np.arange(begin, end), side="right") - 1)
        assert end - begin == 1 or (groups[own] == 1).all(), pool
        if (groups[own] == 1).all():  # it is full with its last block, or a large row group or nothing follows
            assert rows[begin : end - 1].sum() < POOL_ROWS
            assert rows[begin:end].sum() >= POOL_ROWS or end == len(rows) or groups[int(own[-1]) + 1] > 1


def test_pools_close_at_their_row_limit() -> None:
    starts, per_group = pools_of(np.full(5, POOL_ROWS // 2), np.ones(5, np.int64))
    assert (starts.tolist(), per_group.tolist()) == ([0, 2, 4, 5], [1, 1, 1])


@given(st.lists(st.lists(st.integers(0, 40), max_size=30).map(lambda pool: np.array(pool, np.int64)), min_size=1, max_size=5))
def test_stored_bins_equal_packed_bins(pools: list[npt.NDArray[np.int64]]) -> None:
    made = [pack(pool, 16) for pool in pools]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "some.index"
        kept = [keep_bins(path, len(pools), lambda: made), keep_bins(path, len(pools), list), PackedPools.of(made)]
        for packed in kept:
            assert packed.bins_per_pool.tolist() == [bins.num_bins for bins in made]
            everywhere = [(pool, number) for pool, bins in enumerate(made) for number in range(bins.num_bins)]
            pool_of, number_of = np.array(everywhere, np.int64).reshape(-1, 2).T
            together = packed.documents(pool_of, number_of, None)
            assert together[0].tolist() == [size for bins in made for size in np.diff(bins.starts).tolist()]
            assert together[1].tolist() == [row for bins in made for row in bins.rows.tolist()]
            assert together[2].tolist() == [first for bins in made for first in bins.firsts.tolist()]
            for pool, bins in enumerate(made):
                for number, (start, stop) in enumerate(pairwise(bins.starts.tolist())):
                    _, documents, firsts = packed.documents(np.array([pool]), np.array([number]), None)
                    assert documents.tolist() == bins.rows[start:stop].tolist()
                    assert firsts.tolist() == bins.firsts[start:stop].tolist()
        for content in (path.read_bytes()[:-1], b"", bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]):
            path.write_bytes(content)
            assert keep_bins(path, len(pools), lambda: made).bins_per_pool.tolist() == kept[0].bins_per_pool.tolist()
        assert {file.name for file in Path(folder).iterdir()} == {".counting", "some.index"}


def test_bins_are_kept_in_memory_when_storing_fails(tmp_path: Path) -> None:
    made = [pack(np.array([3, 5, 16]), 16)]
    packed = keep_bins(tmp_path / "gone" / "some.index", 1, lambda: made)
    assert packed.bins_per_pool.tolist() == [2]
