"""The rank that a process finds for itself, in the environments that launchers make."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed

from penstock import SpecError
from penstock.rank import find_rank

SLURM = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
IN_BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}  # what mpirun's processes inherit of a batch script
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1"}


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("RANK", "WORLD_SIZE", "SLURM_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)


def environment(monkeypatch: pytest.MonkeyPatch, *parts: dict[str, str]) -> None:
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
        ((SLURM, {"SLURM_PROCID": "1", "RANK": "1", "WORLD_SIZE": "2"}), (1, 2)),
        ((IN_BATCH, OPEN_MPI, {"RANK": "1", "WORLD_SIZE": "2"}), (1, 2)),
        ((SLURM, {"SLURM_PROCID": "0", "SLURM_PTY_PORT": "4711"}), (0, 1)),  # the terminal of srun --pty
        # A torchrun a task: of one job, whose rendezvous chose the ranks, or each of a job of its own.
        ((SLURM, {"SLURM_PROCID": "1", "RANK": "0", "WORLD_SIZE": "2"}), (0, 2)),
        ((SLURM, {"SLURM_PROCID": "1", "RANK": "0", "WORLD_SIZE": "1"}), (0, 1)),
    ],
)
def test_the_rank_is_what_the_environment_says(
    parts: tuple[dict[str, str], ...], rank: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch, *parts)
    assert find_rank(None, None) == rank


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((SLURM, {"SLURM_PROCID": "1"}), r"srun has started 2 processes \(SLURM_STEP_NUM_TASKS\), and nothing says which"),
        ((SLURM, {"SLURM_PROCID": "1", "SLURM_PTY_PORT": "4711"}), "srun has started 2 processes"),
        ((OPEN_MPI,), r"mpirun has started 2 processes \(OMPI_COMM_WORLD_SIZE\)"),
        ((IN_BATCH, MPICH, {"SLURM_STEP_NUM_TASKS": "1"}), r"mpirun has started 2 processes \(PMI_SIZE\)"),
        (({"RANK": "0"},), "says RANK=0 and no WORLD_SIZE: it takes both"),
        (({"WORLD_SIZE": "2"},), "says WORLD_SIZE=2 and no RANK: it takes both"),
    ],
)
def test_a_rank_that_others_would_find_too_is_refused_unless_it_is_given(
    parts: tuple[dict[str, str], ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch, *parts)
    with pytest.raises(
        SpecError, match=message + ".*Make the dataset after torch.distributed is initialized, or pass rank and"
    ):
        find_rank(None, None)
    assert find_rank(0, 1) == (0, 1)


def test_the_rank_that_torch_distributed_gives_is_not_doubted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, SLURM)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert find_rank(None, None) == (0, 1)
    finally:
        torch.distributed.destroy_process_group()
