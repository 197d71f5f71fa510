"""The rank that a process finds for itself, and the checks that all ranks share one snapshot and one order."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from penstock import PenstockError, SpecError, distributed
from penstock.distributed import PeerCheck, SnapshotConsensus, find_rank
from penstock.spec import Spec

SLURM = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
IN_BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}  # inherited by mpirun's processes in a batch script
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1"}
Jobs = Callable[[Any], None]


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("RANK", "WORLD_SIZE", "SLURM_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(distributed, "_taken", {})
    monkeypatch.setattr(distributed, "_TOLERANCE_SECONDS", 0.0)


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """Puts this process into the job of a store."""
    return lambda store: monkeypatch.setattr(distributed, "job_store", lambda: store)


def set_environment(monkeypatch: pytest.MonkeyPatch, *parts: dict[str, str]) -> None:
    for part in parts:
        for name, value in part.items():
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("parts", "rank"),
    [
        (({},), (0, 1)),
        (({"RANK": "1", "WORLD_SIZE": "2"},), (1, 2)),
        (({"WORLD_SIZE": "1"},), (0, 1)),
        ((IN_BATCH,), (0, 1)),  # a script that srun starts nothing of
        ((IN_BATCH, {"SLURM_STEP_NUM_TASKS": "1"}), (0, 1)),  # an interactive step
        ((IN_BATCH, OPEN_MPI, {"RANK": "1", "WORLD_SIZE": "2"}), (1, 2)),
        ((SLURM, {"SLURM_PROCID": "1", "RANK": "0", "WORLD_SIZE": "1"}), (0, 1)),  # each task a job of its own
    ],
)
def test_find_rank_reads_the_environment(
    parts: tuple[dict[str, str], ...], rank: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, *parts)
    assert find_rank(None, None) == rank


@pytest.mark.parametrize(
    ("parts", "keyword"),
    [
        ((SLURM, {"SLURM_PROCID": "1"}), r"srun started 2 processes \(SLURM_STEP_NUM_TASKS\)"),
        ((OPEN_MPI,), r"mpirun started 2 processes \(OMPI_COMM_WORLD_SIZE\)"),
        ((IN_BATCH, MPICH, {"SLURM_STEP_NUM_TASKS": "1"}), r"mpirun started 2 processes \(PMI_SIZE\)"),
        (({"RANK": "0"},), "RANK=0 and WORLD_SIZE=None"),
        (({"WORLD_SIZE": "2"},), "RANK=None and WORLD_SIZE=2"),
        (({"RANK": "2", "WORLD_SIZE": "2"},), "RANK=2 and WORLD_SIZE=2"),
    ],
)
def test_find_rank_refuses_an_ambiguous_environment_unless_the_rank_is_given(
    parts: tuple[dict[str, str], ...], keyword: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, *parts)
    with pytest.raises(SpecError, match=keyword) as caught:
        find_rank(None, None)
    assert caught.value.parameters == ("rank", "world_size")
    assert find_rank(0, 1) == (0, 1)


def test_find_rank_prefers_torch_distributed_to_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, SLURM)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert find_rank(None, None) == (0, 1)
    finally:
        torch.distributed.destroy_process_group()


def test_consensus_without_a_job_is_the_proposed_snapshot() -> None:
    consensus = SnapshotConsensus("stories")
    assert consensus.propose("5d") == "5d"
    consensus.check("c4")


def test_consensus_is_kept_per_question(join: Jobs) -> None:
    join(HashStore())
    assert [SnapshotConsensus(name).propose(value) for name, value in (("one", "5d"), ("other", "c4"))] == ["5d", "c4"]


def test_consensus_holds_when_one_rank_made_one_dataset_more(join: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    join(HashStore())
    taken: tuple[dict[str, str], dict[str, str]] = ({}, {})

    def propose(rank: int, snapshot: str) -> str:
        monkeypatch.setattr(distributed, "_taken", taken[rank])
        return SnapshotConsensus("stories").propose(snapshot)

    assert propose(0, "5d") == "5d"  # one more, to look at a few batches
    assert (propose(0, "5d"), propose(1, "c4")) == ("5d", "5d")  # data arrived in between
    assert (propose(0, "c4"), propose(1, "e7")) == ("c4", "c4")
    assert (propose(1, "e7"), propose(0, "e7")) == ("e7", "e7")
    join(HashStore())
    assert propose(0, "5d") == "5d"  # another job in the same process


def test_consensus_settles_on_the_snapshot_of_the_rank_that_made_the_dataset_first(
    join: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that made one dataset more may have a note that it has not seen, and then is refused."""
    taken: tuple[dict[str, str], dict[str, str]] = ({}, {})

    def be(rank: int) -> None:
        monkeypatch.setattr(distributed, "_taken", taken[rank])

    def propose(rank: int, snapshot: str) -> SnapshotConsensus:
        be(rank)
        consensus = SnapshotConsensus("stories")
        consensus.propose(snapshot)
        return consensus

    join(HashStore())
    for _ in range(2):
        for rank, snapshot in ((0, "5d"), (1, "c4")):  # data arrived in between
            propose(rank, snapshot).settle("5d")
    propose(0, "5d").settle("5d")  # one more
    behind, ahead = propose(1, "c4"), propose(0, "c4")
    ahead.settle("c4")
    be(1)
    for _ in range(2):  # a refused rank stays refused
        with pytest.raises(PenstockError, match="would train on snapshot 5d, and others do on c4"):
            behind.settle("5d")
    for _ in range(2):
        propose(1, "e7")
    be(0)
    ahead.settle("c4")  # later notes do not stop an iteration that has started


def test_consensus_refuses_a_snapshot_that_differs_from_the_first_noted(join: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    join(HashStore())
    SnapshotConsensus("stories").check("5d")
    monkeypatch.setattr(distributed, "_taken", {})  # as in another process
    late = SnapshotConsensus("stories")
    for _ in range(2):
        with pytest.raises(PenstockError, match="this rank would train on snapshot c4, and others do on 5d"):
            late.check("c4")


def test_consensus_leaves_the_parents_store_alone_in_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(str(tmp_path / "store"), 1)
    job = SimpleNamespace(WORLD=SimpleNamespace(get_group_store=lambda: store))
    monkeypatch.setattr(torch.distributed, "group", job)
    monkeypatch.setattr(distributed, "is_distributed", lambda: True)
    child = os.fork()
    if not child:
        os._exit(SnapshotConsensus("stories").propose("c4") != "c4")
    assert os.waitpid(child, 0)[1] == 0
    assert SnapshotConsensus("stories").propose("5d") == "5d"


def test_consensus_ignores_a_job_that_has_ended(join: Jobs) -> None:
    class Ended:
        def compare_set(self, *_: str) -> bytes:
            raise RuntimeError("Connection reset by peer")

    early, late = SnapshotConsensus("stories"), SnapshotConsensus("stories")
    join(HashStore())
    assert early.propose("5d") == "5d"
    join(Ended())
    assert (early.propose("c4"), late.propose("c4")) == ("5d", "c4")


def start(rank: int, epoch: int = 1, step: int = 0, world_size: int = 2, dataset: str = "docs", **other: Any) -> PeerCheck:
    spec: dict[str, Any] = {"batch_size": 8, "seed": 7, "snapshot": "a", "world_size": world_size, **other}
    return PeerCheck(dataset, Spec(**spec), epoch, step, rank)


@pytest.fixture
def tcp_job(join: Jobs) -> None:
    join(PrefixStore("job", TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)))


@pytest.mark.usefixtures("tcp_job")
def test_peer_check_passes_ranks_that_start_together() -> None:
    first = start(0, world_size=4)
    for rank in (1, 2, 3):
        assert first.differences(1) == ""
        start(rank, world_size=4)
    start(1, epoch=2, world_size=4)  # it is ahead
    assert [first.differences(number) for number in range(1, 200)] == [""] * 199


@pytest.mark.usefixtures("tcp_job")
@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"seed": 8}, "rank 1 (seed=8, not 7)"),
        ({"batch_size": 4, "packing": "concat"}, "rank 1 (batch_size=4, not 8, packing=concat, not rows)"),
        ({"epoch": 2}, "rank 1 (epoch=2, not 1)"),
        ({"step": 20}, "rank 1 (step=20, not 0)"),
        ({"epoch": 0, "seed": 8}, "rank 1 (epoch=0, not 1, seed=8, not 7)"),
        ({"epoch": 0, "step": 20}, ""),  # it may come here yet
        ({"dataset": "wiki"}, ""),
    ],
)
def test_peer_check_describes_a_rank_that_starts_elsewhere(other: dict[str, Any], text: str) -> None:
    first = start(0)
    start(1, **other)
    assert [first.differences(number) for number in range(1, 17)] == [""] * 15 + [text]


@pytest.mark.usefixtures("tcp_job")
def test_peer_check_tolerates_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_TOLERANCE_SECONDS", 60.0)
    first = start(0, world_size=9)
    for rank in range(1, 9):
        start(rank, world_size=9, seed=rank)
    assert [first.differences(number) for number in range(1, 33)] == [""] * 32
    monkeypatch.setattr(distributed, "_TOLERANCE_SECONDS", 0.0)
    assert [first.differences(number) for number in range(33, 64)] == [""] * 31
    others = [f"rank {rank} (seed={rank}, not 7)" for rank in (1, 2, 3, 4)]  # rank 7 has the seed of rank 0
    assert first.differences(64) == f"{', '.join(others)} and 3 more"


def test_peer_check_needs_a_store_that_answers_at_once(join: Jobs, tmp_path: Path) -> None:
    for store in (None, PrefixStore("job", FileStore(str(tmp_path / "store"), 2))):
        join(store)
        first = start(0)
        start(1, seed=8)
        assert first.differences(16) == ""
