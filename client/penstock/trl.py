"""TRL's trainers for a RemoteDataset: SFT, DPO and GRPO. All arguments, losses and metrics are TRL's.

    from penstock.trl import RemoteSFTTrainer

    data = RemoteDataset("http://localhost:8000", "chats", batch_size=args.train_batch_size, packing="best_fit")
    RemoteSFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer).train()

Needs trl. RemoteTrainer of penstock.huggingface says what is refused, and how a run resumes.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from datasets import Dataset
from torch.nn.functional import pad
from transformers import default_data_collator
from trl import DPOTrainer, GRPOTrainer, SFTTrainer

from penstock.errors import SpecError
from penstock.huggingface import RemoteTrainer


class _OneRow:
    """A trainer of TRL that is made with one row of the library `datasets`, and then trains on the RemoteDataset."""

    _row: ClassVar[dict[str, Any]]

    if not TYPE_CHECKING:

        def __init__(self, *args: Any, train_dataset: Any, eval_dataset: Any = None, **options: Any) -> None:
            row = Dataset.from_list([self._row])
            super().__init__(*args, train_dataset=row, eval_dataset=None if eval_dataset is None else row, **options)
            self.train_dataset, self.eval_dataset = train_dataset, eval_dataset

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset  # the server has tokenized the rows


class RemoteSFTTrainer(RemoteTrainer, _OneRow, SFTTrainer):
    """SFTTrainer whose datasets are RemoteDatasets."""

    _row: ClassVar = {"input_ids": [0], "labels": [0]}

    def __init__(self, *args: Any, data_collator: Any = default_data_collator, **options: Any) -> None:
        super().__init__(*args, data_collator=data_collator, **options)


class RemoteDPOTrainer(RemoteTrainer, _OneRow, DPOTrainer):
    """DPOTrainer whose datasets are RemoteDatasets of preference pairs."""

    _row: ClassVar = {"prompt": "", "chosen": "", "rejected": ""}

    def __init__(self, *args: Any, data_collator: Any = default_data_collator, **options: Any) -> None:
        super().__init__(*args, data_collator=data_collator, **options)

    def _precompute_ref_logps(self, *_: Any) -> Any:
        raise SpecError("leave precompute_ref_log_probs out: a stream of batches has no place for them")

    def _for_the_model(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Stack the chosen sides above the rejected ones, padded to one width."""
        if "chosen_input_ids" not in batch:
            raise SpecError("DPO needs preference pairs: rows with columns chosen and rejected")
        width = max(batch["chosen_input_ids"].shape[1], batch["rejected_input_ids"].shape[1])

        def both(name: str, fill: int) -> torch.Tensor:
            sides = (batch[f"{side}_{name}"] for side in ("chosen", "rejected"))
            return torch.cat([pad(lines, (0, width - lines.shape[1]), value=fill) for lines in sides])

        ids, mask, labels = both("input_ids", 0), both("attention_mask", 0), both("labels", -100)
        return {"input_ids": ids, "attention_mask": mask, "completion_mask": (labels != -100).long()}


class RemoteGRPOTrainer(RemoteTrainer, _OneRow, GRPOTrainer):
    """GRPOTrainer whose datasets are RemoteDatasets of prompts, with the passthrough column "prompt" and what rewards need."""

    _row: ClassVar = {"prompt": ""}

    @property
    def draws(self) -> int:  # type: ignore[override]
        """How often TRL draws each batch: it generates once for all of them."""
        return int(self.args.steps_per_generation * self.num_iterations)

    @property
    def samples_of_batch(self) -> tuple[int, str]:
        """Samples that TRL generates at once on a rank."""
        return self.args.train_batch_size * self.args.steps_per_generation, "args.train_batch_size * args.steps_per_generation"

    def _check_train_dataset(self) -> None:
        self.data_collator = default_data_collator  # TRL's own leaves rows as they are
        super()._check_train_dataset()
        if self.train_dataset.spec.repeat != self.num_generations:
            raise SpecError(f"the dataset needs repeat={self.num_generations}, as args.num_generations", ("repeat",))

    def _for_the_model(self, batch: dict[str, Any]) -> Any:
        """Return the rows of a batch, as reward functions take them."""
        if "prompt" not in batch:
            raise SpecError('GRPO takes prompts as texts or messages: set columns = ["prompt", ...] in penstock.toml')
        values = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        values["prompt"] = [*map(_prompt, values["prompt"])]
        return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def _prompt(text: str) -> Any:
    """Return the messages of a prompt that travelled as JSON, or the text."""
    with suppress(ValueError):
        messages = json.loads(text)
        if isinstance(messages, list) and all(isinstance(message, dict) and "role" in message for message in messages):
            return messages
    return text
