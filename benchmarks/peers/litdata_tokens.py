"""LitData: chunks of ids written by `optimize` with a TokensLoader, read by StreamingDataset and StreamingDataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from corpus import BATCH_SIZE, NUM_SHARDS, SEQ_LEN, Corpus
from peers import SEED, Peer, Setup


def _documents(shard: int, folder: Path) -> Iterator[torch.Tensor]:
    tokens = list(Corpus.open(folder).shards())[shard]
    for start in range(0, len(tokens), BATCH_SIZE):
        yield torch.from_numpy(tokens[start : start + BATCH_SIZE].reshape(-1).copy())


def prepare(corpus: Corpus, folder: Path) -> None:
    import litdata

    litdata.optimize(
        fn=partial(_documents, folder=corpus.folder),
        inputs=list(range(NUM_SHARDS)),
        output_dir=str(folder),
        chunk_size=corpus.num_samples // NUM_SHARDS * SEQ_LEN,
        item_loader=litdata.TokensLoader(),
        num_workers=1,
    )


def batches(setup: Setup) -> Iterator[torch.Tensor]:
    import litdata

    tokens = litdata.TokensLoader(block_size=SEQ_LEN)
    if setup.url:
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no setting for a store without TLS
    place = setup.url or str(setup.folder)
    data = litdata.StreamingDataset(place, item_loader=tokens, shuffle=True, drop_last=True, seed=SEED)
    workers = setup.num_workers
    loader = litdata.StreamingDataLoader(data, batch_size=BATCH_SIZE, num_workers=workers, persistent_workers=workers > 0)
    while True:
        for batch in loader:
            yield batch.to(torch.int64)


PEER = Peer(
    name="LitData TokensLoader",
    environment="peers",
    packages=("litdata",),
    reads="chunks of uint16",
    shuffle="chunks, and sequences within a chunk",
    ahead="it maps chunks on the trainer's own disk, and makes no digest, mask or label. It asks for a copy of the data in its "
    "own format, and mixes sequences of one chunk at a time, in windows of 256.",
    prepare=prepare,
    batches=batches,
)
