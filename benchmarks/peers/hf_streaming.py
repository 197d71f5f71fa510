"""Hugging Face datasets, streamed: Parquet files read one after the other through a shuffle buffer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

from torch import Tensor
from torch.utils.data import DataLoader

from corpus import BATCH_SIZE, Corpus
from peers import SEED, SHUFFLE_BUFFER, Peer, Setup


def prepare(corpus: Corpus, folder: Path) -> None:
    """It reads the corpus' own Parquet files."""


def batches(setup: Setup) -> Iterator[Tensor]:
    import datasets

    parquet = setup.corpus.parquet
    paths = [f"{setup.url or parquet}/{path.relative_to(parquet)}" for path in sorted(parquet.rglob("*.parquet"))]
    data = datasets.load_dataset("parquet", data_files=paths, split="train", streaming=True)
    data = data.shuffle(seed=SEED, buffer_size=SHUFFLE_BUFFER).with_format("torch")
    workers = setup.num_workers
    loader = DataLoader(data, batch_size=BATCH_SIZE, drop_last=True, num_workers=workers, persistent_workers=workers > 0)
    for epoch in count():
        data.set_epoch(epoch)
        for batch in loader:
            yield batch["tokens"]


PEER = Peer(
    name="HF datasets, streaming",
    environment="peers",
    packages=("datasets",),
    reads="Parquet, zstd",
    shuffle=f"files, then a buffer of {SHUFFLE_BUFFER:,}",
    ahead="it decodes in the trainer's own processes. It resumes by reading what is before, and mixes no more than its buffer "
    "holds.",
    prepare=prepare,
    batches=batches,
)
