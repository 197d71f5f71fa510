"""Ranks that start while data arrives: all ranks of a job train on one snapshot."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from penstock import PenstockError, RemoteDataset
from support.corpora import write_numbered
from support.processes import Fork
from support.servers import Serve, Server

NUM_ROWS = 160


class Job:
    """Two ranks, on data that grows."""

    def __init__(self, server: Server, folder: Path, stack: ExitStack, store: Path, when: str) -> None:
        self._server, self._folder = server, folder
        script = Path(__file__).with_name("late_rank.py")
        self._ranks = [
            stack.enter_context(
                closing(
                    Fork(server.url, store, when, script=script, environment=os.environ | {"RANK": rank, "WORLD_SIZE": "2"})
                )
            )
            for rank in ("0", "1")
        ]

    def make(self, rank: int) -> str:
        """Has a rank make its dataset; what snapshot it is on."""
        stdin = self._ranks[rank].stdin
        stdin.write("\n")
        stdin.flush()
        return self.told(rank, "snapshot")

    def told(self, rank: int, what: str) -> str:
        """The next line of a rank."""
        line = self._ranks[rank].stdout.readline().strip()
        assert line.startswith(f"{what} "), line + self._ranks[rank].errors()
        return line.removeprefix(f"{what} ")

    def ids(self) -> list[int]:
        """What both ranks trained on in their epochs."""
        return sorted(json.loads(self.told(0, "ids")) + json.loads(self.told(1, "ids")))

    def grow(self) -> None:
        """One more shard, which the server takes in."""
        number = len(list(self._folder.iterdir()))
        shutil.copy2(self._folder / "part-000.parquet", self._folder / f"part-9{number}.parquet")
        httpx.post(f"{self._server.url}/v1/datasets/numbers/refresh", timeout=60).raise_for_status()


@pytest.fixture
def begin(tmp_path: Path, serve: Serve) -> Iterator[Callable[[str], Job]]:
    folder = write_numbered(tmp_path / "data" / "numbers", NUM_ROWS)
    server = serve(folder.parent, "--poll-seconds", "0")
    with ExitStack() as stack:
        yield lambda when: Job(server, folder, stack, tmp_path / "store", when)
    server.kill()


def test_later_rank_takes_the_snapshot_of_the_first(begin: Callable[[str], Job]) -> None:
    job = begin("after")
    first = job.make(1)
    job.grow()
    assert job.make(0) == first
    assert job.ids() == list(range(NUM_ROWS))
    # What is asked for anew is what is the latest by then.
    second = job.make(0)
    job.grow()
    assert (job.make(1), second != first) == (second, True)
    assert len(job.ids()) > NUM_ROWS


def test_ranks_on_two_snapshots_are_refused_before_they_train(begin: Callable[[str], Job]) -> None:
    job = begin("before")
    early = job.make(0)
    job.grow()
    late = job.make(1)
    assert early != late
    told = {rank: job._ranks[rank].stdout.readline() for rank in (0, 1)}
    refused = [rank for rank in (0, 1) if told[rank].startswith("refused")]
    assert len(refused) == 1, told
    mine, others = (late, early) if refused == [1] else (early, late)
    assert f"this rank would train on snapshot {mine}, and others do on {others}" in told[refused[0]]
    assert f"pass snapshot={others!r}" in told[refused[0]]


@pytest.fixture
def is_late(tmp_path: Path, serve: Serve) -> Iterator[RemoteDataset]:
    """A dataset that was made before its process became rank 1 of 2."""
    data = RemoteDataset(serve(write_numbered(tmp_path / "data" / "numbers", NUM_ROWS).parent).url, "numbers")
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield data
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded, says Python 3.12
def test_dataset_made_before_the_rank_changed_is_refused_also_by_loader_workers(is_late: RemoteDataset) -> None:
    refused = partial(pytest.raises, PenstockError, match="made for rank 0 of 1, before .* This is rank 1 of 2")
    for context in (None, "fork", "forkserver"):
        loader = DataLoader(is_late, batch_size=None, num_workers=int(bool(context)), multiprocessing_context=context)
        with refused():
            list(loader)
    with refused():
        is_late.set_epoch(1)
