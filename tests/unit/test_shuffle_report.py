"""The shuffle report: good orders are told from bad ones, whatever their size."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
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
from penstock_server.shuffle_report.report import Report, report
from penstock_server.shuffle_report.verdict import number, percent
from synthetic import Geometry, synthetic_plan

MIX = "a:3,b:2,c:1"
EVEN: Geometry = [[100] * 5] * 12  # 6,000 rows in 60 blocks of 12 shards
MANY: Geometry = [[1000] * 20] * 100  # two million
MEMBERS: dict[str, Geometry] = {"a": [[40] * 5] * 12, "b": [[60, 50, 70]] * 4, "c": [[11] * 3] * 3}


GEOMETRIES: list[tuple[dict[str, Geometry], dict[str, Any]]] = [
    ({"a": EVEN}, {"batch_size": 8, "world_size": 4}),
    ({"a": EVEN}, {"batch_size": 8, "shuffle": "window", "window": 10**6}),
    ({"a": [[1] * 40]}, {"batch_size": 1}),
    ({"a": [[2000]]}, {"batch_size": 64, "drop_last": False, "offset": 700}),
    ({"a": [[3, 900], [1], [5] * 30]}, {"batch_size": 2, "world_size": 3, "skip": "samples:10-99,200-250"}),
    ({"a": MANY}, {"batch_size": 32, "world_size": 8}),
    (MEMBERS, {"batch_size": 4, "world_size": 2, "mix": MIX}),
    (MEMBERS, {"batch_size": 4, "mix": MIX, "stopping_strategy": "all_exhausted"}),
]


@pytest.mark.parametrize(("datasets", "spec"), GEOMETRIES)
def test_a_global_shuffle_is_called_uniform_whatever_the_seed(
    tmp_path: Path, datasets: dict[str, Geometry], spec: dict[str, Any]
) -> None:
    for seed in range(15):
        plan = synthetic_plan(tmp_path, datasets, **{"shuffle": "global", "seed": seed, **spec})
        found = report(plan, seed % 3)
        assert found.grade == "uniform", (seed, found.verdict)
        assert "As good as uniform" in found.verdict


# What is not


@pytest.mark.parametrize(
    ("spec", "grade", "says"),
    [
        ({"shuffle": "none"}, "none", "use shuffle=window, the default, or shuffle=global"),
        ({"window": 65_536}, "windowed", "windows of about 66,667 samples, 3.3 % of the epoch"),
        ({"window": 1000}, "weak", "raise window= to 131,072 or more, or use shuffle=global"),
        ({"window": 2**22}, "uniform", "samples show no difference from an exact uniform shuffle"),
        ({"shuffle": "global"}, "uniform", "As good as uniform: 16,384 of 2 million samples show no"),
    ],
)
def test_the_shuffles_are_told_apart(tmp_path: Path, spec: dict[str, Any], grade: str, says: str) -> None:
    found = report(synthetic_plan(tmp_path, {"a": MANY}, batch_size=32, world_size=8, **spec), 0)
    assert found.grade == grade
    assert says in found.verdict


def test_a_window_of_few_large_blocks_is_weak_however_many_samples_it_has(tmp_path: Path) -> None:
    plan = synthetic_plan(tmp_path, {"a": [[60_000] * 4] * 20}, batch_size=32, world_size=8, window=200_000)
    found = report(plan, 0)
    assert (found.grade, found.windows[0].blocks) == ("weak", 4)
    assert "a global batch draws on 4 blocks (uniform: 77)" in found.verdict


def test_a_batch_of_one_block_is_told_in_the_singular(tmp_path: Path) -> None:
    plan = synthetic_plan(tmp_path, {"a": [[500] * 4] * 10}, batch_size=4, window=64)
    assert "a global batch draws on 1 block (uniform: 3.9)" in report(plan, 0).verdict


@pytest.mark.parametrize(("window", "grade"), [(500, "weak"), (1500, "windowed")])
def test_where_many_neighbours_meet_in_a_batch_the_order_is_weak(tmp_path: Path, window: int, grade: str) -> None:
    found = report(synthetic_plan(tmp_path, {"a": [[10] * 10] * 60}, batch_size=8, world_size=4, window=window), 0)
    [blocks] = [finding.measure for finding in found.findings if finding.name == "blocks_per_batch"]
    assert blocks.measured > 20  # enough of them, so neighbours decide
    assert found.grade == grade


def test_a_mixture_is_measured_in_each_of_its_datasets(tmp_path: Path) -> None:
    found = report(synthetic_plan(tmp_path, MEMBERS, mix=MIX, stopping_strategy="all_exhausted", window=200, batch_size=4), 0)
    assert found.grade == "windowed"
    assert [(window.dataset, window.windows) for window in found.windows] == [("a", 12), ("b", 3), ("c", 1)]
    assert set(found.over_time.members.tolist()) == {0, 1, 2}
    assert "windows of 200 samples or more of each dataset" in found.verdict


class Bent(EpochOrder):
    """The stored order with its positions moved: a fault in a shuffle."""

    def __init__(self, packing: Packing, groups: IntArray, moved: IntArray) -> None:
        super().__init__(packing.samples_per_pool, groups, shuffle="none", window=1, seed=0, epoch=0)
        self._moved = moved

    def samples(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        return super().samples(self._moved[positions])

    def positions(self, pools: IntArray, indices: IntArray) -> IntArray:
        found: IntArray = np.argsort(self._moved)[super().positions(pools, indices)]
        return found


def halves(size: int, random: np.random.Generator) -> IntArray:
    return np.concatenate([random.permutation(size // 2), size // 2 + random.permutation(size - size // 2)])


def drifting(size: int, random: np.random.Generator) -> IntArray:
    return np.argsort(np.arange(size) / size + 2 * random.random(size))


def neighbours_together(size: int, random: np.random.Generator) -> IntArray:
    """One in twenty with its neighbour, all else uniform."""
    order = random.permutation(size - size // 20) + size // 20
    lone = random.choice(len(order), size // 20, replace=False)
    chosen = np.arange(size // 20)
    placed = np.insert(order, lone, chosen)
    rest = np.concatenate([[n, n + 1] if n % 20 == 0 and n + 1 < size else [n] for n in placed.tolist() if n % 20 != 1])
    return rest.astype(np.int64)


def ranks_apart(size: int, random: np.random.Generator) -> IntArray:
    """Rank 0 of two sees the first half of the source alone, rank 1 the other one."""
    first, second = random.permutation(size // 2).reshape(-1, 8), size // 2 + random.permutation(size // 2).reshape(-1, 8)
    return np.stack([first, second], axis=1).reshape(-1)


def within_blocks(size: int, random: np.random.Generator) -> IntArray:
    return np.arange(size).reshape(-1, 100)[:, random.permutation(100)].reshape(-1)


def blocks_alone(size: int, random: np.random.Generator) -> IntArray:
    return np.arange(size).reshape(-1, 100)[random.permutation(size // 100)].reshape(-1)


Bend = Callable[[int, np.random.Generator], IntArray]
BAD_ORDERS: list[tuple[Bend, str]] = [
    (lambda size, _: np.arange(size)[::-1], "none"),
    (lambda size, _: np.roll(np.arange(size), size // 3), "none"),
    (lambda size, _: np.arange(size) * 1_777 % size, "windowed"),
    (within_blocks, "weak"),
    (blocks_alone, "none"),
    (halves, "windowed"),
    (drifting, "windowed"),
    (neighbours_together, "windowed"),
    (ranks_apart, "windowed"),
]


@pytest.mark.parametrize(("bend", "grade"), BAD_ORDERS)
def test_a_fault_in_a_shuffle_is_caught_and_called_one(tmp_path: Path, bend: Bend, grade: str) -> None:
    class Faulty(Member):
        def epoch(self, epoch: int) -> tuple[Packing, EpochOrder | LengthOrder]:
            packing, order = super().epoch(epoch)
            moved = bend(order.num_samples, np.random.default_rng(epoch))
            return packing, Bent(packing, self.snapshot.blocks_per_group, moved)

    spec: dict[str, Any] = {"shuffle": "global", "batch_size": 8, "world_size": 2}
    sound, faulty = (report(synthetic_plan(tmp_path, {"a": EVEN}, m, **spec), 0) for m in (Member, Faulty))
    assert (sound.grade, faulty.grade) == ("uniform", grade)
    assert "Not what shuffle=global promises" in faulty.verdict
    assert "a fault of penstock" in faulty.verdict
    assert ("unevenness_over_ranks" in faulty.verdict) == (bend is ranks_apart)


# Of any size, of any kind


def test_a_billion_rows_are_measured_in_bounded_memory_and_no_block_is_read(tmp_path: Path) -> None:
    # No shard is there, so whatever reads one fails.
    plan = synthetic_plan(tmp_path, {"a": [[20_000] * 100] * 500}, shuffle="global", batch_size=32, world_size=8)
    assert plan.schedule.num_positions == 10**9
    plan.members[0].epoch(4)
    tracemalloc.start()
    found = report(plan, 4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.grade == "uniform"
    assert peak < 40 << 20
    assert len(found.sample.scattered.samples) == 16_384


@pytest.mark.parametrize("spec", [{"stopping_strategy": "never"}, {"stopping_strategy": "all_exhausted", "packing": "rows"}])
def test_of_a_mixture_that_shows_too_many_epochs_the_first_samples_are_measured(tmp_path: Path, spec: dict[str, Any]) -> None:
    datasets: dict[str, Geometry] = {"a": MANY, "b": [[5] * 8], "c": [[7] * 3]}
    found = report(synthetic_plan(tmp_path, datasets, mix=MIX, shuffle="global", batch_size=4, **spec), 0)
    assert found.grade == "uniform"
    assert 4000 < found.sample.num_samples < 100_000
    assert len(found.sample.sources) < 600
    assert f"the beginning of the epoch was measured: {number(found.sample.num_samples)} of" in found.verdict


def test_many_skipped_ranges_make_for_fewer_samples(tmp_path: Path) -> None:
    skip = ",".join(f"{step}-{step}" for step in range(0, 1400, 2))
    found = report(synthetic_plan(tmp_path, {"a": MANY}, shuffle="global", batch_size=32, skip=skip), 0)
    assert found.grade == "uniform"
    assert 1024 <= len(found.sample.scattered.samples) < 2000


def numbers_in(found: Any) -> Iterator[float]:
    if isinstance(found, dict | list):
        for value in found.values() if isinstance(found, dict) else found:
            yield from numbers_in(value)
    elif isinstance(found, int | float):
        yield found


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
def test_however_little_there_is_the_report_is_json_or_a_refusal(
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
    answer = found.to_dict()
    json.dumps(answer, allow_nan=False)
    assert all(0 <= value < 2**53 for value in numbers_in(answer["measures"]))
    assert answer["grade"] in ("uniform", "windowed", "weak", "none", "unclear")
    assert (answer["grade"] == "unclear") == (found.sample.num_samples < 30)


def test_an_offset_that_leaves_no_step_is_refused(tmp_path: Path) -> None:
    plan = synthetic_plan(tmp_path, {"a": EVEN}, offset=6000)
    with pytest.raises(BadParameter, match="offset=6,000 leaves no step"):
        report(plan, 0)


def test_one_address_has_one_report(tmp_path: Path) -> None:
    def again(**spec: Any) -> Report:
        return report(synthetic_plan(tmp_path, {"a": MANY}, batch_size=4, **spec), 1)

    assert again(seed=4).to_dict() == again(seed=4).to_dict()
    assert (again(seed=4).sample.scattered.samples != again(seed=5).sample.scattered.samples).any()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1, "1"), (1.23, "1.2"), (12.3, "12"), (65_536, "65,536"), (262_144, "262,000"), (23e8, "2.3 billion")],
)
def test_numbers_are_told_as_people_read_them(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0 %"), (1, "100 %"), (0.3333, "33.3 %"), (0.0123, "1.2 %"), (1e-7, "< 0.001 %")]
)
def test_shares_are_told_in_percent(share: float, text: str) -> None:
    assert percent(share) == text
