"""Lightning: no sampler of its own, and the state of the data in its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import StateMismatch
from recorded import Given, run_example, whole_run

LIBRARY = "lightning"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),  # that save: a test resumes without
]


def test_a_resumed_run_has_the_same_losses(url: str, tmp_path: Path, given: list[Given]) -> None:
    import train_lightning

    def train(checkpoint: str, steps: int) -> dict[str, Any]:
        path = tmp_path / checkpoint / "gpt.ckpt"
        flags = ["--steps", str(steps), "--save-every", "4", "--checkpoint", str(path)]
        train_lightning.main([url, "numbers", *flags])
        return dict(torch.load(path, weights_only=True))

    whole = train("whole", 24)
    for steps in (8, 20, 24):  # in the middle of an epoch, and at its end
        parts = train("parts", steps)

    assert given[:24] == given[24:] == whole_run(url, 24)
    assert all(torch.equal(weight, parts["state_dict"][name]) for name, weight in whole["state_dict"].items())


@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_steps": 40}], ids=str)
@pytest.mark.parametrize("when", [{}, {"save_on_train_epoch_end": True}, {"every_n_train_steps": 7}], ids=str)
def test_a_run_goes_on_from_each_of_its_checkpoints(
    url: str, tmp_path: Path, given: list[Given], when: dict[str, Any], limit: dict[str, int]
) -> None:
    """Also from those of an epoch's end, as Lightning writes them unless it is told otherwise."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from train_lightning import Data, Model

    def train(callbacks: list[Any], resumed: Path | None) -> None:
        trainer = lightning.Trainer(callbacks=callbacks, logger=False, enable_checkpointing=bool(callbacks), **limit)
        trainer.fit(Model(), datamodule=Data(url, "numbers"), ckpt_path=resumed)

    train([ModelCheckpoint(tmp_path, save_top_k=-1, **when)], None)
    assert given == whole_run(url, 40)
    checkpoints = list(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) == (5 if "every_n_train_steps" in when else 2)
    for checkpoint in checkpoints:
        given.clear()
        train([], checkpoint)
        num_steps = int(checkpoint.stem.partition("step=")[2])
        assert given == whole_run(url, 40)[num_steps:]


@pytest.mark.parametrize("steps", [4, 20], ids=["in the middle of an epoch", "at its end"])
@pytest.mark.parametrize(("batch_size", "trained"), [(32, {4: 2, 20: 10}), (8, {4: 8, 20: 40})])
def test_a_checkpoint_of_another_batch_size_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, batch_size: int, trained: dict[int, int]
) -> None:
    """Lightning would cut the epoch at what it counts, and with larger batches leave out the rest without a word."""
    import train_lightning

    arguments = [url, "numbers", "--save-every", "4", "--checkpoint", str(tmp_path / "gpt.ckpt"), "--steps"]
    train_lightning.main([*arguments, str(steps)])
    epochs = train_lightning.Epochs
    monkeypatch.setattr(train_lightning, "Epochs", lambda *args, **spec: epochs(*args, **spec | {"batch_size": batch_size}))
    with pytest.raises(StateMismatch, match=f"counts {steps} batches of epoch 0 .* given {trained[steps]}. Resume with"):
        train_lightning.main([*arguments, "24"])


def test_two_ranks_that_lightning_starts_itself_are_given_each_batch_once(url: str, tmp_path: Path) -> None:
    arguments = [url, "numbers", "--steps", 13, "--devices", 2, "--checkpoint", tmp_path / "gpt.ckpt"]
    assert run_example(tmp_path / "out", "train_lightning.py", *arguments, on_cpu=True) == whole_run(url, 13, num_ranks=2)
