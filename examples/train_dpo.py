"""Trains a small Llama on preference pairs with DPO and Hugging Face's Trainer, on one device or, under torchrun, on several.

    python examples/train_dpo.py http://localhost:8000 pairs --out dpo

The rows of `pairs` have the columns prompt, chosen and rejected. --model names a folder with a pretrained model of
transformers; a frozen copy of it is the reference. The default is a small random model. If the folder --out has a checkpoint,
training continues from the last one, with the next batch.
"""

import argparse
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from penstock import RemoteDataset
from penstock.huggingface import RemoteTrainer
from train_huggingface import small_llama


class DPOTrainer(RemoteTrainer):
    """The loss of Direct Preference Optimization (Rafailov et al., 2023), section 4, equation 7."""

    def __init__(self, *args: Any, reference: PreTrainedModel, beta: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reference = self.accelerator.prepare_model(reference, evaluation_mode=True)
        self._beta = beta

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        if "chosen_input_ids" not in inputs:
            raise SystemExit(
                "these are no preference pairs: rows need columns chosen and rejected, and args remove_unused_columns=False"
            )
        with torch.no_grad():
            reference = margins(self._reference, inputs)
        rewards = self._beta * (margins(model, inputs) - reference)
        loss = -F.logsigmoid(rewards).mean()
        return (loss, {"rewards": rewards.detach()}) if return_outputs else loss


def margins(model: Any, batch: Any) -> torch.Tensor:
    """Return the log-ratio of the chosen response to the rejected one, in nats, shape [batch_size]."""
    # One forward pass for both sides: DDP does not allow two before a backward pass.
    ids, labels = both(batch, "input_ids", 0), both(batch, "labels", -100)
    logits = model(input_ids=ids, attention_mask=both(batch, "attention_mask", 0)).logits
    # The target of a position is the next token. Padding and prompts have the label -100, which the loss ignores.
    losses = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none")
    chosen, rejected = losses.sum(1).chunk(2)
    return rejected - chosen


def both(batch: Any, name: str, fill: int) -> torch.Tensor:
    """Stack a tensor's chosen side above its rejected side, padded to one width: shape [2 * batch_size, width]."""
    return pad_sequence([*batch[f"chosen_{name}"], *batch[f"rejected_{name}"]], batch_first=True, padding_value=fill)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    training = TrainingArguments(
        str(args.out),
        per_device_train_batch_size=args.batch_size,
        num_train_epochs=args.epochs,
        learning_rate=args.learning_rate,
        save_steps=args.save_steps,
        logging_steps=10,
        report_to="none",
        remove_unused_columns=False,  # compute_loss takes the pairs, not the model
        label_names=["chosen_labels", "rejected_labels"],  # without them evaluate() reports no loss
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        use_cpu=not torch.cuda.is_available(),
    )
    data = RemoteDataset(
        args.server, args.dataset, batch_size=training.train_batch_size, seq_len=args.seq_len, pad="longest", seed=7
    )
    torch.manual_seed(0)  # so a resumed run has the same reference
    # Models are often stored with 16-bit weights, which would round updates of this size to zero.
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32) if args.model else small_llama(data)
    reference = deepcopy(model).requires_grad_(False).eval()
    trainer = DPOTrainer(model=model, args=training, train_dataset=data, reference=reference, beta=args.beta)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.out) if args.out.is_dir() else None)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="address of the server, http://host:port")
    parser.add_argument("dataset", help="name of the dataset on the server")
    parser.add_argument("--model", type=Path, help="folder of the model to train; default: a small new one")
    parser.add_argument("--batch-size", type=int, default=16, help="pairs in a batch of one device")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens of prompt and response; longer rows are cut")
    parser.add_argument("--beta", type=float, default=0.1, help="penalty for moving away from the reference")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="for a pretrained model 5e-7 is usual")
    parser.add_argument("--epochs", type=float, default=1, help="how long to train; 0.2 is a fifth of an epoch")
    parser.add_argument("--out", type=Path, default=Path("dpo"), help="folder for checkpoints")
    parser.add_argument("--save-steps", type=int, default=500, help="steps between checkpoints")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
