"""Trains a small GPT with Lightning, on one device or several.

    python examples/train_lightning.py http://localhost:8000 stories --devices 2 --checkpoint gpt.ckpt

If the checkpoint exists, training continues with the next batch. The number of devices must be the same.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from penstock.lightning import RemoteDataLoader, ResumeCallback
from penstock.tensors import Batch
from train_gpt import TinyGPT, vocab_size_of


class Data(lightning.LightningDataModule):
    def __init__(self, server: str, dataset: str) -> None:
        super().__init__()
        self.server, self.dataset = server, dataset

    def setup(self, stage: str) -> None:  # noqa: ARG002
        # Create the loader here: Lightning starts the other ranks after the Trainer is made, and an earlier dataset would not
        # know its rank.
        self.data = RemoteDataLoader(self.server, self.dataset, batch_size=16, seq_len=128, seed=7)

    def train_dataloader(self) -> RemoteDataLoader:
        return self.data  # without a DataLoader: Lightning saves its state, and does not shard it


class Model(lightning.LightningModule):
    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.gpt = TinyGPT(vocab_size_of(self.trainer.datamodule.data), seq_len=128)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def training_step(self, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = self.gpt(batch["input_ids"], batch["labels"])
        self.log("loss", loss, prog_bar=True)
        return loss


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    # Keep only the newest checkpoint, under one name. One saved after fit() would count the last epoch as finished.
    saver = ModelCheckpoint(
        args.checkpoint.parent,
        filename=args.checkpoint.stem,
        every_n_train_steps=args.save_every,
        save_top_k=1,
        enable_version_counter=False,
    )
    trainer = lightning.Trainer(max_steps=args.steps, devices=args.devices, callbacks=[saver, ResumeCallback()], logger=False)
    resumed = args.checkpoint if args.checkpoint.exists() else None
    trainer.fit(Model(), datamodule=Data(args.server, args.dataset), ckpt_path=resumed)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="address of the server, http://host:port")
    parser.add_argument("dataset", help="name of the dataset on the server")
    parser.add_argument("--steps", type=int, default=300, help="train up to this step")
    parser.add_argument("--devices", type=int, default=1, help="number of GPUs, or of CPU processes without a GPU")
    parser.add_argument("--checkpoint", type=Path, default=Path("gpt.ckpt"), help="load it if it exists; save to it")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
