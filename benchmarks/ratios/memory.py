"""Memory of the server that no file backs, at its most in a first epoch: of ten times as much data, and of as much.

The larger dataset is the same shards under ten times as many names, each decoded and cached for itself.
"""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import data
from corpus import BATCH_SIZE, SEQ_LEN
from penstock import RemoteDataset
from processes import own_anonymous_bytes
from ratios import Ratio, Scale, in_turn
from servers import penstock

_SMALL, _LARGE = 2, 20  # times the corpus
_REPEATS = 3  # how many bodies are in the making at the peak is chance
_LOOK_SECONDS = 0.02  # a peak is as short as a body; looked at less often, the longer run would show more of them


def measure(scale: Scale) -> list[Ratio]:
    repeats = min(_REPEATS, scale.num_repeats)
    small, large = in_turn(repeats, partial(_most_bytes, scale, _SMALL), partial(_most_bytes, scale, _LARGE))
    corpus_bytes = 2 * SEQ_LEN * scale.num_samples
    return [
        Ratio(
            what=f"the server's anonymous memory at most, {_LARGE * corpus_bytes / 1e9:.1f} GB of ids",
            against=f"{_SMALL * corpus_bytes / 1e9:.1f} GB of ids",
            ours=large,
            theirs=small,
            unit="B",
        )
    ]


def _most_bytes(scale: Scale, times: int) -> float:
    folder, cache = scale.work / f"memory-{times}", scale.work / "memory-cache"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        for shard in sorted((data.corpus(scale).parquet / "tokens").glob("*.parquet")):
            for number in range(times):
                copy = folder / "tokens" / f"{shard.stem}-{number}.parquet"
                copy.parent.mkdir(parents=True, exist_ok=True)
                os.link(shard, copy)
        return most_bytes(folder, cache)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def most_bytes(place: Path | str, cache: Path) -> float:
    """Return the server's anonymous memory at most, in a first epoch with an empty cache."""
    shutil.rmtree(cache, ignore_errors=True)
    try:
        with penstock(place, cache) as server, closing(_Watch(server.pid)) as watch:
            for _ in RemoteDataset(server.address, "tokens", batch_size=BATCH_SIZE, seq_len=SEQ_LEN, tensors=["input_ids"]):
                pass
        return watch.most_bytes
    finally:
        shutil.rmtree(cache, ignore_errors=True)


class _Watch:
    """Looks at a process now and then, from a thread."""

    def __init__(self, pid: int) -> None:
        self.most_bytes = 0
        self._pid, self._closed = pid, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            self.most_bytes = max(self.most_bytes, own_anonymous_bytes(self._pid))
