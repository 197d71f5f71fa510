"""numpy.memmap and torch's DataLoader: a file of ids on the trainer's own disk, read a batch at a time by its sampler.

The leanest loop that torch allows; see numpy_samples for the usual one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from corpus import BATCH_SIZE, Corpus, Tokens
from peers import Peer, Setup


class Samples(Dataset[torch.Tensor]):
    """A batch of sequences by their numbers."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, numbers: list[int]) -> torch.Tensor:
        return torch.from_numpy(self._tokens[numbers].astype(np.int64))


def prepare(corpus: Corpus, folder: Path) -> None:
    """The corpus is such a file."""


def batches(setup: Setup) -> Iterator[torch.Tensor]:
    sequences = Samples(setup.corpus.tokens)
    sampler = BatchSampler(RandomSampler(sequences), BATCH_SIZE, drop_last=True)
    workers = setup.num_workers
    loader = DataLoader(sequences, sampler=sampler, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    while True:
        yield from loader


PEER = Peer(
    name="numpy memmap + DataLoader, batches by its sampler",
    environment="product",
    packages=("numpy", "torch"),
    reads="one file of uint16",
    shuffle="exact, the whole epoch",
    ahead="it copies ids out of a file that is mapped into the trainer's own memory: no server, no socket, no digest, no mask, "
    "no labels. It asks for ids of one length in one file on every trainer's disk, and for a sampler whose state somebody "
    "keeps.",
    prepare=prepare,
    batches=batches,
)
