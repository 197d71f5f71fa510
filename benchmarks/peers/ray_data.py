"""Ray Data: Parquet with tensor columns, files in a shuffled order, a local shuffle buffer, batches as torch tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, int64

from corpus import BATCH_SIZE, Corpus
from peers import SEED, SHUFFLE_BUFFER, Peer, Setup


def _start() -> None:
    import ray

    # In the trainer's environment as it is; its own processes are those of the loader.
    ray.init(include_dashboard=False, log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False


def prepare(corpus: Corpus, folder: Path) -> None:
    import ray

    _start()
    for shard in corpus.shards():
        ray.data.from_numpy(shard).repartition(1).write_parquet(str(folder), mode="append")


def batches(setup: Setup) -> Iterator[Tensor]:
    import ray

    _start()
    data = ray.data.read_parquet(str(setup.folder), shuffle="files")
    while True:
        for batch in data.iter_torch_batches(
            batch_size=BATCH_SIZE,
            dtypes=int64,
            drop_last=True,
            local_shuffle_buffer_size=SHUFFLE_BUFFER,
            local_shuffle_seed=SEED,
        ):
            yield batch["data"]


PEER = Peer(
    name="Ray Data",
    environment="peers",
    packages=("ray",),
    reads="Parquet with tensors",
    shuffle=f"files, then a buffer of {SHUFFLE_BUFFER:,}",
    ahead="its tasks read whole files on the trainer's own machine, and batches come out of shared memory. It resumes by "
    "reading what is before, and mixes no more than its buffer holds.",
    workers=(0,),  # it has processes of its own, as many as there are cores
    prepare=prepare,
    batches=batches,
)
