"""Lightning: no sampler of its own, and the state of the data in its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from penstock import RemoteDataset, SpecError, StateMismatch
from penstock.tensors import Batch
from support.recorded import SPEC, Given, run_example, whole_run

LIBRARY = "lightning"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),  # that save: a test resumes without
    pytest.mark.filterwarnings(r"ignore:.*\.fit\(ckpt_path="),  # of a checkpoint that a fit may have meant
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),  # where tests run on a node of a cluster
]


def test_resumed_run_has_the_same_weights(url: str, tmp_path: Path, given: list[Given]) -> None:
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


@pytest.mark.parametrize(
    ("when", "limit"),
    [
        ({}, {"max_epochs": 2}),
        ({"save_on_train_epoch_end": True}, {"max_steps": 40}),
        ({"every_n_train_steps": 13}, {"max_steps": 40}),
    ],
    ids=str,
)
def test_run_resumes_from_each_of_its_checkpoints(
    url: str, tmp_path: Path, given: list[Given], when: dict[str, Any], limit: dict[str, int]
) -> None:
    """Also from those of an epoch's end, as Lightning writes them unless it is told otherwise."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from penstock.lightning import ResumeCallback
    from train_lightning import Data, Model

    def train(savers: list[Any], resumed: Path | None) -> None:
        callbacks = [*savers, ResumeCallback()]
        trainer = lightning.Trainer(callbacks=callbacks, logger=False, enable_checkpointing=bool(savers), **limit)
        trainer.fit(Model(), datamodule=Data(url, "numbers"), ckpt_path=resumed)

    train([ModelCheckpoint(tmp_path, save_top_k=-1, **when)], None)
    assert given == whole_run(url, 40)
    checkpoints = list(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) == (3 if "every_n_train_steps" in when else 2)
    for checkpoint in checkpoints:
        given.clear()
        train([], checkpoint)
        num_steps = int(checkpoint.stem.partition("step=")[2])
        assert given == whole_run(url, 40)[num_steps:]


@pytest.mark.parametrize(("steps", "batch_size"), [(4, 32), (20, 8)], ids=["within an epoch", "at its end"])
def test_checkpoint_of_another_batch_size_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, batch_size: int
) -> None:
    """Lightning would cut the epoch at what it counts, and with larger batches leave out the rest without a word."""
    import train_lightning
    from penstock.lightning import RemoteDataLoader

    arguments = [url, "numbers", "--save-every", "4", "--checkpoint", str(tmp_path / "gpt.ckpt"), "--steps"]
    train_lightning.main([*arguments, str(steps)])
    other = {"batch_size": batch_size}
    monkeypatch.setattr(train_lightning, "RemoteDataLoader", lambda *args, **spec: RemoteDataLoader(*args, **spec | other))
    with pytest.raises(StateMismatch, match=f"saved with batch_size=16, and now it is {batch_size}"):
        train_lightning.main([*arguments, "24"])


class Stopped(Exception):
    """The training step failed."""


@pytest.fixture
def fit(url: str, tmp_path: Path) -> Callable[..., list[int]]:
    """Trains on epochs of 4 steps, from a checkpoint or from the start: the numbers of the batches that it trains on."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

    from penstock.lightning import RemoteDataLoader, ResumeCallback

    spec = SPEC | {"batch_size": 80}
    data, numbers = RemoteDataset(url, "numbers", **spec), dict[tuple[int, ...], int]()
    for epoch in range(4):
        data.set_epoch(epoch)
        numbers |= {rows_of(batch): 4 * epoch + step for step, batch in enumerate(data)}

    class Model(lightning.LightningModule):  # type: ignore[misc]  # mypy does not follow it
        def __init__(self, fails_at: int | None, replay: int | None) -> None:
            super().__init__()
            self.replay = replay
            self.weight, self.fails_at, self.trained = torch.nn.Parameter(torch.zeros(1)), fails_at, list[int]()

        def train_dataloader(self) -> RemoteDataLoader:
            return RemoteDataLoader(url, "numbers", **spec, replay=self.replay)

        def training_step(self, batch: Batch) -> torch.Tensor:
            if len(self.trained) == self.fails_at:
                raise Stopped
            self.trained.append(numbers[rows_of(batch)])
            loss: torch.Tensor = self.weight * batch["input_ids"].sum()
            return loss

        def validation_step(self, batch: Batch) -> None:
            pass

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-9)

    def train(
        saver: dict[str, int] | None,
        resumed: str | None,
        *,
        fails_at: int | None = None,
        replay: int | None = None,
        **settings: Any,
    ) -> list[int]:
        """With no `saver` when a step fails; it validates if it is told how often."""
        saves = OnExceptionCheckpoint(tmp_path) if saver is None else ModelCheckpoint(tmp_path, save_top_k=-1, **saver)
        num_held_out = 1 if "val_check_interval" in settings else 0
        trainer = lightning.Trainer(
            callbacks=[saves, ResumeCallback()], logger=False, accelerator="cpu", limit_val_batches=num_held_out, **settings
        )
        held_out = RemoteDataset(url, "numbers", batch_size=80, shuffle="none")
        model = Model(fails_at, replay)
        with suppress(Stopped):
            trainer.fit(model, val_dataloaders=held_out, ckpt_path=tmp_path / f"{resumed}.ckpt" if resumed else None)
        return model.trained

    return train


def rows_of(batch: Batch) -> tuple[int, ...]:
    return tuple(batch["input_ids"][:, 0].tolist())


@pytest.mark.parametrize(
    ("saver", "settings", "resumed", "expected"),
    [
        ({}, {"max_steps": 10, "max_epochs": 3}, ["epoch=0-step=4"], range(4, 10)),
        ({}, {"max_epochs": 3}, ["epoch=0-step=4", "epoch=1-step=8"], range(8, 12)),
        ({"every_n_train_steps": 1}, {"max_epochs": 3}, ["epoch=0-step=4", "epoch=1-step=6"], range(6, 12)),
        ({"every_n_train_steps": 1}, {"max_steps": 10, "val_check_interval": 4}, ["epoch=0-step=4", "epoch=1-step=8"], [8, 9]),
        ({"every_n_train_steps": 1}, {"max_steps": 9, "limit_train_batches": 3}, ["epoch=0-step=2"], [2, 4, 5, 6, 8, 9, 10]),
    ],
    ids=str,
)
def test_resumed_run_resumes_again_from_its_checkpoints(
    fit: Callable[..., list[int]], saver: dict[str, int], settings: dict[str, int], resumed: list[str], expected: Sequence[int]
) -> None:
    """Some of these Lightning counts as if an epoch that has ended were still to come, or had been twice."""
    fit(saver, None, fails_at=4, **settings)
    for checkpoint in resumed:
        trained = fit(saver, checkpoint, **settings)
    assert trained == [*expected]


@pytest.mark.parametrize("fails_at", [1, 4])
def test_batch_whose_step_failed_is_trained_on_after_a_resume(fit: Callable[..., list[int]], fails_at: int) -> None:
    fit(None, None, fails_at=fails_at, max_steps=10)
    assert fit(None, "on_exception", max_steps=10) == [*range(fails_at, 10)]


def test_checkpoint_with_other_progress_counts_is_refused(fit: Callable[..., list[int]], tmp_path: Path) -> None:
    """As it does where it was told to stop in an epoch's last step, and counts that epoch twice."""
    fit({"every_n_train_steps": 4}, None, max_steps=4)
    path = tmp_path / "epoch=0-step=4.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    for counts in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
        counts |= dict.fromkeys(counts, 2)
    torch.save(checkpoint, path)
    with pytest.raises(StateMismatch, match="step 0 of epoch 1 is due, but Lightning continues with step 0 of epoch 3"):
        fit({"every_n_train_steps": 4}, "epoch=0-step=4", max_steps=10)


def test_replay_neither_resumes_nor_is_resumed(fit: Callable[..., list[int]]) -> None:
    assert fit({"every_n_train_steps": 3}, None, max_steps=3, replay=2) == [0, 1, 0]
    with pytest.raises(StateMismatch, match=r"not a state of a RemoteDataset.*\['replay'\]"):
        fit({"every_n_train_steps": 3}, "epoch=0-step=3", max_steps=10)
    fit({"every_n_train_steps": 2}, None, max_steps=2)
    with pytest.raises(SpecError, match="a replay cannot resume"):
        fit({"every_n_train_steps": 2}, "epoch=0-step=2", max_steps=10, replay=2)


def test_checkpoint_without_a_state_of_the_data_is_refused(fit: Callable[..., list[int]], tmp_path: Path) -> None:
    fit({"every_n_train_steps": 2}, None, max_steps=2)
    path = tmp_path / "epoch=0-step=2.ckpt"
    for state in ({}, {"combined_loader": [{"_snapshot": 1}]}):  # as of a list of batches, or of another loader
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["loops"]["fit_loop"]["state_dict"] = state
        torch.save(checkpoint, path)
        with pytest.raises(StateMismatch, match="holds no state of the data|not a state of a RemoteDataset"):
            fit({"every_n_train_steps": 2}, "epoch=0-step=2", max_steps=10)


def test_validation_of_a_checkpoint_does_not_move_training(url: str, tmp_path: Path, given: list[Given]) -> None:
    import lightning

    from penstock.lightning import ResumeCallback
    from train_lightning import Data, Model

    class Validated(Model):
        def validation_step(self, batch: Batch) -> None:
            pass

    trainer = lightning.Trainer(
        default_root_dir=tmp_path, callbacks=[ResumeCallback()], logger=False, max_steps=4, limit_val_batches=1
    )
    held_out = RemoteDataset(url, "numbers", batch_size=80, shuffle="none")
    with patch.object(Data, "val_dataloader", lambda _: held_out):
        trainer.fit(Validated(), datamodule=Data(url, "numbers"))
        trainer.save_checkpoint(tmp_path / "gpt.ckpt")
        trainer.validate(Validated(), datamodule=Data(url, "numbers"), ckpt_path=tmp_path / "gpt.ckpt")
        given.clear()
        again = lightning.Trainer(default_root_dir=tmp_path, callbacks=trainer.callbacks, logger=False, max_steps=4)
        again.fit(Validated(), datamodule=Data(url, "numbers"))
    assert [batch for batch in given if len(batch.rows) == 16] == whole_run(url, 4)


def test_loader_that_lightning_cannot_count_is_refused(url: str, tmp_path: Path) -> None:
    import lightning

    from penstock.lightning import RemoteDataLoader, ResumeCallback
    from train_lightning import Data, Model

    model, data = Model(), Data(url, "numbers")
    trainer = lightning.Trainer(default_root_dir=tmp_path, callbacks=[ResumeCallback()], logger=False, max_steps=1)
    for wrong, why in (
        (RemoteDataset(url, "numbers", **SPEC), "must return a RemoteDataLoader as it is, not a RemoteDataset"),
        (RemoteDataLoader(url, "numbers", epochs=2, **SPEC), "leave epochs out"),
    ):
        with patch.object(data, "train_dataloader", lambda wrong=wrong: wrong), pytest.raises(SpecError, match=why):
            trainer.fit(model, datamodule=data)


@pytest.mark.slow
def test_lightning_run_of_two_ranks_gets_each_batch_once(url: str, tmp_path: Path) -> None:
    arguments = [url, "numbers", "--steps", 13, "--devices", 2, "--checkpoint", tmp_path / "gpt.ckpt"]
    assert run_example(tmp_path / "out", "train_lightning.py", *arguments, on_cpu=True) == whole_run(url, 13, num_ranks=2)
