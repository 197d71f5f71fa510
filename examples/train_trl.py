"""Fine-tunes a Llama on chats with TRL's SFTTrainer and LoRA, on one device or, under torchrun, on several.

    python examples/train_trl.py http://localhost:8000 chats --model FOLDER --out lora

The rows of `chats` have the column messages; the assistant's messages have loss. --model names a folder with a pretrained
model of transformers and its tokenizer, which the server must use, too. If the folder --out has a checkpoint, training
continues from the last one, with the next batch. Needs trl and peft.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig

from penstock import RemoteDataset
from penstock.trl import RemoteSFTTrainer


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    training = SFTConfig(
        str(args.out),
        per_device_train_batch_size=args.batch_size,
        num_train_epochs=args.epochs,
        learning_rate=args.learning_rate,
        save_steps=args.save_steps,
        logging_steps=10,
        report_to="none",
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        use_cpu=not torch.cuda.is_available(),
    )
    data = RemoteDataset(
        args.server, args.dataset, batch_size=training.train_batch_size, seq_len=args.seq_len, packing="best_fit", seed=7
    )
    trainer = RemoteSFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        args=training,
        train_dataset=data,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.out) if args.out.is_dir() else None)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="address of the server, http://host:port")
    parser.add_argument("dataset", help="name of the dataset on the server")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to fine-tune, and of its tokenizer")
    parser.add_argument("--batch-size", type=int, default=8, help="packed samples in a batch of one device")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of a packed sample")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="learning rate of LoRA")
    parser.add_argument("--epochs", type=float, default=1, help="how long to train; 0.2 is a fifth of an epoch")
    parser.add_argument("--out", type=Path, default=Path("lora"), help="folder for checkpoints")
    parser.add_argument("--save-steps", type=int, default=500, help="steps between checkpoints")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
