"""torchdata's StatefulDataLoader: the state in mid-epoch, with workers and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import RemoteDataset
from recorded import SPEC

LIBRARY = "torchdata"
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
]


def loader_of(url: str, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(RemoteDataset(url, "numbers", **SPEC), batch_size=None, **options)


def rows(batches: Any) -> list[list[int]]:
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


@pytest.mark.parametrize(
    "options",
    [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 3, "persistent_workers": True}],
    ids=str,
)
def test_the_rest_of_an_epoch_is_the_same_from_a_state_in_its_middle(url: str, options: dict[str, Any]) -> None:
    loader = loader_of(url, **options)
    loader.dataset.set_epoch(3)
    batches = iter(loader)
    first = rows(next(batches) for _ in range(7))
    state = loader.state_dict()
    rest = rows(batches)

    resumed = loader_of(url, **options)
    resumed.load_state_dict(state)

    assert len(resumed) == len(first + rest) == 20
    assert rows(resumed) == rest
    assert resumed.dataset.epoch == 3
    for each in (loader, resumed):
        each.dataset.set_epoch(4)
    assert rows(resumed) == rows(loader) != first + rest


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_example_resumes_with_the_same_losses(url: str, tmp_path: Path, num_workers: int) -> None:
    import train_dataloader

    def train(checkpoint: str, steps: int) -> dict[str, Any]:
        path = str(tmp_path / checkpoint)
        train_dataloader.main([url, "numbers", "--steps", str(steps), "--checkpoint", path, "--workers", str(num_workers)])
        return dict(torch.load(path))

    whole = train("whole", 25)
    for steps in (8, 20, 25):  # in the middle of an epoch, and at its end
        parts = train("parts", steps)

    assert whole["step"] == parts["step"]
    assert all(torch.equal(weight, parts["model"][name]) for name, weight in whole["model"].items())
