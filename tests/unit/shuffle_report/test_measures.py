"""The measures of the shuffle report equal what counting over whole epochs of real shards gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock_server.batches.plan import Plan
from penstock_server.blocks.store import BlockStore
from penstock_server.catalog.catalog import Catalog, open_catalog
from penstock_server.shuffle_report.report import report
from penstock_server.shuffle_report.sample import draw
from support.corpora import write_shards
from support.engine import Geometry, plan_of, synthetic_plan

MIX = "a:3,b:2,c:1"
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
    return open_catalog(data, None, BlockStore(tmp_path_factory.mktemp("cache")))


Spelled = dict[str, Any]
Identity = tuple[int, int, int, int]  # member, block, row, first token


def served(plan: Plan, epoch: int) -> list[tuple[Identity, int]]:
    """Returns the samples of an epoch as batches are made of them, with the step of each."""
    order = []
    for step in range(plan.schedule.num_steps):
        for rank in range(plan.spec.world_size):
            batch: dict[int, Identity] = {}
            for part in plan.spans(epoch, rank, [step]):
                for line, block, row, first in zip(*(values.tolist() for values in part.spans[:4]), strict=True):
                    batch.setdefault(line, (plan.members.index(part.member), block, row, first))
            order += [(batch[line], step) for line in range(plan.spec.batch_size)]
    return order


def stored(plan: Plan, member: int, epoch: int) -> list[Identity]:
    """Returns the samples of an epoch of a member in storage order."""
    packing, _ = plan.members[member].epoch(epoch)
    counts = packing.samples_per_pool
    pools = np.repeat(np.arange(len(counts)), counts)
    indices = np.concatenate([np.arange(count) for count in counts.tolist()])
    samples: dict[int, Identity] = {}
    for line, block, row, first in zip(*(values.tolist() for values in packing.spans(pools, indices)[:4]), strict=True):
        samples.setdefault(line, (member, block, row, first))
    return [samples[line] for line in range(len(pools))]


SPECS: list[Spelled] = [
    {"shuffle": "none"},
    {"shuffle": "global", "split": "validation"},
    {"shuffle": "global", "overflow": "split", "seq_len": 9},
    {"shuffle": "window", "window": 70, "length_bucket_size": 8},
    {"shuffle": "window", "window": 90, "packing": "concat", "seq_len": 16},
    {"shuffle": "global", "packing": "best_fit", "seq_len": 64},
    {"shuffle": "window", "window": 70, "mix": MIX},
    {"shuffle": "global", "mix": MIX, "stopping_strategy": "all_exhausted", "packing": "concat", "seq_len": 32},
]
SLICES: list[Spelled] = [
    {"batch_size": 4, "world_size": 2},
    {"batch_size": 7, "world_size": 1, "drop_last": False},
    {"batch_size": 3, "world_size": 2, "skip": "samples:5-20,40-40", "offset": 3},
]


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("spec", SPECS)
def test_drawn_samples_are_at_the_places_of_the_samples_served(catalog: Catalog, spec: Spelled, slices: Spelled) -> None:
    plan = plan_of(catalog, "a", seed=5, **spec, **slices)
    order, drawn = served(plan, 2), draw(plan, 2)
    places = [stored(plan, source.member, source.epoch) for source in drawn.sources]
    assert drawn.num_measured == len(order) or (slices.get("drop_last") is False and drawn.num_measured > len(order) - 7)
    assert drawn.scattered.numbers.tolist() == list(range(drawn.num_measured))
    for samples in (drawn.scattered, drawn.batches):
        columns = (values.reshape(-1).tolist() for values in (samples.numbers, samples.sources, samples.places))
        for number, source, place in zip(*columns, strict=True):
            assert places[source][place] == order[number][0]


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if "mix" not in spec])
def test_measures_equal_what_counting_gives(catalog: Catalog, spec: Spelled, slices: Spelled) -> None:
    plan = plan_of(catalog, "a", seed=6, **spec, **slices)
    drawn, measures = draw(plan, 1), report(plan, 1)["measures"]
    packing, order = plan.members[0].epoch(1)
    counts = packing.samples_per_pool
    pools, starts = np.repeat(np.arange(len(counts)), counts).tolist(), np.cumsum(counts) - counts
    place_of = {identity: place for place, identity in enumerate(stored(plan, 0, 1))}
    places = [place_of[identity] for identity, _ in served(plan, 1)]
    pools_served, indices = order.samples(np.arange(len(pools)))
    position = {place: position for position, place in enumerate((starts[pools_served] + indices).tolist())}

    apart = []
    for place in places[: drawn.num_measured]:
        across = place + 1 < len(pools) and pools[place] != pools[place + 1]
        if place + 1 < len(pools) and not ("length_bucket_size" in spec and across):
            apart.append(abs(position[place] - position[place + 1]))
    assert measures["neighbour_distance_median"]["value"] == sorted(apart)[(len(apart) + 1) // 2 - 1]

    batches = [[places[number] for number in batch] for batch in drawn.batches.numbers.tolist()]
    first_blocks = plan.members[0].snapshot.first_block_of_shard
    blocks = [{pools[place] for place in batch} for batch in batches]
    shards = [{int(np.searchsorted(first_blocks, packing.blocks_of(pool)[0], "right")) for pool in drawn} for drawn in blocks]
    together = [place + 1 in batch for batch in batches for place in batch]
    assert measures["blocks_per_batch"]["value"] == pytest.approx(np.mean([len(units) for units in blocks]))
    assert measures["shards_per_batch"]["value"] == pytest.approx(np.mean([len(units) for units in shards]))
    assert measures["neighbours_in_one_batch"]["value"] == pytest.approx(np.mean(together))


@pytest.mark.parametrize(
    ("datasets", "spec"),
    [
        ({"a": [[10, 3, 25]] * 10}, {"batch_size": 4, "world_size": 4}),
        ({"a": [[1] * 90]}, {"batch_size": 8, "world_size": 2, "offset": 20, "drop_last": False}),
        (MEMBERS, {"batch_size": 8, "world_size": 2, "mix": MIX}),
        ({"a": [[30, 30]], "b": [[25]]}, {"batch_size": 16, "mix": "a:1,b:1", "stopping_strategy": "all_exhausted"}),
    ],
)
def test_expected_is_the_mean_over_uniform_shuffles(tmp_path: Path, datasets: dict[str, Geometry], spec: Spelled) -> None:
    plan = synthetic_plan(tmp_path, datasets, shuffle="global", seed=3, **spec)
    reports = [report(plan, epoch)["measures"] for epoch in range(60)]
    # Of few integers, the mean of an outer quantile is not the quantile of all of them.
    for name in reports[0].keys() - {f"neighbour_distance_{quantile}" for quantile in ("p1", "p10", "p90")}:
        measured = np.array([measures[name]["value"] for measures in reports])
        expected = np.array([measures[name]["expected"] for measures in reports])
        error = (measured - expected).std() / np.sqrt(len(reports))
        # The spread's is of a normal distribution; the counts differ from it by a few hundredths.
        close = (0.05 if name.startswith("unevenness") else 0.01) * expected.mean()
        assert abs((measured - expected).mean()) < 4 * error + close, name


def test_sorting_windows_by_length_limits_the_samples_measured(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_server.shuffle_report.sample._MAX_PLANS", 4)
    plan = plan_of(catalog, "a", batch_size=4, length_bucket_size=4, window=30)
    order = plan.members[0].epoch(7)[1]
    sampled = report(plan, 7)["sampled"]
    assert sampled["of_first"] < sampled["of_epoch"] / 2
    assert order.window(sampled["of_first"] - 1) <= 4
