"""What is written by hand where there is no loader: a generator over Parquet row groups with a shuffle buffer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from corpus import BATCH_SIZE, SEQ_LEN, Corpus
from peers import SEED, SHUFFLE_BUFFER, Peer, Setup


class Rows(IterableDataset[torch.Tensor]):
    """The rows of Parquet files, the row groups in a shuffled order and dealt out to the workers."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._epoch = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        chance = random.Random(f"{SEED} {self._epoch}")
        self._epoch += 1
        groups = [(path, n) for path in self._paths for n in range(pq.ParquetFile(path).num_row_groups)]
        chance.shuffle(groups)
        worker = get_worker_info()
        mine = groups[worker.id :: worker.num_workers] if worker else groups
        buffer: list[torch.Tensor] = []
        for row in self._rows(mine):
            if len(buffer) < SHUFFLE_BUFFER:
                buffer.append(row)
                continue
            at = chance.randrange(SHUFFLE_BUFFER)
            buffer[at], row = row, buffer[at]
            yield row
        chance.shuffle(buffer)
        yield from buffer

    @staticmethod
    def _rows(groups: list[tuple[Path, int]]) -> Iterator[torch.Tensor]:
        for path, number in groups:
            column = pq.ParquetFile(path).read_row_group(number, columns=["tokens"]).column("tokens").combine_chunks()
            ids = column.flatten().to_numpy().astype(np.int64).reshape(-1, SEQ_LEN)
            yield from torch.from_numpy(ids)


def prepare(corpus: Corpus, folder: Path) -> None:
    """It reads the corpus' own Parquet files."""


def batches(setup: Setup) -> Iterator[torch.Tensor]:
    rows = Rows(sorted(setup.corpus.parquet.rglob("*.parquet")))
    workers = setup.num_workers
    loader = DataLoader(rows, batch_size=BATCH_SIZE, drop_last=True, num_workers=workers, persistent_workers=workers > 0)
    while True:
        yield from loader


PEER = Peer(
    name="Parquet generator, by hand",
    environment="product",
    packages=("pyarrow", "torch"),
    reads="Parquet, zstd",
    shuffle=f"row groups, then a buffer of {SHUFFLE_BUFFER:,}",
    ahead="it decodes in the trainer's own processes. It cannot resume but by reading all over again, and mixes no more than "
    "its buffer holds.",
    prepare=prepare,
    batches=batches,
)
