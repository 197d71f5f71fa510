"""numpy.memmap and torch's DataLoader as most write it: a dataset of single sequences, shuffled and collated by the loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from corpus import BATCH_SIZE, Tokens
from peers import Setup, numpy_memmap


class Samples(Dataset[torch.Tensor]):
    """One sequence by its number."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.from_numpy(self._tokens[number].astype(np.int64))


def batches(setup: Setup) -> Iterator[torch.Tensor]:
    samples, workers = Samples(setup.corpus.tokens), setup.num_workers
    loader = DataLoader(samples, BATCH_SIZE, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0)
    while True:
        yield from loader


PEER = replace(numpy_memmap.PEER, name="numpy memmap + DataLoader", batches=batches)
