"""The examples under torchrun: data-parallel ranks have batches of their own, tensor-parallel peers have the same."""

from collections import Counter
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import train_ddp
from support.recorded import Given, destroy_idle_process_group, run_example, whole_run
from train_gpt import first_dataset


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the only rank."""
    init = partial(dist.init_process_group, init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "destroy_process_group", destroy_idle_process_group)


@pytest.mark.usefixtures("alone")
def test_ddp_run_of_two_ranks_resumes_on_one(url: str, tmp_path: Path, given: list[Given]) -> None:
    arguments = [url, "numbers", "--checkpoint", str(tmp_path / "gpt.pt"), "--steps"]
    two = run_example(tmp_path / "two", "train_ddp.py", *arguments, 17, num_ranks=2)
    train_ddp.main([*arguments, "23"])

    assert two == whole_run(url, 17, num_ranks=2)
    for epoch in (0, 1):
        rows = [row for batch in two + given if batch.epoch == epoch for row in batch.rows]
        assert Counter(rows) == Counter(range(320))


@pytest.mark.usefixtures("alone")
def test_stopped_run_resumes_from_its_last_checkpoint(
    url: str, tmp_path: Path, given: list[Given], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [url, "numbers", "--save-every", "3", "--checkpoint", str(tmp_path / "new" / "gpt.pt"), "--steps"]
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", Mock(side_effect=[None] * 7 + [KeyboardInterrupt]))
        with pytest.raises(KeyboardInterrupt):
            train_ddp.main([*arguments, "20"])
    destroy_idle_process_group()

    given.clear()
    train_ddp.main([*arguments, "9"])
    assert given == whole_run(url, 9)[6:]


def test_first_dataset_is_found_with_and_without_a_scheme(url: str) -> None:
    assert first_dataset(url) == first_dataset(url.removeprefix("http://")) == "numbers"


@pytest.mark.slow
def test_tensor_parallel_peers_get_the_same_batches(url: str, tmp_path: Path) -> None:
    given = run_example(tmp_path / "out", "train_tensor_parallel.py", url, "numbers", "--steps", 3, num_ranks=4)

    # Ranks 0 and 1 of the data dimension, each in two processes that write into one file, at the same pace.
    expected = [batch for batch in whole_run(url, 3, num_ranks=2) for _ in range(2)]
    assert sorted(given, key=repr) == sorted(expected, key=repr)
