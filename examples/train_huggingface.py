"""Trains a small Llama with Hugging Face's Trainer, on one device or, under torchrun, on several.

    python examples/train_huggingface.py http://localhost:8000 stories --out llama

If the folder has a checkpoint, training continues from the last one, with the next batch.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from penstock import RemoteDataset
from penstock.huggingface import RemoteTrainer
from train_gpt import vocab_size_of


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    training = TrainingArguments(
        str(args.out),
        per_device_train_batch_size=16,
        num_train_epochs=args.epochs,  # the dataset knows its length, so no max_steps is needed
        learning_rate=1e-3,
        save_steps=args.save_steps,
        logging_steps=10,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),  # without it, Trainer makes no process group of CPUs
    )
    data = RemoteDataset(args.server, args.dataset, batch_size=training.train_batch_size, seq_len=128, seed=7)
    # A plain Trainer would shard the batches again, and would resume by fetching all batches that it has seen.
    trainer = RemoteTrainer(model=small_llama(data), args=training, train_dataset=data)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.out) if args.out.is_dir() else None)


def small_llama(data: RemoteDataset) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size_of(data),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=data.spec.seq_len,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="address of the server, http://host:port")
    parser.add_argument("dataset", help="name of the dataset on the server")
    parser.add_argument("--epochs", type=float, default=1, help="how long to train; 0.2 is a fifth of an epoch")
    parser.add_argument("--out", type=Path, default=Path("llama"), help="folder for checkpoints")
    parser.add_argument("--save-steps", type=int, default=500, help="steps between checkpoints")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
