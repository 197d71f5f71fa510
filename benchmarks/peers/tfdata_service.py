"""tf.data service: a dispatcher and a worker in a process of their own, which shuffle and batch, over gRPC on loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from corpus import BATCH_SIZE, SEQ_LEN, Corpus
from peers import SEED, SHUFFLE_BUFFER, Peer, Setup


def prepare(corpus: Corpus, folder: Path) -> None:
    import tensorflow as tf

    folder.mkdir(parents=True, exist_ok=True)
    for number, shard in enumerate(corpus.shards()):
        with tf.io.TFRecordWriter(str(folder / f"part-{number:03}.tfrecord")) as writer:
            for sequence in shard:
                writer.write(sequence.tobytes())


def serve(corpus: Corpus, folder: Path) -> None:
    import tensorflow as tf

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    print(dispatcher.target, flush=True)
    worker.join()


def batches(setup: Setup) -> Iterator[torch.Tensor]:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import tensorflow as tf

    auto, service = tf.data.AUTOTUNE, tf.data.experimental.service
    paths = sorted(str(path) for path in setup.folder.iterdir())
    files = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths), seed=SEED)
    data = files.interleave(tf.data.TFRecordDataset, num_parallel_calls=auto, deterministic=False)
    data = data.shuffle(SHUFFLE_BUFFER).batch(BATCH_SIZE, drop_remainder=True)
    data = data.map(lambda raw: tf.reshape(tf.io.decode_raw(raw, tf.uint16), [BATCH_SIZE, SEQ_LEN]), num_parallel_calls=auto)
    distributed = service.distribute(
        processing_mode=service.ShardingPolicy.DYNAMIC,
        service=setup.address,
        compression=None,  # on one machine it costs more than it saves: with its "AUTO" a third fewer tokens a second
    )
    data = data.apply(distributed)
    while True:
        for batch in data.prefetch(auto).as_numpy_iterator():
            yield torch.from_numpy(batch.astype(np.int64))


PEER = Peer(
    name="tf.data service",
    environment="peers",
    packages=("tensorflow-cpu",),
    reads="TFRecord, over gRPC, uncompressed",
    shuffle=f"files, then a buffer of {SHUFFLE_BUFFER:,}",
    ahead="its batches come over gRPC without digests, masks and labels, and its server, all of it C++, shuffles in a buffer, "
    "so that it reads files from one end to the other. A batch has no address: nothing tells what it was, and resuming needs a "
    "snapshot of the server's state.",
    workers=(0,),
    prepare=prepare,
    batches=batches,
    serve=serve,
)
