"""Ranks that start while data arrives: all of a job begin on one snapshot."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

import penstock.agreement
from corpora import write_numbered
from forks import Fork
from penstock import PenstockError, RemoteDataset
from penstock.agreement import Agreement
from serving import Server

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


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process has taken in other tests is forgotten."""
    monkeypatch.setattr(penstock.agreement, "_taken", {})


@pytest.fixture
def begin(tmp_path: Path, serve: Callable[..., Server]) -> Iterator[Callable[[str], Job]]:
    folder = write_numbered(tmp_path / "data" / "numbers", NUM_ROWS)
    server = serve(folder.parent, "--poll-seconds", "0")
    with ExitStack() as stack:
        yield lambda when: Job(server, folder, stack, tmp_path / "store", when)
    server.kill()


def test_a_rank_that_comes_later_takes_the_snapshot_of_the_first(begin: Callable[[str], Job]) -> None:
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


def test_ranks_that_cannot_agree_in_time_are_told_before_they_train(begin: Callable[[str], Job]) -> None:
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
def is_late(tmp_path: Path, serve: Callable[..., Server]) -> Iterator[RemoteDataset]:
    """A dataset that was made before its process became rank 1 of 2."""
    data = RemoteDataset(serve(write_numbered(tmp_path / "data" / "numbers", NUM_ROWS).parent).url, "numbers")
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield data
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded, says Python 3.12
def test_a_dataset_that_was_made_before_the_rank_is_refused_also_by_loader_workers(is_late: RemoteDataset) -> None:
    refused = partial(pytest.raises, PenstockError, match="made for rank 0 of 1, before .* This is rank 1 of 2")
    for context in (None, "fork", "spawn", "forkserver"):
        loader = DataLoader(is_late, batch_size=None, num_workers=int(bool(context)), multiprocessing_context=context)
        with refused():
            list(loader)
    with refused():
        is_late.set_epoch(1)


def test_a_process_without_a_job_agrees_with_itself() -> None:
    agreement = Agreement("stories")
    assert agreement.first("5d") == "5d"
    agreement.check("c4")


def test_each_question_has_an_answer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(penstock.agreement, "job_store", lambda: store)
    assert [Agreement(name).first(answer) for name, answer in (("one", "5d"), ("other", "c4"))] == ["5d", "c4"]


def test_a_rank_that_has_made_one_dataset_more_agrees_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(penstock.agreement, "job_store", lambda: store)
    taken: tuple[dict[str, str], dict[str, str]] = ({}, {})

    def ask(rank: int, answer: str) -> str:
        monkeypatch.setattr(penstock.agreement, "_taken", taken[rank])
        return Agreement("stories").first(answer)

    assert ask(0, "5d") == "5d"  # one more, to look at a few batches
    assert (ask(0, "5d"), ask(1, "c4")) == ("5d", "5d")  # data arrived in between
    assert (ask(0, "c4"), ask(1, "e7")) == ("c4", "c4")
    assert (ask(1, "e7"), ask(0, "e7")) == ("e7", "e7")
    monkeypatch.setattr(penstock.agreement, "job_store", torch.distributed.HashStore)  # type: ignore[attr-defined]
    assert ask(0, "5d") == "5d"  # of another job in the same process


def test_a_later_dataset_is_on_the_snapshot_of_the_rank_that_made_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if that had nothing new yet. A rank that has made one more may be told what it has not seen, and then is refused."""
    taken: tuple[dict[str, str], dict[str, str]] = ({}, {})

    def be(rank: int) -> None:
        monkeypatch.setattr(penstock.agreement, "_taken", taken[rank])

    def ask(rank: int, answer: str) -> Agreement:
        be(rank)
        agreement = Agreement("stories")
        agreement.first(answer)
        return agreement

    for _ in range(2):  # the second time in a job of its own, whose processes have taken notes before
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        monkeypatch.setattr(penstock.agreement, "job_store", lambda store=store: store)
        for _ in range(2):
            for rank, answer in ((0, "5d"), (1, "c4")):  # data arrived in between
                ask(rank, answer).settle("5d")
    ask(0, "5d").settle("5d")  # one more
    behind, ahead = ask(1, "c4"), ask(0, "c4")
    ahead.settle("c4")
    be(1)
    for _ in range(2):
        with pytest.raises(PenstockError, match="would train on snapshot 5d, and others do on c4: .* one dataset more"):
            behind.settle("5d")
    for _ in range(2):
        ask(1, "e7")
    be(0)
    ahead.settle("c4")  # once it has begun nothing that is noted later stops it
    early, late = ask(0, "f8"), ask(0, "a9")
    early.settle("f8" if early.first("f8") == "f8" else "e7")  # a rank is not refused for what it made itself
    late.settle("a9")


def test_a_fork_of_a_rank_leaves_alone_the_store_that_is_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    job = SimpleNamespace(WORLD=SimpleNamespace(get_group_store=lambda: store))
    monkeypatch.setattr(torch.distributed, "group", job)
    monkeypatch.setattr(penstock.agreement, "is_distributed", lambda: True)
    child = os.fork()
    if not child:
        os._exit(Agreement("stories").first("c4") != "c4")
    assert os.waitpid(child, 0)[1] == 0
    assert Agreement("stories").first("5d") == "5d"


def test_a_job_that_has_ended_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended:
        def compare_set(self, *_: str) -> bytes:
            raise RuntimeError("Connection reset by peer")

    early, late = Agreement("stories"), Agreement("stories")
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(penstock.agreement, "job_store", lambda: store)
    assert early.first("5d") == "5d"
    monkeypatch.setattr(penstock.agreement, "job_store", Ended)
    assert (early.first("c4"), late.first("c4")) == ("5d", "c4")


def test_a_rank_that_is_refused_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    early, late = Agreement("stories"), Agreement("stories")
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(penstock.agreement, "job_store", lambda: store)
    early.check("5d")
    monkeypatch.setattr(penstock.agreement, "_taken", {})  # as in another process
    for _ in range(2):
        with pytest.raises(PenstockError, match="this rank would train on snapshot c4, and others do on 5d"):
            late.check("c4")
