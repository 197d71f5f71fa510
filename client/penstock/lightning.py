"""Lightning's Trainer on a RemoteDataset: an order of its own for every epoch, and checkpoints that resume at the next batch.

    from penstock.lightning import ExactResume, RemoteEpochs

    class Data(lightning.LightningDataModule):
        def setup(self, stage):  # ranks are known here, and not before
            self.data = RemoteEpochs("http://localhost:8000", "stories", batch_size=16)

        def train_dataloader(self):
            return self.data

    lightning.Trainer(callbacks=[ExactResume()]).fit(model, datamodule=Data(), ckpt_path=...)

Needs lightning.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from penstock.dataset import RemoteDataset
from penstock.errors import SpecError, StateMismatch


class RemoteEpochs(RemoteDataset):
    """A RemoteDataset whose length is an epoch's: Lightning asks once, maybe in a resumed epoch, and cuts all to that.

    For `train_dataloader` to return as it is, without a DataLoader: Lightning saves its state, and shards nothing else.
    """

    def __len__(self) -> int:
        return self.steps_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """As that of any RemoteDataset. In a replay none that resumes: Lightning's counts go on meanwhile, not the data's."""
        return {"replay": self.replay} if self.replay else super().state_dict()


class ExactResume(Callback):
    """Sets the epoch of the data, and has a resumed run go on with the batch after the last that was trained on.

    Lightning counts epochs and batches by itself, and resumes by that: from some checkpoints, such as those of an epoch's last
    step, it would give an epoch once more, or leave one out. Its counts are put right where they can be; else it is refused.

    Raises SpecError: train_dataloader is no RemoteEpochs, or a replay, which resumes nothing.
    Raises StateMismatch: the checkpoint is of other batch sizes or ranks, or Lightning would go on with another batch than the
    next.
    """

    def __init__(self) -> None:
        self._loop: dict[str, Any] | None = None  # the loop's part of the checkpoint
        self._due: tuple[int, int] | None = None  # epoch and step of the batch that is to be trained on first

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Lightning calls this first, also where it validates or tests."""
        self._loop = self._due = None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Lightning calls this before the data is made."""
        self._loop = checkpoint["loops"]["fit_loop"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Lightning calls this once its counts and the data are there."""
        data, loop, num_batches = _data_of(trainer), trainer.fit_loop, trainer.num_training_batches
        if self._loop is None:
            return
        if data.replay:
            raise SpecError("a replay goes through no epoch, so it cannot resume in one: leave ckpt_path out", ("replay",))
        state = _state_in(self._loop)
        for name in ("batch_size", "world_size"):
            if state[name] != (now := getattr(data.spec, name)):
                raise StateMismatch(
                    f"this checkpoint was saved with {name}={state[name]}, and now it is {now}. Lightning counts "
                    f"batches, and would end epochs too early or too late. Resume with the devices and the batch size of then; "
                    f"only a loop of your own, or Accelerate, can go on with others."
                )
        epoch, step = state["epoch"], state["step"]
        epoch, step = self._due = (epoch, step) if step < num_batches else (epoch + 1, 0)
        has_ended = loop.restarting and loop.epoch_loop.batch_idx + 1 >= num_batches
        if loop.restarted_on_epoch_end:  # Lightning looks for batches of the epoch that has ended, and counts it once more
            epoch, step = epoch - 1, data.steps_per_epoch
            for counts in (loop.epoch_progress.current, loop.epoch_progress.total):
                counts.processed -= 1
        elif has_ended and loop.restarted_mid_epoch:
            loop.reset_restart_stage()  # else the next epoch would not be counted
        data.load_state_dict(state | {"epoch": epoch, "step": step})
        if step == data.steps_per_epoch:
            data.set_epoch(epoch)  # or the next one would begin

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Lightning calls this before it takes batches of an epoch, but for one in whose midst it resumes."""
        _data_of(trainer).set_epoch(trainer.current_epoch)  # or every epoch would have the same order

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Lightning calls this with each batch before it trains on it."""
        if self._due is None:
            return
        state = _data_of(trainer).state_dict()
        given, due, self._due = (state["epoch"], state["step"] - 1), self._due, None
        if given != due:
            raise StateMismatch(
                f"after this checkpoint step {due[1]:,} of epoch {due[0]} is due, but Lightning goes on with step {given[1]:,} "
                f"of epoch {given[0]}. Resume from a checkpoint that was written before."
            )


def _state_in(loop: dict[str, Any]) -> dict[str, Any]:
    """The state of the data behind the last batch that was trained on. Raises StateMismatch: the checkpoint has none."""
    states = loop["state_dict"].get("combined_loader") or [{}]
    if not states[0].keys() >= {"epoch", "step", "batch_size", "world_size"}:
        raise StateMismatch(
            "this checkpoint holds no state of the data: it was not saved while training on a RemoteEpochs, and where in the "
            "data it was cannot be told. Load the weights alone, and begin anew."
        )
    counts = loop["epoch_loop.batch_progress"]["current"]
    # A batch that was given, and whose step failed, is not trained on.
    return {**states[0], "step": states[0]["step"] - (counts["ready"] - counts["processed"])}


def _data_of(trainer: Trainer) -> RemoteEpochs:
    data = trainer.train_dataloader
    if not isinstance(data, RemoteEpochs):
        raise SpecError(f"train_dataloader must return a RemoteEpochs as it is, not a {type(data).__name__}")
    return data
