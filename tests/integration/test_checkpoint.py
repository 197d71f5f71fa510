"""torch.distributed.checkpoint saves the dataset with the model, and restores it: in one process, and over two ranks."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

from penstock import RemoteDataset, StateMismatch
from support.corpora import write_numbered
from support.processes import Fork
from support.servers import Serve, Server

NUM_ROWS = 480

# Its own words on running without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def server(serve: Serve, shared: Path) -> Server:
    write_numbered(shared / "numbers", NUM_ROWS)
    return serve(shared)


def dataset(server: Server, **settings: Any) -> RemoteDataset:
    return RemoteDataset(server.url, "numbers", **({"batch_size": 4, "seq_len": 8, "rank": 0, "world_size": 1} | settings))


def rows(data: RemoteDataset) -> list[int]:
    return [row for batch in data for row in batch["input_ids"][:, 0].tolist()]


def rank_of_two(rank: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    return {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}


def test_dcp_saves_and_restores_a_dataset_beside_a_model(server: Server, tmp_path: Path) -> None:
    model, data = torch.nn.Linear(2, 2), dataset(server)
    assert isinstance(data, Stateful)
    data.load_state_dict(state_dict=data.state_dict())  # as torch names it
    data.set_epoch(1)
    whole = rows(data)
    for number, _ in enumerate(data, start=1):
        if number == 18:
            save({"model": model.state_dict(), "data": data}, checkpoint_id=tmp_path)
            break
    for world_size in (1, 3):
        found = torch.nn.Linear(2, 2)
        resumed = [dataset(server, world_size=world_size, rank=rank) for rank in range(world_size)]
        for again in resumed:
            load({"model": found.state_dict(), "data": again}, checkpoint_id=tmp_path)
        assert torch.equal(found.weight, model.weight)
        assert resumed[0].state_dict().keys() == data.state_dict().keys()
        assert sorted(row for again in resumed for row in rows(again)) == sorted(whole[18 * 4 :])


def test_dcp_refuses_another_order_with_what_differs(server: Server, tmp_path: Path) -> None:
    save({"data": dataset(server)}, checkpoint_id=tmp_path)
    with pytest.raises(StateMismatch, match="packing: 'rows' then, 'concat' now"):
        load({"data": dataset(server, packing="concat")}, checkpoint_id=tmp_path)


def test_dcp_checkpoint_of_two_ranks_resumes_on_one(server: Server, tmp_path: Path) -> None:
    script = Path(__file__).with_name("dcp_trainer.py")
    for part in ("first", "second"):
        with ExitStack() as stack:
            ranks = [
                stack.enter_context(closing(Fork(server.url, tmp_path, part, script=script, environment=rank_of_two(rank))))
                for rank in (0, 1)
            ]
            for rank in ranks:
                status, _, errors = rank.communicate(timeout=240)
                assert status == 0, errors
    first, second = (
        Counter(row for rank in (0, 1) for row in json.loads((tmp_path / f"{part}-{rank}.json").read_text()))
        for part in ("first", "second")
    )
    assert sum(first.values()) == 2 * 4 * 20
    assert first + second == Counter(range(NUM_ROWS))
    alone = dataset(server)
    load({"data": alone}, checkpoint_id=tmp_path / "checkpoint")
    assert Counter(rows(alone)) == second
