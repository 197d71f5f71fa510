"""Grain: a MapDataset over ArrayRecord files, shuffled globally, batched, read by threads or by worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from corpus import BATCH_SIZE, Corpus, Tokens
from peers import SEED, Peer, Setup


def _decode(record: bytes) -> npt.NDArray[np.uint16]:
    return np.frombuffer(record, np.uint16)


def prepare(corpus: Corpus, folder: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    for number, shard in enumerate(corpus.shards()):
        # Groups of one record, as its documentation asks for where reads are random.
        _write(ArrayRecordWriter(str(folder / f"part-{number:03}.array_record"), "group_size:1,uncompressed"), shard)


def _write(writer: object, shard: Tokens) -> None:
    for sequence in shard:
        writer.write(sequence.tobytes())  # type: ignore[attr-defined]
    writer.close()  # type: ignore[attr-defined]


def batches(setup: Setup) -> Iterator[torch.Tensor]:
    import grain

    paths = sorted(str(path) for path in setup.folder.iterdir())
    records = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths))
    batched = records.shuffle(seed=SEED).map(_decode).batch(BATCH_SIZE, drop_remainder=True).repeat()
    # As its documentation advises where the data is in memory: threads would wait for each other's interpreter.
    data = batched.to_iter_dataset(grain.ReadOptions(num_threads=0))
    if setup.num_workers:
        data = data.mp_prefetch(grain.MultiprocessingOptions(num_workers=setup.num_workers))
    for batch in data:
        yield torch.from_numpy(batch.astype(np.int64))


PEER = Peer(
    name="Grain MapDataset",
    environment="peers",
    packages=("grain", "array-record"),
    reads="ArrayRecord",
    shuffle="exact, the whole epoch",
    ahead="it reads records from the trainer's own disk by their number: there is no server between. It asks for a copy of the "
    "data in ArrayRecord on every trainer.",
    prepare=prepare,
    batches=batches,
)
