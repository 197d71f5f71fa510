"""Penstock over loopback HTTP: `penstock serve` with all blocks cached, RemoteDataset, an exact shuffle of the whole epoch.

It makes what all loaders here make, token ids. See penstock_full for the rest of a batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from torch import Tensor

import servers
from corpus import BATCH_SIZE, SEQ_LEN, Corpus
from peers import SEED, Peer, Setup
from penstock import RemoteDataset


def prepare(corpus: Corpus, folder: Path) -> None:
    servers.prepare(corpus.parquet, folder)


def serve(corpus: Corpus, folder: Path) -> None:
    command = servers.serve_command(corpus.parquet, folder)
    os.execv(command[0], command)  # no process between: this one's CPU time is the server's


def batches(setup: Setup, tensors: Sequence[str] | None = ("input_ids",)) -> Iterator[Tensor]:
    data = RemoteDataset(
        setup.address,
        "tokens",
        batch_size=BATCH_SIZE,
        seq_len=SEQ_LEN,
        seed=SEED,
        shuffle="global",
        tensors=tensors,
    )
    for epoch in count():
        data.set_epoch(epoch)
        for batch in data:
            yield batch["input_ids"]


PEER = Peer(
    name="Penstock",
    environment="product",
    packages=("penstock",),
    reads="cached blocks, over HTTP",
    shuffle="exact, the whole epoch",
    ahead="",
    workers=(0,),  # it fetches ahead in a thread of its own
    prepare=prepare,
    batches=batches,
    serve=serve,
)
