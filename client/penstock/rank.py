"""Who this process is: which rank of how many, and which loader worker of that rank."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed
from torch.utils.data import get_worker_info

from penstock.errors import PenstockError, SpecError
from penstock.whole import plain

MOST_WORKERS = 1024


def is_distributed() -> bool:
    """Whether torch.distributed is initialized in this process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: as given, else torch.distributed's, else those of RANK and WORLD_SIZE, else 0 of 1.

    Raises SpecError: they are no rank of a world.
    """
    if (rank is None) != (world_size is None):
        raise SpecError("give both rank and world_size, or neither", ("rank", "world_size"))
    if rank is None or world_size is None:
        if is_distributed():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return _of_environment()
    rank, world_size = plain(rank), plain(world_size)
    if not (isinstance(rank, int) and isinstance(world_size, int) and 0 <= rank < world_size):
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


def _of_environment() -> tuple[int, int]:
    if "RANK" not in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise SpecError(
            f"the environment says WORLD_SIZE={os.environ['WORLD_SIZE']} and no RANK, so every process would take itself for "
            f"rank 0. Make the dataset after torch.distributed is initialized, or pass rank and world_size.",
            ("rank", "world_size"),
        )
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    are_numbers = all(value.isascii() and value.isdigit() for value in (rank, world_size))
    if not are_numbers or int(rank) >= int(world_size):
        raise SpecError(
            f"the environment says RANK={rank} and WORLD_SIZE={world_size}: RANK must be a whole number below WORLD_SIZE. "
            f"Start with torchrun, or pass rank and world_size.",
            ("rank", "world_size"),
        )
    return int(rank), int(world_size)


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
    if info and info.num_workers > MOST_WORKERS:
        raise PenstockError(
            f"a DataLoader of {info.num_workers:,} workers has more than the {MOST_WORKERS:,} that are kept track of: take "
            f"num_workers=0, a thread fetches ahead anyway."
        )
    return Worker(info.id, info.num_workers, info.seed - info.id) if info else None
