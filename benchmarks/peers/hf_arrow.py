"""Hugging Face datasets, map-style: an Arrow dataset on disk in torch's format, under torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from torch import Tensor
from torch.utils.data import DataLoader

from corpus import BATCH_SIZE, SEQ_LEN, Corpus
from peers import Peer, Setup


def prepare(corpus: Corpus, folder: Path) -> None:
    import datasets

    lists = [pa.FixedSizeListArray.from_arrays(pa.array(shard.reshape(-1)), SEQ_LEN) for shard in corpus.shards()]
    datasets.Dataset(pa.table({"tokens": pa.chunked_array(lists)})).save_to_disk(str(folder))


def batches(setup: Setup) -> Iterator[Tensor]:
    import datasets

    data = datasets.load_from_disk(str(setup.folder)).with_format("torch")
    workers = setup.num_workers
    loader = DataLoader(
        data, batch_size=BATCH_SIZE, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0
    )
    while True:
        for batch in loader:
            yield batch["tokens"]


PEER = Peer(
    name="HF datasets, Arrow",
    environment="peers",
    packages=("datasets",),
    reads="Arrow, lists of uint16",
    shuffle="exact, the whole epoch",
    ahead="it maps an Arrow file on the trainer's own disk: there is no server between. It asks for the tokenized dataset on "
    "every trainer, and for a sampler whose state somebody keeps.",
    prepare=prepare,
    batches=batches,
)
