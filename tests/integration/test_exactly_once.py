"""Every row exactly once an epoch: for every world size, number of loader workers and shuffle, seen through a real server."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from penstock import RemoteDataset
from penstock.spec import Shuffle
from support.corpora import write_numbered
from support.recorded import rows_of
from support.servers import Serve, Server

NUM_ROWS, BATCH_SIZE = 480, 5
WORLD_SIZES = [1, 2, 3, 8]
SHUFFLES = ["none", "window", "global"]

# Five workers on two cores are more than torch advises; the order must hold all the same.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    write_numbered(shared / "numbers", NUM_ROWS)
    write_numbered(shared / "odd", 487)
    return serve(shared)


def dataset(server: Server, rank: int, world_size: int, shuffle: Shuffle, **spec: Any) -> RemoteDataset:
    return RemoteDataset(
        server.url, spec.pop("dataset", "numbers"), batch_size=BATCH_SIZE, seq_len=8, shuffle=shuffle, window=100,
        rank=rank, world_size=world_size, prefetch_bytes=1 << 20, tensors=["input_ids"], **spec,
    )  # fmt: skip


def sample_order(per_rank: list[list[list[int]]]) -> list[int]:
    """The samples of an epoch in the order of step, rank and index."""
    return [row for step in zip(*per_rank, strict=True) for batch in step for row in batch]


@pytest.mark.parametrize(("world_size", "shuffle"), list(product(WORLD_SIZES, SHUFFLES)))
def test_epoch_gives_every_row_once_for_any_ranks_and_workers(server: Server, world_size: int, shuffle: Shuffle) -> None:
    """Any two of world size, shuffle and number of workers are met together."""
    ranks = [dataset(server, rank, world_size, shuffle) for rank in range(world_size)]
    for data in ranks:
        data.set_epoch(3)
    direct = [rows_of(data) for data in ranks]
    order = sample_order(direct)
    assert Counter(order) == Counter(range(NUM_ROWS))
    assert [len(batches) for batches in direct] == [len(data) for data in ranks]
    for num_workers in (0, 1, 2, 5) if shuffle == "window" else (2,) if world_size == 2 else ():
        for rank in range(world_size) if world_size <= 2 else [world_size - 1]:  # the ranks know nothing of one another
            assert rows_of(DataLoader(ranks[rank], batch_size=None, num_workers=num_workers)) == direct[rank]


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_schedule_order_is_the_same_for_every_world_size(server: Server, shuffle: Shuffle) -> None:
    orders = [
        sample_order([rows_of(dataset(server, rank, world_size, shuffle)) for rank in range(world_size)])
        for world_size in WORLD_SIZES
    ]
    assert all(order == orders[0] for order in orders)
    assert (orders[0] == sorted(orders[0])) == (shuffle == "none")


@pytest.mark.parametrize(("world_size", "shuffle"), [*product(WORLD_SIZES, ["window"]), (2, "none"), (2, "global")])
def test_provenance_names_the_row_of_each_sample(server: Server, world_size: int, shuffle: Shuffle) -> None:
    shards = {f"part-{n:03}.parquet": first for n, first in enumerate((0, 160, 320))}
    spec: dict[str, Any] = {"batch_size": BATCH_SIZE, "seq_len": 4, "shuffle": shuffle, "window": 100, "world_size": world_size}
    seen = Counter[int]()
    for rank in range(world_size):
        batches = f"/v1/datasets/numbers/epochs/1/ranks/{rank}/batches"
        frames = server.frames(batches, **spec)
        for frame in frames:
            answer = server.json(f"{batches}/{frame.step}/provenance", **spec)
            assert (answer["step"], answer["rank"]) == (frame.step, rank)
            for sample, ids, length in zip(
                answer["samples"], frame.tensors["input_ids"], frame.tensors["lengths"], strict=True
            ):
                [source] = sample["sources"]
                row = shards[source["shard"]] + 32 * source["row_group"] + source["row"]
                assert row == ids[0]
                assert (source["start"], source["stop"]) == (0, length) == (0, min(1 + row % 7, 4))
                seen[row] += 1
    assert seen == Counter(range(NUM_ROWS))


@pytest.mark.parametrize(("world_size", "drop_last"), list(product(WORLD_SIZES, [True, False])))
def test_uneven_epoch_drops_or_repeats_less_than_a_step(server: Server, world_size: int, drop_last: bool) -> None:
    ranks = [dataset(server, rank, world_size, "window", dataset="odd", drop_last=drop_last) for rank in range(world_size)]
    per_rank = [rows_of(data) for data in ranks]
    assert len({len(batches) for batches in per_rank}) == 1
    order = sample_order(per_rank)
    counts = Counter(order)
    if drop_last:
        assert set(counts.values()) == {1}
        assert 487 - len(counts) < BATCH_SIZE * world_size
    else:
        assert set(counts) == set(range(487))
        assert order[487:] == order[: len(order) - 487]
        assert len(order) - 487 < BATCH_SIZE * world_size


def test_epochs_and_seeds_have_different_orders(server: Server) -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        data = RemoteDataset(server.url, "numbers", batch_size=BATCH_SIZE, seq_len=8, seed=seed, rank=0, world_size=1)
        data.set_epoch(epoch)
        return tuple(sample_order([rows_of(data)]))

    orders = {(seed, epoch): order(seed, epoch) for seed in (41, 42) for epoch in (0, 1)}
    assert len(set(orders.values())) == 4
    assert orders[41, 1] != orders[42, 0]
    assert order(41, 1) == orders[41, 1]


def test_persistent_workers_see_a_new_epoch(server: Server) -> None:
    data, alone = (dataset(server, 0, 1, "window") for _ in range(2))
    loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    for epoch in range(3):
        data.set_epoch(epoch)
        alone.set_epoch(epoch)
        assert rows_of(loader) == rows_of(alone)


@pytest.mark.parametrize(("context", "num_workers"), [("fork", 4), ("forkserver", 2), ("spawn", 1)])
def test_workers_can_be_forked_or_pickled(server: Server, context: str, num_workers: int) -> None:
    data = dataset(server, 0, 1, "window")
    expected = rows_of(data)
    loader = DataLoader(data, batch_size=None, num_workers=num_workers, multiprocessing_context=context)
    assert rows_of(loader) == expected
