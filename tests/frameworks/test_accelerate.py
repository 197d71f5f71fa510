"""Accelerate: two processes, each with the batches of its rank, which are not sharded a second time."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from penstock import PenstockError, RemoteDataset
from support.recorded import SPEC, Given, run_example, whole_run

LIBRARY = "accelerate"


def test_accelerate_run_of_two_ranks_resumes_on_two_and_on_one(url: str, tmp_path: Path, given: list[Given]) -> None:
    import train_accelerate

    def train(folder: Path, steps: int) -> list[Given]:
        arguments = [url, "numbers", "--steps", steps, "--checkpoint", tmp_path / "checkpoint"]
        return run_example(folder, "train_accelerate.py", *arguments, num_ranks=2)

    first = train(tmp_path / "first", 4)
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "alone")
    both = first + train(tmp_path / "second", 13)
    assert sorted(both, key=lambda batch: batch.rank) == whole_run(url, 13, num_ranks=2)

    train_accelerate.main([url, "numbers", "--steps", "7", "--checkpoint", str(tmp_path / "alone")])
    assert given == whole_run(url, 11)[8:]  # its steps go on from the 4 of two ranks


def test_accelerate_run_resumes_with_the_same_losses(url: str, tmp_path: Path, given: list[Given]) -> None:
    from safetensors.torch import load_file

    import train_accelerate

    def train(checkpoint: str, steps: int) -> dict[str, torch.Tensor]:
        train_accelerate.main([url, "numbers", "--steps", str(steps), "--checkpoint", str(tmp_path / checkpoint)])
        return dict(load_file(tmp_path / checkpoint / "model.safetensors"))

    whole = train("whole", 25)
    for steps in (8, 20, 25):  # in the middle of an epoch, and at its end
        parts = train("parts", steps)

    assert given[:25] == given[25:] == whole_run(url, 25)
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())


class Mapped(IterableDataset[Any]):
    def __init__(self, data: RemoteDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        yield from self.data


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("dispatches", [False, True])
def test_loader_sharded_again_by_accelerate_is_refused(url: str, dispatches: bool, num_workers: int, is_wrapped: bool) -> None:
    from accelerate.data_loader import prepare_data_loader
    from accelerate.state import GradientState

    data = RemoteDataset(url, "numbers", rank=0, world_size=2, **SPEC)
    dataset = Mapped(data) if is_wrapped else data
    loader = DataLoader(dataset, batch_size=None if dispatches else 1, num_workers=num_workers)
    prepared = prepare_data_loader(
        loader, torch.device("cpu"), num_processes=2, process_index=0, put_on_device=True, dispatch_batches=dispatches
    )
    try:
        with pytest.raises(PenstockError, match=r"accelerator\.prepare\(\) splits that share among the ranks again"):
            next(iter(prepared))
    finally:
        GradientState._reset_state()
    assert len(list(data)) == 10


def test_loader_prepared_by_accelerate_for_one_rank_gives_the_epoch(url: str) -> None:
    from accelerate.data_loader import prepare_data_loader

    data = RemoteDataset(url, "numbers", rank=0, world_size=1, **SPEC)
    prepared = prepare_data_loader(DataLoader(data, batch_size=None), num_processes=1, process_index=0)
    assert len(list(prepared)) == 20
