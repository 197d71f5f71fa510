"""Accelerate: two processes, each with the batches of its rank, which are not sharded a second time."""

from pathlib import Path

import torch

from recorded import Given, run_example, whole_run

LIBRARY = "accelerate"


def test_two_ranks_are_given_each_batch_once_and_go_on_in_the_middle_of_an_epoch(url: str, tmp_path: Path) -> None:
    given: list[Given] = []
    for steps in (4, 13):
        arguments = [url, "numbers", "--steps", steps, "--checkpoint", tmp_path / "checkpoint"]
        given += run_example(tmp_path / str(steps), "train_accelerate.py", *arguments, num_ranks=2)

    assert sorted(given, key=lambda batch: batch.rank) == whole_run(url, 13, num_ranks=2)


def test_a_resumed_run_has_the_same_losses(url: str, tmp_path: Path, given: list[Given]) -> None:
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


def test_steps_are_counted_on_where_the_number_of_ranks_changes(url: str, tmp_path: Path, given: list[Given]) -> None:
    import train_accelerate

    checkpoint = str(tmp_path / "checkpoint")
    run_example(
        tmp_path / "first", "train_accelerate.py", url, "numbers", "--steps", 4, "--checkpoint", checkpoint, num_ranks=2
    )
    train_accelerate.main([url, "numbers", "--steps", "7", "--checkpoint", checkpoint])
    assert given == whole_run(url, 11)[8:]
