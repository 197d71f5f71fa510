"""MosaicML Composer Trainer for a RemoteDataset: a new order in each epoch; checkpoints resume at the next batch.

    data = RemoteDataLoader("http://localhost:8000", "stories", batch_size=16)
    Trainer(model=model, train_dataloader=data, callbacks=[data], max_duration="2ep", ...).fit()

Needs mosaicml.
"""

from itertools import chain, repeat
from typing import Any, NoReturn

from composer import Callback, Logger, State

from penstock.dataset import RemoteDataset
from penstock.errors import SpecError, StateMismatch


class RemoteDataLoader(RemoteDataset, Callback):
    """Data loader and callback of a Trainer. Raises SpecError, StateMismatch: an argument or checkpoint does not fit it."""

    _num_dropped: int | None = None  # batches that Composer takes and drops, because it has trained on them

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> chain[Any]:
        if self._num_dropped is None:
            raise SpecError("Composer does not tell this loader its epochs: pass it as a callback, too (callbacks=[data])")
        return chain(repeat(_Dropped(), self._num_dropped), super().__iter__())

    def fit_start(self, state: State, logger: Logger) -> None:  # noqa: ARG002
        """Go to the batch that Composer counts; Composer calls this after it has loaded a checkpoint."""
        if state.train_dataloader is not self or any(other.dataloader.dataloader is self for other in state.evaluators):
            raise SpecError("pass the loader in callbacks as train_dataloader, without a DataLoader, and not to an evaluator")
        if self.epochs is not None:
            raise SpecError("leave epochs out: Composer counts them, and this callback sets them (max_duration)", ("epochs",))
        epoch, step = int(state.timestamp.epoch), int(state.timestamp.batch_in_epoch)
        self._num_dropped = step or 1  # Composer also drops the first batch of each epoch that has ended
        place = self._state() | {"epoch": epoch}  # with an offset if batch size, number of ranks or skip have changed
        self.load_state_dict(place if step and place["offset"] else place | {"step": step, "offset": 0})
        self.set_epoch(epoch)  # otherwise the next epoch would begin after an epoch's last step
        if (num_left := super().__len__()) != self.steps_per_epoch - step:
            raise StateMismatch(
                f"after {step:,} of {self.steps_per_epoch:,} batches of epoch {epoch}, {num_left:,} are left: batch size, "
                "number of ranks or skip have changed. Resume with the old ones, or from a checkpoint of an epoch's end."
            )
        if step >= int(state.dataloader_len):  # Composer gives no more of this epoch
            self.load_state_dict(place | {"epoch": epoch + 1, "step": 0, "offset": 0})

    def epoch_start(self, state: State, logger: Logger) -> None:  # noqa: ARG002
        """Set the data's epoch; Composer calls this before each epoch, except one that it resumes partway."""
        self._num_dropped = 0
        self.set_epoch(int(state.timestamp.epoch))


class _Dropped(dict[str, Any]):
    def values(self) -> NoReturn:  # Composer counts the samples of a batch that it does not drop
        raise SpecError("leave spin_dataloaders out: without it, Composer does not go on after the epoch's trained batches")
