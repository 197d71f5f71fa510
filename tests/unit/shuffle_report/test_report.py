"""The shuffle report tells uniform orders from others, for data of any size."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock_server.batches.member import Member
from penstock_server.order.arrays import IntArray
from penstock_server.order.length_buckets import LengthOrder
from penstock_server.order.packing import Packing
from penstock_server.order.shuffle import EpochOrder
from penstock_server.problems import BadParameter
from penstock_server.shuffle_report.report import report
from support.engine import Geometry, synthetic_plan

MIX = "a:3,b:2,c:1"
EVEN: Geometry = [[100] * 5] * 12  # 6,000 rows in 60 blocks of 12 shards
MANY: Geometry = [[1000] * 20] * 100  # two million
MEMBERS: dict[str, Geometry] = {"a": [[40] * 5] * 12, "b": [[60, 50, 70]] * 4, "c": [[11] * 3] * 3}


def unlike_uniform(found: dict[str, Any]) -> list[str]:
    """Returns the names of the measures that leave the range of a uniform shuffle."""
    return [name for name, measure in found["measures"].items() if not measure["is_uniform"]]


@pytest.mark.parametrize(
    ("datasets", "spec"),
    [
        ({"a": EVEN}, {"batch_size": 8, "world_size": 4}),
        ({"a": EVEN}, {"batch_size": 8, "shuffle": "window", "window": 10**6}),
        ({"a": [[1] * 40]}, {"batch_size": 1}),
        ({"a": [[2000]]}, {"batch_size": 64, "drop_last": False, "offset": 700}),
        ({"a": [[3, 900], [1], [5] * 30]}, {"batch_size": 2, "world_size": 3, "skip": "samples:10-99,200-250"}),
        ({"a": MANY}, {"batch_size": 32, "world_size": 8}),
        ({"a": [[300] * 4]}, {"batch_size": 600}),
        (MEMBERS, {"batch_size": 4, "world_size": 2, "mix": MIX}),
        (MEMBERS, {"batch_size": 4, "mix": MIX, "stopping_strategy": "all_exhausted"}),
    ],
)
def test_report_finds_a_global_shuffle_uniform_for_any_seed(
    tmp_path: Path, datasets: dict[str, Geometry], spec: dict[str, Any]
) -> None:
    for seed in range(15):
        plan = synthetic_plan(tmp_path, datasets, **{"shuffle": "global", "seed": seed, **spec})
        assert not unlike_uniform(report(plan, seed % 3)), seed


@pytest.mark.parametrize(
    ("spec", "measures"),
    [
        ({"shuffle": "none"}, {"neighbour_distance_median", "neighbours_in_one_batch", "blocks_per_batch"}),
        ({"window": 65_536}, {"neighbour_distance_median", "blocks_per_batch", "unevenness_over_time"}),
        ({"window": 1000}, {"neighbours_in_one_batch", "shards_per_batch"}),
    ],
)
def test_report_names_the_measures_that_a_window_leaves_unlike_uniform(
    tmp_path: Path, spec: dict[str, Any], measures: set[str]
) -> None:
    found = report(synthetic_plan(tmp_path, {"a": MANY}, batch_size=32, world_size=8, **spec), 0)
    assert measures <= set(unlike_uniform(found))


def test_report_measures_windows_of_a_mixture(tmp_path: Path) -> None:
    plan = synthetic_plan(tmp_path, MEMBERS, mix=MIX, stopping_strategy="all_exhausted", window=200, batch_size=4)
    assert "unevenness_over_time" in unlike_uniform(report(plan, 0))


class Bent(EpochOrder):
    """The stored order with its positions moved: a fault in a shuffle."""

    def __init__(self, packing: Packing, groups: IntArray, moved: IntArray) -> None:
        super().__init__(packing.samples_per_pool, groups, shuffle="none", window=1, seed=0, epoch=0)
        self._moved = moved

    def samples(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        return super().samples(self._moved[positions])

    def positions(self, pools: IntArray, indices: IntArray) -> IntArray:
        moved: IntArray = np.argsort(self._moved)[super().positions(pools, indices)]
        return moved


def halves(size: int, random: np.random.Generator) -> IntArray:
    return np.concatenate([random.permutation(size // 2), size // 2 + random.permutation(size - size // 2)])


def drifting(size: int, random: np.random.Generator) -> IntArray:
    return np.argsort(np.arange(size) / size + 2 * random.random(size))


def neighbours_together(size: int, random: np.random.Generator) -> IntArray:
    """One in twenty with its neighbour, all others uniform."""
    order = random.permutation(size - size // 20) + size // 20
    lone = random.choice(len(order), size // 20, replace=False)
    chosen = np.arange(size // 20)
    placed = np.insert(order, lone, chosen)
    rest = np.concatenate([[n, n + 1] if n % 20 == 0 and n + 1 < size else [n] for n in placed.tolist() if n % 20 != 1])
    return rest.astype(np.int64)


def ranks_apart(size: int, random: np.random.Generator) -> IntArray:
    """Rank 0 of two sees only the first half of the source, rank 1 the second."""
    first, second = random.permutation(size // 2).reshape(-1, 8), size // 2 + random.permutation(size // 2).reshape(-1, 8)
    return np.stack([first, second], axis=1).reshape(-1)


def within_blocks(size: int, random: np.random.Generator) -> IntArray:
    return np.arange(size).reshape(-1, 100)[:, random.permutation(100)].reshape(-1)


def blocks_alone(size: int, random: np.random.Generator) -> IntArray:
    return np.arange(size).reshape(-1, 100)[random.permutation(size // 100)].reshape(-1)


Bend = Callable[[int, np.random.Generator], IntArray]
BAD_ORDERS: list[tuple[Bend, str]] = [
    (lambda size, _: np.arange(size)[::-1], "neighbours_in_one_batch"),
    (lambda size, _: np.roll(np.arange(size), size // 3), "neighbours_in_one_batch"),
    (lambda size, _: np.arange(size) * 1_777 % size, "neighbour_distance_median"),
    (within_blocks, "blocks_per_batch"),
    (blocks_alone, "neighbour_distance_median"),
    (halves, "unevenness_over_time"),
    (drifting, "unevenness_over_time"),
    (neighbours_together, "neighbours_in_one_batch"),
    (ranks_apart, "unevenness_over_ranks"),
]


@pytest.mark.parametrize(("bend", "measure"), BAD_ORDERS)
def test_report_names_the_measure_that_shows_a_fault_in_a_shuffle(tmp_path: Path, bend: Bend, measure: str) -> None:
    class Faulty(Member):
        def epoch(self, epoch: int) -> tuple[Packing, EpochOrder | LengthOrder]:
            packing, order = super().epoch(epoch)
            moved = bend(order.num_samples, np.random.default_rng(epoch))
            return packing, Bent(packing, self.snapshot.blocks_per_group, moved)

    plan = synthetic_plan(tmp_path, {"a": EVEN}, Faulty, shuffle="global", batch_size=8, world_size=2)
    assert measure in unlike_uniform(report(plan, 0))


def test_report_of_a_billion_rows_takes_bounded_memory(tmp_path: Path) -> None:
    # The shards do not exist, so reading a block would fail.
    plan = synthetic_plan(tmp_path, {"a": [[20_000] * 100] * 500}, shuffle="global", batch_size=32, world_size=8)
    assert plan.schedule.num_samples == 10**9
    plan.members[0].epoch(4)
    tracemalloc.start()
    found = report(plan, 4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not unlike_uniform(found)
    assert peak < 40 << 20
    assert found["sampled"] == {"samples": 16_384, "global_batches": 64, "of_first": 10**9, "of_epoch": 10**9 - 10**9 % 256}


@pytest.mark.parametrize("stopping_strategy", ["never", "all_exhausted"])
def test_report_measures_the_first_samples_of_a_mixture_that_repeats_small_datasets(
    tmp_path: Path, stopping_strategy: str
) -> None:
    datasets: dict[str, Geometry] = {"a": MANY, "b": [[5] * 8], "c": [[7] * 3]}
    plan = synthetic_plan(tmp_path, datasets, mix=MIX, shuffle="global", batch_size=4, stopping_strategy=stopping_strategy)
    found = report(plan, 0)
    assert not unlike_uniform(found)
    assert 1000 < found["sampled"]["of_first"] < 100_000 < found["sampled"]["of_epoch"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=4),
    st.sampled_from(["none", "window", "global"]),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 20),
    st.sampled_from([None, "samples:2-5", "samples:0-0,4-6"]),
    st.sampled_from([None, MIX]),
)
def test_report_of_tiny_data_is_json_or_a_bad_parameter(
    tmp_path: Path,
    shards: list[list[int]],
    shuffle: str,
    batch_size: int,
    world_size: int,
    drop_last: bool,
    offset: int,
    skip: str | None,
    mix: str | None,
) -> None:
    spec: dict[str, Any] = {"shuffle": shuffle, "batch_size": batch_size, "world_size": world_size, "window": 5}
    datasets = {"a": shards, "b": [[1]], "c": [[2, 1]]} if mix else {"a": shards}
    try:
        found = report(synthetic_plan(tmp_path, datasets, **spec, drop_last=drop_last, offset=offset, skip=skip, mix=mix), 1)
    except BadParameter:
        return
    json.dumps(found, allow_nan=False)
    for measure in found["measures"].values():
        assert all(0 <= measure[name] < 2**53 for name in ("value", "expected", "low", "high"))


def test_report_refuses_an_offset_that_leaves_no_step(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="offset=6,000"):
        report(synthetic_plan(tmp_path, {"a": EVEN}, offset=6000), 0)


def test_report_of_one_address_is_always_the_same(tmp_path: Path) -> None:
    def again(seed: int) -> dict[str, Any]:
        return report(synthetic_plan(tmp_path, {"a": MANY}, batch_size=4, seed=seed), 1)

    assert again(4) == again(4)
    assert again(4)["measures"] != again(5)["measures"]
