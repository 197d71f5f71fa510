import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.order.arrays import IntArray
from penstock_server.order.length_buckets import LengthOrder
from penstock_server.order.mixture import ENDLESS
from penstock_server.order.permutation import key, permute, permute_together, unpermute
from penstock_server.order.schedule import Schedule
from penstock_server.order.shuffle import EpochOrder
from penstock_server.problems import RankOutOfRange, StepOutOfRange

keys = st.integers(0, 2**64 - 1)


def groups_of(counts: IntArray, seed: int) -> IntArray:
    """The blocks, several of them in a row group here and there."""
    sizes: list[int] = []
    while (left := len(counts) - sum(sizes)) > 0:
        sizes.append(min(1 + key(seed, len(sizes), "test") % 3, left))
    return np.array(sizes)


block_counts = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any).map(np.array)
shuffles = st.sampled_from(["none", "window", "global"])


@given(st.integers(1, 3_000), keys)
def test_permutation_is_a_bijection_with_an_inverse(size: int, key: int) -> None:
    image = permute(np.arange(size), size, key)
    assert sorted(image) == list(range(size))
    assert (unpermute(image, size, key) == np.arange(size)).all()


@given(st.integers(1, 2**53), keys, st.data())
def test_permutation_inverse_holds_at_any_size(size: int, key: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    image = permute(index, size, key)
    assert 0 <= image < size
    assert unpermute(image, size, key) == index


@given(st.integers(1, 2**53), keys, st.data())
def test_permute_together_equals_permute(size: int, key: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, size - 1))
    near = st.integers(max(0, first - 600), min(size - 1, first + 600))
    index = np.array([first, *data.draw(st.lists(near, max_size=200))])
    sizes, keys = np.array([size]), np.array([key], np.uint64)
    for _ in range(2):
        assert permute_together(index, sizes, keys).tolist() == permute(index, size, key).tolist()
    assert permute_together(index[:0], sizes, keys).tolist() == []


def test_permute_together_is_limited_to_a_stretch() -> None:
    sizes, keys = np.array([2000]), np.array([7], np.uint64)
    for last in (1023, 1024):
        index = np.array([512, last])
        assert permute_together(index, sizes, keys).tolist() == permute(index, sizes, keys).tolist()


@given(st.lists(st.tuples(st.integers(1, 10**9), keys), min_size=1, max_size=50), st.integers(0, 10**9))
def test_permutation_takes_sizes_and_keys_per_element(pairs: list[tuple[int, int]], seed: int) -> None:
    sizes, many = np.array([size for size, _ in pairs]), np.array([key for _, key in pairs], np.uint64)
    index = seed % sizes
    one_by_one = [int(permute(i, s, k)) for i, s, k in zip(index, sizes, many, strict=True)]
    assert permute(index, sizes, many).tolist() == one_by_one
    for own_sizes, own_keys in ((sizes, many[:1]), (sizes.min(), many)):
        image = permute(seed % own_sizes, own_sizes, own_keys)
        broadcast = np.broadcast_arrays(seed % own_sizes, own_sizes, own_keys)
        assert image.tolist() == [int(permute(*one)) for one in zip(*broadcast, strict=True)]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
def test_permutations_of_few_elements_are_uniform(size: int) -> None:
    num_keys = 20_000
    many = np.repeat(np.array([key(n, 0, "test") for n in range(num_keys)], np.uint64), size)
    images = permute(np.tile(np.arange(size), num_keys), np.full(num_keys * size, size), many).reshape(num_keys, size)
    counts = Counter(map(tuple, images.tolist()))
    expected = num_keys / math.factorial(size)
    chi_square = sum((counts[image] - expected) ** 2 / expected for image in counts)
    chi_square += (math.factorial(size) - len(counts)) * expected
    degrees = math.factorial(size) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)  # four standard deviations; the keys are fixed


def test_permutation_separates_neighbours_uniformly() -> None:
    size = 100_000
    image = permute(np.arange(size), size, key(0, 0, "test"))
    assert abs(np.abs(np.diff(image)).mean() / (size / 3) - 1) < 0.02


def test_key_hashes_its_parts() -> None:
    assert key(41, 1, "blocks") != key(42, 0, "blocks")
    assert key(1, 11, "blocks") != key(11, 1, "blocks")
    assert key(0, 0, "blocks") != key(0, 0, "window")


@given(block_counts, st.integers(0, 9), st.integers(1, 60))
def test_order_keeps_blocks_of_a_row_group_together(counts: IntArray, seed: int, window: int) -> None:
    groups = groups_of(counts, seed)
    order = EpochOrder(counts, groups, shuffle="window", window=window, seed=seed, epoch=0)
    stops = np.cumsum(groups)
    of_block = np.searchsorted(stops, order._pools, side="right")
    assert sorted(order._pools.tolist()) == list(range(len(counts)))
    assert len(list(itertools.groupby(of_block.tolist()))) == len(groups)


@given(block_counts, shuffles, st.integers(1, 200), st.integers(0, 5))
def test_order_is_a_bijection_with_an_inverse(counts: IntArray, shuffle: str, window: int, epoch: int) -> None:
    order = EpochOrder(counts, groups_of(counts, epoch), shuffle=shuffle, window=window, seed=7, epoch=epoch)
    positions = np.arange(order.num_samples)
    blocks, indices = order.samples(positions)
    assert sorted(zip(blocks, indices, strict=True)) == [(b, i) for b, n in enumerate(counts) for i in range(n)]
    assert (order.positions(blocks, indices) == positions).all()


@given(block_counts, st.integers(1, 200), st.integers(1, 20), st.integers(0, 5))
def test_length_order_aligns_runs_with_global_batches(counts: IntArray, window: int, run: int, epoch: int) -> None:
    order = EpochOrder(counts, groups_of(counts, epoch), shuffle="window", window=window, seed=7, epoch=epoch)
    by_length = LengthOrder(order, lambda pools, indices: (pools * 7 + indices * 5) % 11, run, key(7, epoch, "test"))
    positions = np.arange(order.num_samples)
    pools, indices = by_length.samples(positions)
    assert (by_length.positions(pools, indices) == positions).all()
    windows, lengths = order.windows(positions), (pools * 7 + indices * 5) % 11
    for number in set(windows.tolist()):
        batches = {(positions[n] // run) for n in np.flatnonzero(windows == number)}
        spans = [lengths[(windows == number) & (positions // run == batch)] for batch in batches]
        ends = sorted((int(span.min()), int(span.max())) for span in spans)
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(ends))


@given(block_counts, shuffles, st.integers(1, 200))
def test_order_of_a_subset_equals_that_of_all(counts: IntArray, shuffle: str, window: int) -> None:
    order = EpochOrder(counts, np.ones_like(counts), shuffle=shuffle, window=window, seed=7, epoch=0)
    blocks, indices = order.samples(np.arange(order.num_samples))
    for position in range(order.num_samples):
        assert order.samples(np.array([position])) == (blocks[position], indices[position])
    round_and_round = np.arange(order.num_samples + 1) % order.num_samples
    assert np.array_equal(order.samples(round_and_round), (blocks[round_and_round], indices[round_and_round]))


def test_order_is_as_stored_when_shuffle_is_none() -> None:
    order = EpochOrder(np.array([2, 0, 3]), np.ones(3, int), shuffle="none", window=1, seed=1, epoch=1)
    blocks, indices = order.samples(np.arange(5))
    assert (blocks.tolist(), indices.tolist()) == ([0, 0, 2, 2, 2], [0, 1, 0, 1, 2])


def test_order_shuffles_within_windows_of_whole_blocks() -> None:
    order = EpochOrder(np.full(20, 10), np.ones(20, int), shuffle="window", window=35, seed=0, epoch=0)
    blocks, _ = order.samples(np.arange(200))
    windows = [set(blocks[start : start + 40].tolist()) for start in (0, 40, 80, 120, 160)]
    assert [len(window) for window in windows] == [4] * 5
    assert len(set.union(*windows)) == 20


@given(block_counts, st.integers(0, 9), st.integers(1, 60))
def test_order_maps_positions_to_blocks_of_their_window(counts: IntArray, seed: int, window: int) -> None:
    order = EpochOrder(counts, groups_of(counts, seed), shuffle="window", window=window, seed=seed, epoch=0)
    blocks, _ = order.samples(np.arange(order.num_samples))
    last = order.window(order.num_samples - 1)
    for position, block in enumerate(blocks.tolist()):
        assert block in order.pools_of_window(order.window(position))
    listed = [block for number in range(last + 1) for block in order.pools_of_window(number).tolist()]
    assert set(np.flatnonzero(counts).tolist()) <= set(listed)
    assert len(set(listed)) == len(listed)
    assert len(order.pools_of_window(last + 1)) == 0


@given(block_counts, shuffles, st.integers(0, 9), st.integers(1, 60), st.integers(1, 30))
def test_order_ahead_lists_pools_by_first_need(counts: IntArray, shuffle: str, seed: int, window: int, count: int) -> None:
    order = EpochOrder(counts, groups_of(counts, seed), shuffle=shuffle, window=window, seed=seed, epoch=0)
    pools, _ = order.samples(np.arange(order.num_samples))
    for position in range(order.num_samples):
        found, needed_at = order.ahead(position, count)
        assert len(set(found.tolist())) == len(found)
        assert (np.diff(needed_at) >= 0).all()
        rest = pools[position:].tolist()
        exact = {pool: position + rest.index(pool) for pool in rest[:count]}
        listed = dict(zip(found.tolist(), needed_at.tolist(), strict=True))
        assert {pool: listed[pool] for pool in exact} == exact
        if shuffle != "none":  # all that the window of the last of these positions, and the next window, still need
            last = order.window(min(position + count, order.num_samples) - 1)
            _, stop = order.bounds_of_window(min(last + 1, order.windows(np.array([order.num_samples - 1]))[0]))
            assert set(pools[position:stop].tolist()) <= set(listed)


def test_order_joins_a_short_rest_to_the_last_window() -> None:
    order = EpochOrder(np.full(9, 10), np.ones(9, int), shuffle="window", window=40, seed=0, epoch=0)
    blocks, _ = order.samples(np.arange(90))
    assert len(set(blocks[:40].tolist())) == 4
    assert len(set(blocks[40:].tolist())) == 5


@pytest.mark.parametrize("shuffle", ["window", "global"])
def test_order_differs_by_seed_and_epoch(shuffle: str) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        blocks, indices = EpochOrder(
            np.full(10, 10), np.ones(10, int), shuffle=shuffle, window=50, seed=seed, epoch=epoch
        ).samples(np.arange(100))  # fmt: skip
        return [10 * block + index for block, index in zip(blocks.tolist(), indices.tolist(), strict=True)]

    assert len({tuple(order(seed, epoch)) for seed in (41, 42) for epoch in (0, 1)}) == 4
    assert order(41, 1) != order(42, 0)


schedules = st.builds(
    lambda num, batch, world, offset, drop_last: Schedule(
        num_samples=num, batch_size=batch, world_size=world, offset=min(offset, num), drop_last=drop_last
    ),
    st.integers(1, 200), st.integers(1, 9), st.integers(1, 9), st.integers(0, 50), st.sampled_from(["drop", "wrap"]),
)  # fmt: skip


@given(schedules)
def test_schedule_partitions_an_epoch_among_ranks(schedule: Schedule) -> None:
    shown = Counter[int]()
    for step in range(schedule.num_steps):
        for rank in range(schedule.world_size):
            for index, position in enumerate(schedule.positions([step], rank)[0].tolist()):
                shown[position] += 1
                assert (step, rank, index) in schedule.locate(position)
    for position in range(schedule.num_samples):
        places = [*schedule.locate(position)]
        assert (len(places), places) == (shown[position], sorted(places))
        steps = {step for step, _, _ in places}
        assert {step for step in range(schedule.num_steps + 2) if schedule.shows(position, step)} == steps
    left = range(schedule.offset, schedule.num_samples)
    per_step = schedule.batch_size * schedule.world_size
    if schedule.drop_last:
        assert set(shown) <= set(left)
        assert set(shown.values()) <= {1}
        assert len(left) - len(shown) < per_step
    else:
        assert set(shown) >= set(left)
        assert sum(shown.values()) - len(left) < per_step


@given(schedules)
def test_schedule_order_is_the_same_for_every_world_size(schedule: Schedule) -> None:
    samples = [
        position
        for step in range(schedule.num_steps)
        for rank in range(schedule.world_size)
        for position in schedule.positions([step], rank)[0].tolist()
    ]
    start = schedule.offset
    assert samples == [p % schedule.num_samples for p in range(start, start + len(samples))]


def test_schedule_refuses_addresses_out_of_range() -> None:
    schedule = Schedule(num_samples=100, batch_size=10, world_size=2, offset=0, drop_last=True)
    with pytest.raises(StepOutOfRange, match="5 steps, 0 to 4"):
        schedule.positions([4, 5], 0)
    with pytest.raises(StepOutOfRange, match="step -1 does not exist"):
        schedule.positions([-1, 4], 0)
    with pytest.raises(RankOutOfRange, match="ranks are 0 to 1"):
        schedule.positions([0], 2)
    with pytest.raises(StepOutOfRange, match="this epoch has 0 steps. What follows"):
        replace(schedule, offset=100).positions([0], 0)
    with pytest.raises(StepOutOfRange, match=r"this epoch has 225,179,981,368,524 steps, 0 to 225179981368523\.$"):
        replace(schedule, num_samples=ENDLESS).check(2**50, 0)  # and no other epoch follows
