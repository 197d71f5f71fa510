"""Hugging Face Trainer for a RemoteDataset: finished batches, sharded once; checkpoints resume at the next batch.

    from penstock.huggingface import RemoteTrainer

    data = RemoteDataset("http://localhost:8000", "stories", batch_size=args.train_batch_size)
    RemoteTrainer(model=model, args=args, train_dataset=data).train()

Needs transformers and accelerate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import repeat
from math import ceil
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    DefaultDataCollator,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)

from penstock.dataset import RemoteDataset
from penstock.errors import SpecError, StateMismatch
from penstock.logs import warn

_KEY = "penstock"  # key of the data's state in trainer_state.json
_SHARED_DATASET = (
    "eval_dataset must be another RemoteDataset, such as one of split='validation': evaluating on train_dataset would "
    "move its position, and no checkpoint could resume"
)
_MISCOUNTED = (
    "A callback ended an epoch early, or something else drew batches of train_dataset, such as a callback that reads "
    "train_dataloader (let it use another RemoteDataset)."
)
_DECIDED_BY_DATASET = {"ignore_data_skip": False, "auto_find_batch_size": False, "train_sampling_strategy": "random"}


class RemoteTrainer(Trainer):
    """Trainer whose train_dataset is a RemoteDataset; an eval_dataset may be one, too. All else works as in Trainer.

    Batches go to the model without a collator, a sampler or loader workers. Tensors that the model's forward does not take are
    removed (args.remove_unused_columns). If rows share a sample, the model gets no attention_mask and separates the rows by
    their position_ids. A model whose forward takes no position_ids is refused. A few models, such as OPT and Falcon, take them
    and still do not separate rows. Each epoch has a different order. A checkpoint holds the state of the data, and resuming
    costs the same at any step.

    Raises:
        SpecError: train_dataset is no RemoteDataset, its batches do not match args, a data_collator would have no effect, or
            the model cannot separate the rows of a sample. From train() if train_dataset was replaced.
        StateMismatch: from train(): the checkpoint belongs to other data or counts other batches, or training begins without
            a checkpoint although a state was loaded into the data.
    """

    draws = 1  # how often Trainer draws each batch of the dataset
    _state_callback: _StateCallback
    _signature_columns: Any  # Trainer's attribute, set by _set_signature_columns_if_needed

    if not TYPE_CHECKING:  # editors and type checkers see Trainer's named parameters

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._state_callback = _StateCallback()
            # First: a later callback may save a checkpoint at a step's end, as Trainer's own does on preemption.
            self.callback_handler.callbacks.insert(0, self._state_callback)
            if self.train_dataset is not None:
                self._check_train_dataset()
                self._warn_of_another_task()

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return this rank's batches. Trainer's own loader would collate batches and shard the rank's share again."""
        self._check_train_dataset()  # the user may have replaced it
        self._state_callback.data, self._state_callback.draws = self.train_dataset, self.draws
        return _Loader(self.train_dataset, self._for_the_model, self.draws)

    def get_eval_dataloader(self, eval_dataset: str | Dataset[Any] | None = None) -> DataLoader[Any]:
        """Return this rank's batches if the dataset is a RemoteDataset; otherwise Trainer's loader."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]
        loader: DataLoader[Any] = self._held_out(chosen) or super().get_eval_dataloader(eval_dataset)
        return loader

    def get_test_dataloader(self, test_dataset: Dataset[Any]) -> DataLoader[Any]:
        """Return this rank's batches if the dataset is a RemoteDataset; otherwise Trainer's loader."""
        loader: DataLoader[Any] = self._held_out(test_dataset) or super().get_test_dataloader(test_dataset)
        return loader

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the number of samples of an epoch, over all ranks."""
        if isinstance(dataloader, _Loader):
            return dataloader.data.steps_per_epoch * dataloader.data.spec.samples_per_step
        return int(super().num_examples(dataloader))

    def _held_out(self, data: Dataset[Any] | None) -> DataLoader[Any] | None:
        if data is not None and data is self.train_dataset:
            raise SpecError(_SHARED_DATASET)
        if not isinstance(data, RemoteDataset):
            return None
        _check_form(data)
        data.rewind(data.epoch)  # each evaluation uses the same batches on purpose: no warning
        return _Loader(data, self._for_the_model)

    def _check_train_dataset(self) -> None:
        data, args = self.train_dataset, self.args
        if not isinstance(data, RemoteDataset):
            raise SpecError(f"train_dataset must be a RemoteDataset, not a {type(data).__name__}")
        for name, default in _DECIDED_BY_DATASET.items():
            if getattr(args, name, default) != default:
                raise SpecError(
                    f"leave {name} out: the dataset decides batch size, order (shuffle, length_bucket_size) and how to resume"
                )
        _check_form(data)
        evaluated = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        if any(other is data for other in evaluated):
            raise SpecError(_SHARED_DATASET)
        if not _only_pads(self.data_collator) and all(other is None or isinstance(other, RemoteDataset) for other in evaluated):
            raise SpecError(
                f"leave data_collator out: batches come ready-made, so {type(self.data_collator).__name__} would never be "
                "called. To change batches, as masked-language modelling does, override compute_loss."
            )
        expected, name = self.samples_of_batch
        if data.spec.samples_per_step != expected * args.world_size:
            raise SpecError(
                f"the dataset gives each of {data.spec.world_size} rank(s) {data.spec.batch_size} samples a step, but by its "
                f"arguments Trainer counts {expected * args.world_size} in all, {expected} a rank: the length of the run would "
                f"be wrong. Make the dataset after args, with batch_size={name}, and start with torchrun (on CPUs alone with "
                "use_cpu=True).",
                ("batch_size", "world_size"),
            )

    @property
    def samples_of_batch(self) -> tuple[int, str]:
        """Samples that Trainer takes from a batch of one rank, and the arguments that say so."""
        return self.args.train_batch_size, "args.train_batch_size"

    def _warn_of_another_task(self) -> None:
        """Warn about the wrong task: an encoder would see the responses its decoder should learn; the loss looks fine."""
        has_encoder = bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))
        needed = "seq2seq" if has_encoder else "causal"
        if self.train_dataset.spec.task != needed:
            warn(
                f"{type(self.model).__name__} has {'an' if has_encoder else 'no'} encoder: pass task={needed!r} to the "
                f"dataset, not task={self.train_dataset.spec.task!r}. Otherwise the loss means nothing.",
            )

    def _check_that_rows_stay_apart(self) -> None:
        if self.args.use_cache:
            raise SpecError("leave use_cache=True out: with a cache, models do not separate rows by position_ids")
        if self.args.remove_unused_columns and "position_ids" not in self._taken:
            raise SpecError(
                f"{type(self.model).__name__} takes no position_ids, so rows of one sample would attend to the rows before "
                "them. Use packing='rows' (length_bucket_size saves padding), or packing='concat' without mark_documents if "
                "rows may attend to each other.",
                ("packing",),
            )

    @cached_property
    def _taken(self) -> frozenset[str]:
        """Names of the tensors that the model's forward takes, and those that a subclass of Trainer declares.

        TRL's trainers declare only the columns that their own dataset preparation produces.
        """
        self._set_signature_columns_if_needed()
        declared, self._signature_columns = self._signature_columns, None
        Trainer._set_signature_columns_if_needed(self)
        taken, self._signature_columns = frozenset([*declared, *self._signature_columns]), declared
        return taken

    def _for_the_model(self, batch: dict[str, Any]) -> dict[str, Any]:
        if "position_ids" in batch:  # with an attention_mask, too, transformers lets a row attend to earlier rows
            self._check_that_rows_stay_apart()
            batch = {name: value for name, value in batch.items() if name != "attention_mask"}
        if not self.args.remove_unused_columns:
            return batch
        return {name: value for name, value in batch.items() if name in self._taken}


class _StateCallback(TrainerCallback):
    """Callback that keeps the data's state in trainer_state.json, and restores it when a run resumes.

    `data` belongs to the loader that was made last.
    """

    def __init__(self) -> None:
        self.data: RemoteDataset | None = None
        self.draws = 1
        self._has_warned = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any) -> None:
        assert self.data
        if self.data.replay:  # Trainer counts replayed batches, the data does not
            state.stateful_callbacks.pop(_KEY, None)
            return
        position = self.data.state_dict()
        state.stateful_callbacks[_KEY] = {"args": {}, "attributes": position}
        counted, num_more = divmod(self._num_drawn(state, args), self.draws)
        if num_more:  # the batch will be drawn again, and no state is inside a batch
            state.stateful_callbacks.pop(_KEY)
        trained = position["epoch"] * self.data.steps_per_epoch + position["step"]
        if counted + bool(num_more) != trained and not position["offset"] and not self._has_warned:
            self._has_warned = True
            warn(
                f"Trainer counts {counted:,} batches, but train_dataset is at its batch {trained:,}. {_MISCOUNTED} Training "
                "continues, but no checkpoint from here on can resume.",
            )

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any) -> None:
        assert self.data
        data, self._has_warned = self.data, False
        if not state.global_step:
            if data.has_loaded:
                raise StateMismatch(
                    "a state was loaded into train_dataset, but Trainer starts with the first step of epoch 0. Resume with "
                    "train(resume_from_checkpoint=...), which loads the state; to start again, call data.rewind() first."
                )
            data.rewind()  # otherwise the audit would take this start for a resume
            return
        saved = state.stateful_callbacks.get(_KEY)
        if saved is None:
            raise StateMismatch(
                "this checkpoint holds no state of the data: no RemoteTrainer wrote it, or one in a replay, or one that was to "
                "train on the same batch once more"
            )
        data.load_state_dict(saved["attributes"])
        counted = self._num_drawn(state, args) // self.draws
        trained = (data.epoch + 1) * data.steps_per_epoch - len(data)
        if trained != counted:
            raise StateMismatch(
                f"Trainer counts {counted:,} batches before this checkpoint, but the state of the data counts {trained:,}. "
                "Resume with the ranks, batch size and gradient_accumulation_steps that it was saved with. If they are the "
                f"same: {_MISCOUNTED} Resume from an earlier checkpoint."
            )

    def _num_drawn(self, state: TrainerState, args: TrainingArguments) -> int:
        """Return the number of batches that were drawn before this update, as Trainer will count them when it resumes."""
        assert self.data
        per_epoch = self.data.steps_per_epoch * self.draws
        num_epochs, num_updates = divmod(state.global_step, ceil(per_epoch / args.gradient_accumulation_steps))
        return int(num_epochs * per_epoch + num_updates * args.gradient_accumulation_steps)


def _check_form(data: RemoteDataset) -> None:
    if data.spec.labels == "shifted":
        raise SpecError("leave labels='shifted' out: transformers' models shift the labels", ("labels",))
    if data.epochs is not None:
        raise SpecError("leave epochs out: Trainer counts them, and sets each one (num_train_epochs)", ("epochs",))


def _only_pads(collator: Any) -> bool:
    """Return whether a collator would leave finished batches as they are."""
    kinds = (DataCollatorWithPadding, DataCollatorForSeq2Seq, DefaultDataCollator)
    if type(collator) is DataCollatorForLanguageModeling:
        return not collator.mlm
    return collator is default_data_collator or type(collator) in kinds


class _Loader(DataLoader[Any]):
    """Loader of a RemoteDataset for Trainer; its length is that of an epoch."""

    def __init__(self, data: RemoteDataset, select: Callable[[dict[str, Any]], Any], draws: int = 1) -> None:
        self.data, self._draws = data, draws
        super().__init__(_Steps(data, select, draws), batch_size=None)

    def __len__(self) -> int:
        return self.data.steps_per_epoch * self._draws

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; Trainer calls this before each epoch."""
        self.data.set_epoch(epoch)


class _Steps(IterableDataset[dict[str, Any] | None]):
    """Batches for Trainer, with None for those before the checkpoint: Trainer draws and drops them to resume."""

    def __init__(self, data: RemoteDataset, select: Callable[[dict[str, Any]], Any], draws: int) -> None:
        self._data, self._select, self._draws = data, select, draws

    def __iter__(self) -> Iterator[dict[str, Any] | None]:
        yield from repeat(None, (self._data.steps_per_epoch - len(self._data)) * self._draws)
        for batch in self._data:
            yield from repeat(self._select(batch), self._draws)
