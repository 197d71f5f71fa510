"""Who this process is: which rank of how many, and which loader worker of that rank."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch.distributed
from torch.utils.data import Dataset, get_worker_info

from penstock.errors import PenstockError, SpecError
from penstock.numbers import is_whole, plain

MAX_WORKERS = 1024
_WAY_OUT = "Make the dataset after torch.distributed is initialized, or pass rank and world_size"


def is_distributed() -> bool:
    """Whether torch.distributed is initialized in this process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: as given, else torch.distributed's, else those of RANK and WORLD_SIZE, else 0 of 1.

    Raises SpecError: they are no rank of a world, or this is one of several processes that would all take it for theirs.
    """
    if (rank is None) != (world_size is None):
        raise SpecError("give both rank and world_size, or neither", ("rank", "world_size"))
    if rank is None or world_size is None:
        if is_distributed():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return _of_environment()
    rank, world_size = plain(rank), plain(world_size)
    if not (is_whole(rank) and is_whole(world_size) and 0 <= rank < world_size):
        raise SpecError(
            f"rank={rank!r} and world_size={world_size!r} must be whole numbers, rank from 0 and below world_size",
            ("rank", "world_size"),
        )
    return rank, world_size


def check_rank(rank: int, world_size: int) -> None:
    """Whether this process is still the rank that was found for it. Raises PenstockError: it is another by now."""
    if not is_distributed():
        return
    now = find_rank(None, None)
    if now != (rank, world_size):
        raise PenstockError(
            f"this dataset was made for rank {rank} of {world_size}, before torch.distributed was initialized as it is now. "
            f"This is rank {now[0]} of {now[1]}: ranks would train on the same samples. Make it after "
            f"init_process_group, or pass rank and world_size."
        )


def check_not_sharded_again(data: Dataset[Any], world_size: int) -> None:
    """Raises PenstockError: Accelerate iterates over this dataset to split each rank's share among the ranks again."""
    if world_size == 1 or "accelerate" not in sys.modules:
        return
    from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard
    from accelerate.state import GradientState

    loader = GradientState().active_dataloader  # the prepared loader whose loop has begun last
    splits = isinstance(loader, DataLoaderDispatcher) or isinstance(getattr(loader, "dataset", None), IterableDatasetShard)
    if splits and _holds(loader.dataset, data):
        raise PenstockError(
            f"this dataset gives each of {world_size} ranks its share, and accelerator.prepare() splits that share among the "
            f"ranks again: most samples would be lost. Prepare the model and the optimizer only, and loop over the dataset."
        )


def _holds(dataset: Dataset[Any], data: Dataset[Any]) -> bool:
    """Whether one dataset is the other, or wraps it."""
    if dataset is data:
        return True
    return any(isinstance(value, Dataset) and _holds(value, data) for value in vars(dataset).values())


def _of_environment() -> tuple[int, int]:
    has_rank, has_size = "RANK" in os.environ, "WORLD_SIZE" in os.environ
    if not has_rank and not has_size:
        _check_alone()
        return 0, 1
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if has_rank != has_size and (has_rank or world_size != "1"):
        told, lacks = (f"RANK={rank}", "WORLD_SIZE") if has_rank else (f"WORLD_SIZE={world_size}", "RANK")
        raise SpecError(
            f"the environment says {told} and no {lacks}: it takes both to tell ranks apart. {_WAY_OUT}.",
            ("rank", "world_size"),
        )
    are_numbers = all(value.isascii() and value.isdigit() for value in (rank, world_size))
    if not are_numbers or int(rank) >= int(world_size):
        raise SpecError(
            f"the environment says RANK={rank} and WORLD_SIZE={world_size}: RANK must be a whole number below WORLD_SIZE. "
            f"Start with torchrun, or pass rank and world_size.",
            ("rank", "world_size"),
        )
    return int(rank), int(world_size)


def _check_alone() -> None:
    """Raises SpecError: srun or mpirun started several processes, and none has a RANK.

    The launchers' variables do not give the rank: in a Slurm job all of mpirun's processes inherit those of the batch script.
    """
    if "SLURM_PTY_PORT" in os.environ and os.environ.get("SLURM_PROCID") == "0":
        return  # a terminal, srun --pty, which only the first task has
    for name, launcher in (("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun"), ("PMI_SIZE", "mpirun")):
        number = os.environ.get(name, "1")
        if number not in ("0", "1"):
            raise SpecError(
                f"{launcher} has started {number} processes ({name}), and nothing says which rank this is: each would take "
                f"itself for rank 0 of 1, and all would train on the same samples. {_WAY_OUT}, 0 and 1 if each process trains "
                f"by itself.",
                ("rank", "world_size"),
            )


@dataclass(frozen=True, slots=True)
class Worker:
    """A DataLoader's worker process: of every `stride` steps it takes one, from the `first` on.

    loader_seed  what the DataLoader drew when its workers began; the same for all of them
    """

    first: int
    stride: int
    loader_seed: int


def find_worker() -> Worker | None:
    """The worker that this process is; None in the process of the training loop. Raises PenstockError: there are too many."""
    info = get_worker_info()
    if info and info.num_workers > MAX_WORKERS:
        raise PenstockError(
            f"a DataLoader of {info.num_workers:,} workers has more than the {MAX_WORKERS:,} that are kept track of: take "
            f"num_workers=0, a thread fetches ahead anyway."
        )
    return Worker(info.id, info.num_workers, info.seed - info.id) if info else None
