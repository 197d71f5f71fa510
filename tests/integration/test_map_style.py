"""The map-style view: each sample of the order by its place, in any order that a sampler chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from penstock import RemoteDataset, SpecError
from support.corpora import write
from support.servers import Serve, Server

NUM_ROWS = 150


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    rows = [list(range(row, row + 1 + row % 9)) for row in range(NUM_ROWS)]
    recipe = 'columns = ["score", "name"]\nvocab_size = 1000'
    columns = {"tokens": rows, "score": [row / 2 for row in range(NUM_ROWS)], "name": [f"row {row}" for row in range(NUM_ROWS)]}
    write(shared / "numbers", recipe, columns, row_group_size=32)
    return serve(shared)


def dataset(server: Server, **settings: Any) -> RemoteDataset:
    spec: dict[str, Any] = {"batch_size": 4, "seq_len": 8, "seed": 3, "drop_last": False} | settings
    return RemoteDataset(server.url, "numbers", **spec)


def samples(data: RemoteDataset, epoch: int) -> list[tuple[list[int], float, str]]:
    data.set_epoch(epoch)
    found = [
        (ids[: sum(mask)], score, name)
        for batch in data
        for ids, mask, score, name in zip(
            batch["input_ids"].tolist(), batch["attention_mask"].tolist(), batch["score"].tolist(), batch["name"], strict=True
        )
    ]
    return found[:NUM_ROWS]


def shown(item: dict[str, Any]) -> tuple[list[int], float, str]:
    return item["input_ids"].tolist(), item["score"].item(), item["name"]


def test_items_are_the_samples_of_the_order_without_padding(server: Server) -> None:
    data = dataset(server)
    view = data.as_map_style(shown)
    assert len(view) == NUM_ROWS
    expected = [samples(dataset(server), epoch) for epoch in range(2)]
    assert expected[0] != expected[1]
    assert [view[i] for i in range(2 * NUM_ROWS)] == expected[0] + expected[1]
    assert [view[i] for i in (149, 3, 298, 3)] == [expected[0][149], expected[0][3], expected[1][148], expected[0][3]]
    assert list(view) == expected[0]
    with pytest.raises(IndexError, match="item -1 does not exist"):
        view[-1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_sampler_goes_through_the_order_and_resumes(server: Server, num_workers: int) -> None:
    view = dataset(server).as_map_style(shown)
    expected = samples(dataset(server), 1)
    given = []
    for rank in range(2):
        sampler = view.sampler(rank, 2)
        sampler.set_epoch(1)
        loader = DataLoader(view, batch_size=5, sampler=sampler, collate_fn=list, num_workers=num_workers)
        given.append([item for batch in loader for item in batch])
    assert [item for pair in zip(*given, strict=True) for item in pair] == expected

    sampler = view.sampler(0, 1)
    sampler.set_epoch(1)
    first = [next(items) for items in [iter(sampler)] for _ in range(7)]
    resumed = view.sampler(0, 1)
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(1)
    assert first + list(resumed) == [NUM_ROWS + i for i in range(NUM_ROWS)]
    sampler.set_epoch(2)
    assert sampler.state_dict() == {"epoch": 2, "num_given": 0}
    again = iter(resumed)
    assert resumed.state_dict()["num_given"] == 0
    assert list(again) == first + list(range(NUM_ROWS + 7, 2 * NUM_ROWS))


def test_samplers_of_torch_give_each_row_once(server: Server) -> None:
    view = dataset(server, packing="rows").as_map_style(shown)
    rows = sorted(name for _, _, name in samples(dataset(server), 0))
    torch.manual_seed(0)
    assert sorted(view[i][2] for i in RandomSampler(view)) == rows
    ranks: list[Any] = [DistributedSampler(view, num_replicas=2, rank=rank, shuffle=False) for rank in range(2)]
    assert sorted(view[i][2] for rank in ranks for i in rank) == rows


def test_packed_samples_are_items_and_a_flat_batch_is_refused(server: Server) -> None:
    view = dataset(server, packing="best_fit").as_map_style()
    assert view[0].keys() == {"input_ids", "attention_mask", "labels", "position_ids"}
    assert view[0]["input_ids"].shape == (8,)
    with pytest.raises(SpecError, match="leave flatten out"):
        dataset(server, flatten=True).as_map_style()
