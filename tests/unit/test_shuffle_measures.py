"""The shuffle report's measures: what is looked at is what is served, and the numbers are those of counting everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from corpora import write_shards
from penstock_server.batches.plan import Plan
from penstock_server.blocks.cache import CacheFolder
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import Catalog, open_catalog
from penstock_server.order.length_buckets import LengthOrder
from penstock_server.order.packing import Packing
from penstock_server.shuffle_report.report import report
from penstock_server.shuffle_report.sample import Sample, draw
from planned import plan_of
from synthetic import Geometry, synthetic_plan

MIX = "a:3,b:2,c:1"
EVEN: Geometry = [[100] * 5] * 12  # 6,000 rows in 60 blocks of 12 shards
MEMBERS: dict[str, Geometry] = {"a": [[40] * 5] * 12, "b": [[60, 50, 70]] * 4, "c": [[11] * 3] * 3}


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """Real shards with rows of 1 to 40 tokens, so that every packing has an index."""
    data = tmp_path_factory.mktemp("data")
    for name, size in (("a", 500), ("b", 230), ("c", 60)):
        rows = [[1] * (1 + (row * row) % 40) for row in range(size)]
        shards = [rows[start : start + 130] for start in range(0, size, 130)]
        folder = write_shards(data / name, "tokens", shards, type_=pa.list_(pa.int32()), row_group_size=30)
        (folder / "penstock.toml").write_text("validation = 0.3\nvocab_size = 50000")
    return open_catalog(data, None, BlockStore(CacheFolder(tmp_path_factory.mktemp("cache"))))


Spelled = dict[str, Any]
Identity = tuple[int, int, int, int]  # member, block, row, first token


def served(plan: Plan, epoch: int) -> list[tuple[Identity, int, int]]:
    """What an epoch serves, sample for sample, as batches are made of it: the sample, its step and its rank."""
    order = []
    for step in range(plan.schedule.num_steps):
        for rank in range(plan.spec.world_size):
            batch: dict[int, Identity] = {}
            for part in plan.spans(epoch, rank, [step]):
                for line, block, row, first in zip(*(values.tolist() for values in part.spans[:4]), strict=True):
                    batch.setdefault(line, (plan.members.index(part.member), block, row, first))
            order += [(batch[line], step, rank) for line in range(plan.spec.batch_size)]
    return order


def stored(plan: Plan, member: int, epoch: int) -> list[Identity]:
    """The samples of an epoch of a member in the order in which they are stored."""
    packing, _ = plan.members[member].epoch(epoch)
    counts = packing.samples_per_pool
    pools = np.repeat(np.arange(len(counts)), counts)
    indices = np.concatenate([np.arange(count) for count in counts.tolist()])
    found: dict[int, Identity] = {}
    for line, block, row, first in zip(*(values.tolist() for values in packing.spans(pools, indices)[:4]), strict=True):
        found.setdefault(line, (member, block, row, first))
    return [found[line] for line in range(len(pools))]


SPECS: list[Spelled] = [
    {"shuffle": "none"},
    {"shuffle": "window", "window": 70},
    {"shuffle": "global", "split": "validation"},
    {"shuffle": "global", "overflow": "split", "seq_len": 9},
    {"shuffle": "window", "window": 70, "length_bucket_size": 8},
    {"shuffle": "window", "window": 200, "overflow": "split", "seq_len": 16, "length_bucket_size": 8},
    {"shuffle": "window", "window": 90, "packing": "concat", "seq_len": 16},
    {"shuffle": "global", "packing": "best_fit", "seq_len": 64},
    {"shuffle": "window", "window": 70, "mix": MIX},
    {"shuffle": "global", "mix": MIX, "stopping_strategy": "all_exhausted", "packing": "concat", "seq_len": 32},
]
SLICES: list[Spelled] = [
    {"batch_size": 4, "world_size": 2},
    {"batch_size": 1, "world_size": 3, "offset": 17},
    {"batch_size": 7, "world_size": 1, "drop_last": False},
    {"batch_size": 3, "world_size": 2, "skip": "samples:5-20,40-40", "offset": 3},
]


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("spec", SPECS)
def test_each_sample_is_at_the_place_of_what_is_served(catalog: Catalog, spec: Spelled, slices: Spelled) -> None:
    plan = plan_of(catalog, "a", seed=5, **spec, **slices)
    order, sample = served(plan, 2), draw(plan, 2)
    places = [stored(plan, source.member, source.epoch) for source in sample.sources]
    assert sample.num_samples == len(order) or (slices.get("drop_last") is False and sample.num_samples > len(order) - 7)
    assert sample.scattered.samples.tolist() == list(range(sample.num_samples))
    for looked_at in (sample.scattered, sample.runs):
        columns = (looked_at.samples, looked_at.sources, looked_at.places)
        for n, source, place in zip(*(values.reshape(-1).tolist() for values in columns), strict=True):
            assert places[source][place] == order[n][0]


PLAIN = [spec for spec in SPECS if "mix" not in spec]


def measured(plan: Plan, epoch: int) -> tuple[Sample, dict[str, float], list[int], list[int]]:
    """The sample, the measures, and of every sample that is served the place in the source and the step."""
    found = report(plan, epoch)
    place_of = {identity: place for place, identity in enumerate(stored(plan, 0, epoch))}
    order = served(plan, epoch)
    places, steps = [place_of[identity] for identity, _, _ in order], [step for _, step, _ in order]
    return found.sample, {finding.name: finding.measure.measured for finding in found.findings}, places, steps


def pools_of(packing: Packing) -> list[int]:
    """The pool of each place."""
    return np.repeat(np.arange(len(packing.samples_per_pool)), packing.samples_per_pool).tolist()


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("spec", PLAIN)
def test_neighbours_are_as_far_apart_as_counting_says(catalog: Catalog, spec: Spelled, slices: Spelled) -> None:
    plan = plan_of(catalog, "a", seed=6, **spec, **slices)
    sample, measures, places, steps_of = measured(plan, 1)
    packing, order = plan.members[0].epoch(1)
    pools, starts = pools_of(packing), np.cumsum(packing.samples_per_pool) - packing.samples_per_pool
    own_pools, indices = order.samples(np.arange(len(pools)))
    position = {place: position for position, place in enumerate((starts[own_pools] + indices).tolist())}
    steps: dict[int, set[int]] = {}
    for place, step in zip(places, steps_of, strict=True):
        steps.setdefault(place, set()).add(step)

    apart, meet = [], []
    for n, place in enumerate(places[: sample.num_samples]):
        across = place + 1 < len(pools) and pools[place] != pools[place + 1]
        if place + 1 < len(pools) and not ("length_bucket_size" in spec and across):
            apart.append(abs(position[place] - position[place + 1]))
            meet.append(n // sample.samples_per_step in steps.get(place + 1, ()))
    assert measures["neighbour_distance"] == sorted(apart)[(len(apart) + 1) // 2 - 1]
    assert measures["neighbours_in_one_batch"] == pytest.approx(np.mean(meet))


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("spec", PLAIN)
def test_batches_draw_on_as_many_blocks_as_counting_says(catalog: Catalog, spec: Spelled, slices: Spelled) -> None:
    plan = plan_of(catalog, "a", seed=6, **spec, **slices)
    sample, measures, places, _ = measured(plan, 1)
    packing, _ = plan.members[0].epoch(1)
    pools, first_blocks = pools_of(packing), plan.members[0].snapshot.first_block_of_shard
    runs, size = sample.runs.samples.tolist(), sample.samples_per_step
    batches = [[places[n] for n in run[start : start + size]] for run in runs for start in range(0, len(run), size)]
    blocks, shards = [], []
    for batch in batches:
        blocks.append({pools[place] for place in batch})
        shards.append({int(np.searchsorted(first_blocks, packing.blocks_of(pool)[0], "right")) for pool in blocks[-1]})
    assert measures["blocks_per_batch"] == pytest.approx(np.mean([len(drawn) for drawn in blocks]))
    assert measures["shards_per_batch"] == pytest.approx(np.mean([len(drawn) for drawn in shards]))
    gaps = [abs(places[n] - places[n + 1]) for run in runs for n in run[:-1]]
    assert measures["consecutive_distance"] == pytest.approx(np.mean(gaps) / len(pools))


def test_the_spread_counts_each_part_in_each_stretch_and_rank(tmp_path: Path) -> None:
    plan = synthetic_plan(tmp_path, {"a": EVEN}, shuffle="window", window=1000, batch_size=4, world_size=3)
    found = report(plan, 0)
    spread, num_samples = found.over_time, found.sample.num_samples
    num_stretches = spread.counted.shape[1]
    counted = np.zeros_like(spread.counted)
    for sample, ((_, block, _, _), _, _) in enumerate(served(plan, 0)):
        counted[block // 5, sample * num_stretches // num_samples] += 1
    assert (spread.kind, spread.counted.tolist()) == ("shards", counted.tolist())
    assert spread.expected == pytest.approx(np.tile(counted.sum(axis=0) / 12, (12, 1)))
    drawn = counted.sum(axis=0)  # without putting back: hypergeometric
    assert spread.variance == pytest.approx(np.tile(drawn * 500 * 5500 / 6000**2 * (6000 - drawn) / 5999, (12, 1)))
    to_move = np.abs(counted - counted.sum(axis=0) / 12).sum() / 2 / num_samples
    assert spread.unevenness.measured == pytest.approx(to_move)
    by_rank = np.zeros((12, 3))
    for (_, block, _, _), _, rank in served(plan, 0):
        by_rank[block // 5, rank] += 1
    [over_ranks] = [finding.measure for finding in found.findings if finding.name == "unevenness_over_ranks"]
    assert over_ranks.measured == pytest.approx(np.abs(by_rank - by_rank.mean(axis=1, keepdims=True)).sum() / 2 / num_samples)


@pytest.mark.parametrize(
    ("datasets", "spec"),
    [
        ({"a": [[10, 3, 25]] * 10}, {"batch_size": 4, "world_size": 4}),
        ({"a": [[1] * 90]}, {"batch_size": 8, "world_size": 2, "offset": 20, "drop_last": False}),
        (MEMBERS, {"batch_size": 8, "world_size": 2, "mix": MIX}),
        ({"a": [[30, 30]], "b": [[3]]}, {"batch_size": 16, "mix": "a:1,b:1", "stopping_strategy": "all_exhausted"}),
    ],
)
def test_expected_is_what_uniform_shuffles_show_on_average(
    tmp_path: Path, datasets: dict[str, Geometry], spec: Spelled
) -> None:
    plan = synthetic_plan(tmp_path, datasets, shuffle="global", seed=3, **spec)
    reports = [report(plan, epoch) for epoch in range(60)]
    for names in zip(*(found.findings for found in reports), strict=True):
        measured = np.array([finding.measure.measured for finding in names])
        expected = np.array([finding.measure.expected for finding in names])
        error = (measured - expected).std() / np.sqrt(len(reports))
        # The spread's is of a normal distribution, of which counts are a few in a hundred away.
        close = 0.05 * expected.mean() if names[0].name.startswith("unevenness") else 0.01 * expected.mean()
        assert abs((measured - expected).mean()) < 4 * error + close, names[0].name


def test_grouping_by_length_is_named_as_what_it_is(catalog: Catalog) -> None:
    found = report(plan_of(catalog, "a", batch_size=4, length_bucket_size=8, window=10**6), 0)
    assert found.grade == "uniform"
    assert "side by side on purpose (length_bucket_size=8)" in found.verdict


def test_where_windows_have_to_be_sorted_only_the_first_ones_are(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_server.shuffle_report.extent._MAX_EFFORT", 5000)
    plan = plan_of(catalog, "a", batch_size=4, length_bucket_size=4, window=30)
    arranged: set[int] = set()
    arrange = LengthOrder._arrange

    def watched(order: LengthOrder, window: int) -> Any:
        arranged.add(window)
        return arrange(order, window)

    monkeypatch.setattr(LengthOrder, "_arrange", watched)
    found = report(plan, 7)
    assert found.sample.num_samples < plan.schedule.num_positions / 2
    assert arranged == {plan.members[0].epoch(7)[1].window(n) for n in range(found.sample.num_samples)}
