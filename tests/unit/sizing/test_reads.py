"""Reads counted over many touches at a time, beside a cache that takes one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from penstock_server.sizing import reads
from penstock_server.sizing.reads import BlockSizes, reads_of
from penstock_server.sizing.touches import Touches

SPARE = 32


def touches_in(batches: list[list[int]]) -> Touches:
    firsts = np.cumsum([0, *map(len, batches)])[:-1]
    return Touches(np.concatenate(batches).astype(np.int64), firsts, len(batches))


def one_by_one(batches: list[list[int]], sizes: BlockSizes, budget: int) -> tuple[list[int], list[int]]:
    """The touches that read, and the bytes of each read in the shards."""
    cached, groups = list[int](), sizes.groups.tolist()  # the block used longest ago first
    touch, found, nbytes = 0, [], []

    def used() -> int:
        return int(sizes.cached[cached].sum())

    for batch in batches:
        for block in [block for block in batch if block in cached]:
            cached.remove(block)
            cached.append(block)
        for block in batch:
            if block not in cached:
                found.append(touch)
                group = [other for other in range(len(groups)) if groups[other] == groups[block]]
                keeps_all = 2 * max(sizes.cached[group]) * len(group) <= budget
                nbytes.append(sum(sizes.stored[group] if keeps_all else sizes.stored[group[0] : block + 1]))
                unit = group if keeps_all else [block]
                needed = int(sizes.cached[[other for other in unit if other not in cached]].sum())
                if used() + needed > budget:
                    while cached and used() > budget - needed - budget // SPARE:
                        cached.pop(0)
                cached += [other for other in unit if other not in cached]
            touch += 1
    return found, nbytes


def random_batches(rng: np.random.Generator, num_blocks: int, count: int) -> list[list[int]]:
    return [np.unique(rng.integers(0, num_blocks, rng.integers(1, 6))).tolist() for _ in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_reads_are_those_of_one_touch_after_the_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_blocks = 40
    groups = np.sort(rng.integers(0, num_blocks // (1 + seed % 4), num_blocks))
    sizes = BlockSizes(rng.integers(900, 1100, num_blocks), rng.integers(1, 99, num_blocks), groups)
    batches = random_batches(rng, num_blocks, 400)
    for budget in (15_000, 25_000, 38_000, 60_000):
        found = reads_of(touches_in(batches), sizes, budget)
        touches, nbytes = one_by_one(batches, sizes, budget)
        assert found.touches.tolist() == touches
        assert found.nbytes.tolist() == nbytes
        assert found.num_touches == sum(map(len, batches))


def test_touches_know_those_before() -> None:
    touches = touches_in([[3, 5], [5], [1, 3, 5]])
    assert touches.before.tolist() == [-1, -1, 1, -1, 0, 2]
    assert touches.distinct.tolist() == [1, 3, 5]


def test_counting_ends_after_many_evictions_or_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = random_batches(np.random.default_rng(0), 40, 400)
    sizes = BlockSizes(np.full(40, 1000), np.full(40, 10), np.arange(40))
    whole = reads_of(touches_in(batches), sizes, 20_000)
    few = reads_of(touches_in(batches), sizes, 20_000, most=50)
    assert 50 < len(few.touches) < 60
    monkeypatch.setattr(reads, "MAX_EVICTIONS", 20)
    short = reads_of(touches_in(batches), sizes, 20_000)
    assert short.num_touches < whole.num_touches
    assert whole.touches[: len(short.touches)].tolist() == short.touches.tolist()
