"""Lightning Trainer for a RemoteDataset: a new order in each epoch; checkpoints resume at the next batch.

    from penstock.lightning import RemoteDataLoader, ResumeCallback

    class Data(lightning.LightningDataModule):
        def setup(self, stage):  # ranks are known here, and not before
            self.data = RemoteDataLoader("http://localhost:8000", "stories", batch_size=16)

        def train_dataloader(self):
            return self.data

    lightning.Trainer(callbacks=[ResumeCallback()]).fit(model, datamodule=Data(), ckpt_path=...)

Needs lightning.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from penstock.dataset import RemoteDataset
from penstock.errors import SpecError, StateMismatch


class RemoteDataLoader(RemoteDataset):
    """Data loader of a RemoteDataset, whose length is always that of a full epoch.

    Lightning reads the length once, maybe in a resumed epoch, and applies it to all epochs. `train_dataloader` returns this
    object without a DataLoader: Lightning saves its state, and does not shard it.
    """

    def __len__(self) -> int:
        return self.steps_per_epoch

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return the state of RemoteDataset; in a replay one that cannot resume: only Lightning counts its batches."""
        return {"replay": self.replay} if self.replay else super().state_dict()


class ResumeCallback(Callback):
    """Callback that sets the data's epoch, and resumes a run at the batch after the last trained one.

    Lightning counts epochs and batches separately, and resumes from its counts. From some checkpoints, such as one at an
    epoch's last step, it would repeat or omit an epoch. The callback corrects these counts if possible, and raises otherwise.

    Raises:
        SpecError: train_dataloader is no RemoteDataLoader, or a replay, which cannot resume.
        StateMismatch: the checkpoint has another batch size or number of ranks, or Lightning would not continue with the next
            batch.
    """

    def __init__(self) -> None:
        self._loop: dict[str, Any] | None = None  # the loop's part of the checkpoint
        self._due: tuple[int, int] | None = None  # epoch and step of the first batch to train on

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Reset; Lightning calls this first, also to validate or test."""
        self._loop = self._due = None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Keep the loop's part of the checkpoint; Lightning calls this before it creates the data."""
        self._loop = checkpoint["loops"]["fit_loop"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Correct Lightning's counts and load the data's state; Lightning calls this after it has restored both."""
        data, loop, num_batches = _data_of(trainer), trainer.fit_loop, trainer.num_training_batches
        if self._loop is None:
            return
        if data.replay:
            raise SpecError("a replay cannot resume: leave ckpt_path out", ("replay",))
        state = _state_in(self._loop)
        for name in ("batch_size", "world_size"):
            if state[name] != (now := getattr(data.spec, name)):
                raise StateMismatch(
                    f"this checkpoint was saved with {name}={state[name]}, and now it is {now}. Lightning counts batches, and "
                    f"would end epochs too early or too late. Resume with the same devices and batch size; only your own "
                    f"loop, or Accelerate, can continue with others."
                )
        epoch, step = state["epoch"], state["step"]
        epoch, step = self._due = (epoch, step) if step < num_batches else (epoch + 1, 0)
        has_ended = loop.restarting and loop.epoch_loop.batch_idx + 1 >= num_batches
        if loop.restarted_on_epoch_end:  # Lightning requests batches of the ended epoch, and counts it again
            epoch, step = epoch - 1, data.steps_per_epoch
            for counts in (loop.epoch_progress.current, loop.epoch_progress.total):
                counts.processed -= 1
        elif has_ended and loop.restarted_mid_epoch:
            loop.reset_restart_stage()  # otherwise Lightning would not count the next epoch
        data.load_state_dict(state | {"epoch": epoch, "step": step})
        if step == data.steps_per_epoch:
            data.set_epoch(epoch)  # otherwise the next epoch would begin

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Set the data's epoch; Lightning calls this before each epoch, except one that it resumes partway."""
        _data_of(trainer).set_epoch(trainer.current_epoch)  # otherwise each epoch would have the same order

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Check the first batch after a resume; Lightning calls this before it trains on a batch."""
        if self._due is None:
            return
        state = _data_of(trainer).state_dict()
        given, due, self._due = (state["epoch"], state["step"] - 1), self._due, None
        if given != due:
            raise StateMismatch(
                f"after this checkpoint step {due[1]:,} of epoch {due[0]} is due, but Lightning continues with step "
                f"{given[1]:,} of epoch {given[0]}. Resume from an earlier checkpoint."
            )


def _state_in(loop: dict[str, Any]) -> dict[str, Any]:
    """Return the data's state after the last trained batch. Raises StateMismatch: the checkpoint has none."""
    states = loop["state_dict"].get("combined_loader") or [{}]
    if not states[0].keys() >= {"epoch", "step", "batch_size", "world_size"}:
        raise StateMismatch(
            "this checkpoint holds no state of the data: it was not saved while training on a RemoteDataLoader. Load its "
            "weights alone, and start again."
        )
    counts = loop["epoch_loop.batch_progress"]["current"]
    # A batch that was yielded, but whose step failed, is not trained on.
    return {**states[0], "step": states[0]["step"] - (counts["ready"] - counts["processed"])}


def _data_of(trainer: Trainer) -> RemoteDataLoader:
    data = trainer.train_dataloader
    if not isinstance(data, RemoteDataLoader):
        raise SpecError(f"train_dataloader must return a RemoteDataLoader as it is, not a {type(data).__name__}")
    if data.epochs is not None:
        raise SpecError("leave epochs out: Lightning counts them, and the callback sets each one (max_epochs)", ("epochs",))
    return data
