"""MosaicML Streaming: MDS shards of uint16 arrays on local disk, its own shuffle, under torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch.utils.data import DataLoader

from corpus import BATCH_SIZE, SEQ_LEN, Corpus
from peers import SEED, Peer, Setup


def _stand_in_for_torchvision() -> None:
    """Declares the operators that torchvision asks for when it is imported, as Streaming does for images.

    A build of torch without CUDA has no operators of the torchvision that is meant for one with it. Tokens need none.
    """
    for name in ("nms", "qnms"):
        with suppress(RuntimeError):  # it is there
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def prepare(corpus: Corpus, folder: Path) -> None:
    _stand_in_for_torchvision()
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{SEQ_LEN}"}) as writer:
        for shard in corpus.shards():
            for sequence in shard:
                writer.write({"tokens": sequence})


def batches(setup: Setup) -> Iterator[torch.Tensor]:
    _stand_in_for_torchvision()
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    # What it downloads goes to an empty folder.
    local = mkdtemp() if setup.url else str(setup.folder)
    data = StreamingDataset(remote=setup.url or None, local=local, shuffle=True, shuffle_seed=SEED, batch_size=BATCH_SIZE)
    workers = setup.num_workers
    loader = DataLoader(data, batch_size=BATCH_SIZE, drop_last=True, num_workers=workers, persistent_workers=workers > 0)
    while True:
        for batch in loader:
            yield batch["tokens"].to(torch.int64)


PEER = Peer(
    name="MosaicML Streaming",
    environment="mosaicml",
    packages=("mosaicml-streaming",),
    reads="MDS shards",
    shuffle="shards, and sequences within blocks of shards",
    ahead="it reads shards on the trainer's own disk by the number of a sample: there is no server between. It asks for a copy "
    "of the data in its own format.",
    prepare=prepare,
    batches=batches,
)
