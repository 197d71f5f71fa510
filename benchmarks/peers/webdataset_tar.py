"""WebDataset: tar files of npy samples, shards and samples shuffled on the way, batches made in the workers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from corpus import BATCH_SIZE, Corpus, Tokens
from peers import SEED, Peer, Setup

_SHUFFLE_BUFFER = 1_000  # what its documentation names
_SHUFFLE_SHARDS = 100


def prepare(corpus: Corpus, folder: Path) -> None:
    import webdataset

    folder.mkdir(parents=True, exist_ok=True)
    for number, shard in enumerate(corpus.shards()):
        with webdataset.TarWriter(str(folder / f"part-{number:03}.tar")) as writer:
            for at, sequence in enumerate(shard):
                writer.write({"__key__": f"{number:03}-{at:07}", "npy": _npy(sequence)})


def _npy(sequence: Tokens) -> bytes:
    file = io.BytesIO()
    np.save(file, sequence)
    return file.getvalue()


def batches(setup: Setup) -> Iterator[torch.Tensor]:
    import webdataset

    paths = sorted(str(path) for path in setup.folder.iterdir())
    data = webdataset.WebDataset(paths, shardshuffle=_SHUFFLE_SHARDS, seed=SEED).shuffle(_SHUFFLE_BUFFER)
    data = data.decode().to_tuple("npy").batched(BATCH_SIZE, partial=False)
    workers = setup.num_workers
    loader = webdataset.WebLoader(data, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    while True:
        for (batch,) in loader:
            yield torch.as_tensor(batch).to(torch.int64)


PEER = Peer(
    name="WebDataset",
    environment="peers",
    packages=("webdataset",),
    reads="tar files of npy",
    shuffle=f"files, then a buffer of {_SHUFFLE_BUFFER:,}",
    ahead="it reads tar files on the trainer's own disk from one end to the other. It resumes by reading what is before, and "
    "mixes no more than its buffer holds.",
    prepare=prepare,
    batches=batches,
)
